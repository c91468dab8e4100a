"""What a figure is, before anything is measured or drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from capmoe_eval.figures.evidence import Evidence

Numbers = dict[str, Any]
"""What a figure shows: numbers, strings, lists and dictionaries, JSON-ready."""


@dataclass(frozen=True)
class Measured:
    """What was found in the records.

    Attributes:
        numbers: Everything that is drawn, and nothing else; ``draw`` sees only this.
        notes: What a reader must know of it, one sentence each.
    """

    numbers: Numbers
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FigureSpec:
    """One figure, declared.

    Attributes:
        name: Stem of the written files.
        place: Where the paper has it, or that it does not.
        title: One line.
        caption: What is seen, which field of a record it is, and what differs from the paper's.
        parts: Parts of the experiment ``figures`` (``conf/experiment/figures.yaml``).
        measure: Records → numbers.
        draw: Numbers → figure, at its printed size.
        tasks: Of those parts, the tasks that are shown; all where empty.
        model: Of ``profile.figures.models``, the place (from 0) of the one model that is shown;
            None for all models of the parts.
    """

    name: str
    place: str
    title: str
    caption: str
    parts: tuple[str, ...]
    measure: Callable[[Evidence], Measured]
    draw: Callable[[Numbers], Figure]
    tasks: tuple[str, ...] = ()
    model: int | None = None
