"""The suite's own benchmarks: ``python -m capmoe_eval.bench``."""
