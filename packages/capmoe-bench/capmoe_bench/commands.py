"""The subcommand of ``capmoe-eval`` that this package brings."""

from typing import Final

BENCH: Final = (
    "Maintain",
    "measure speed: layers under expert parallelism, and the suite itself",
    "capmoe_bench.benchmarks:main",
)
