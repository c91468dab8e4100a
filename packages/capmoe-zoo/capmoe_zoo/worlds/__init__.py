"""The worlds of the embedded models, and the evaluation sets about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capmoe_eval.zoo.sets import Configs


def documents(split: str, seed: int) -> Mapping[str, Configs]:
    """Return the ``dev`` or ``test`` sets of the mini-world of a seed, for the suite."""
    from capmoe_zoo.worlds.miniworld import evaluation

    return evaluation.documents(split, seed)
