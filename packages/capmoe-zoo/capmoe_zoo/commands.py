"""The subcommand of ``capmoe-eval`` that this package brings."""

from __future__ import annotations

from collections.abc import Iterable

from capmoe_eval.beside import Subcommand
from capmoe_eval.zoo import WEIGHTS


def _names() -> Iterable[str]:
    return sorted(path.name for path in WEIGHTS.iterdir())


TRAIN = Subcommand(
    "Evaluate",
    "train an embedded model from its recipe",
    "capmoe_zoo.embedded.command:main",
    _names,
)
