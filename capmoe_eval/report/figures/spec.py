"""What a figure is, before anything is measured or drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from capmoe_eval.errors import UsageError

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


class Sources(Protocol):
    """What a figure is made from, and what of it is missing."""

    @property
    def profile(self) -> str:
        """Name of the profile, under which the figure is written."""

    @property
    def digests(self) -> list[str]:
        """What was read, one digest each; empty where there is nothing to draw from."""

    @property
    def names(self) -> Mapping[str, str]:
        """Fields of the templates of title and caption."""

    @property
    def unit(self) -> str:
        """What is counted, in the plural."""

    @property
    def planned(self) -> int:
        """How many there should be."""

    @property
    def n_absent(self) -> int:
        """How many are missing, those that cannot be read included."""

    @property
    def absent(self) -> tuple[str, ...]:
        """Commands that measure what is missing."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Of each file that cannot be read, and of what a reader must know besides."""

    def nothing(self, name: str) -> UsageError:
        """Return the error for a figure that has nothing, with the command that helps."""


@dataclass(frozen=True)
class Spec:
    """One figure, declared.

    Attributes:
        name: Stem of the written files.
        place: Where the paper has it, or that it does not.
        title: One line.
        caption: What is seen, which field of a file it is, and what differs from the paper's.
        measure: Sources, those of its kind of figure, → numbers.
        draw: Numbers → figure, at its printed size.
    """

    name: str
    place: str
    title: str
    caption: str
    measure: Callable[[Any], Measured]
    draw: Callable[[Numbers], Figure]


@dataclass(frozen=True)
class FigureSpec(Spec):
    """A figure of finished records.

    Attributes:
        parts: Parts of the experiment ``figures`` (``conf/experiment/figures.yaml``).
        tasks: Of those parts, the tasks that are shown; all where empty.
        model: Of ``profile.figures.models``, the place (from 0) of the one model that is shown;
            None for all models of the parts.
    """

    parts: tuple[str, ...]
    tasks: tuple[str, ...] = ()
    model: int | None = None


@dataclass(frozen=True)
class StudySpec(Spec):
    """A figure of an efficiency study (``results/bench/``), the same in every profile.

    Attributes:
        study: One of :data:`capmoe_eval.experiment.timings.STUDIES`.
        runs: ``best``: one run of each model; ``fullest``: all runs of one file.
        models: The models that there should be; empty where any will do.
    """

    study: str
    runs: Literal["best", "fullest"] = "best"
    models: tuple[str, ...] = ()
