"""The experiments of the package, which Hydra finds here."""
