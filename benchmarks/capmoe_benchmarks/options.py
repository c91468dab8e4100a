"""The benchmarks and their options, from ``options.yaml``, without torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Final

from capmoe_bench.benchmarks import read_benchmarks

RANKS: Final = 8
"""Emulated ranks of ``expanded_drop`` in ``forward``, as in the paper's efficiency runs."""
GAMMAS: Final = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5)
"""Capacity factors of the grid that ``suite`` computes."""
BENCHMARKS: Final = SimpleNamespace(
    **read_benchmarks("capmoe_benchmarks", ranks=RANKS, cells=len(GAMMAS))
)
"""Each benchmark by its name, which its entry point names."""
