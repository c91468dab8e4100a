"""The benchmarks and their options, from ``options.yaml``, without torch."""

from types import SimpleNamespace
from typing import Final

from capmoe_bench.benchmarks import read_benchmarks

RANKS: Final = 8
"""Emulated ranks of ``expanded_drop`` in ``forward``, as in the paper's efficiency runs."""
BENCHMARKS: Final = SimpleNamespace(**read_benchmarks("capmoe_benchmarks", ranks=RANKS))
"""Each benchmark by its name, which its entry point names."""
