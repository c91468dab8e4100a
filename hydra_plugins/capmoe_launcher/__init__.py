"""The launcher of capmoe_eval's sweeps, where Hydra looks for plugins."""
