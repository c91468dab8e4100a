"""The files of ``results/bench/``: their studies, types, units and commands."""
