"""The subcommand of ``capmoe-eval`` that this package brings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from capmoe_eval.beside import Subcommand


def _names() -> Iterable[str]:
    from capmoe_bench.benchmarks import benchmarks

    return benchmarks()


BENCH: Final = Subcommand(
    "Maintain", "measure the suite itself", "capmoe_bench.benchmarks:main", _names
)
