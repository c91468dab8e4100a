"""What a server pays, and what placements of experts give: ``capmoe-eval bench NAME``."""

from types import SimpleNamespace
from typing import Final

from capmoe_bench.benchmarks import read_benchmarks

BENCHMARKS: Final = SimpleNamespace(**read_benchmarks("capmoe_serve.bench"))
"""Each benchmark by its name, which its entry point names."""
