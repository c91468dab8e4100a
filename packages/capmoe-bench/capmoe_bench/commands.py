"""The subcommand of ``capmoe-eval`` that this package brings."""

from __future__ import annotations

from typing import Final

from capmoe_eval.beside import Subcommand

BENCH: Final = Subcommand(
    "Maintain",
    "measure speed: layers under expert parallelism, and the suite itself",
    "capmoe_bench.benchmarks:main",
)
