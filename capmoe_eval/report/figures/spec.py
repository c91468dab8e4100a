"""The types of a figure: how it is declared, and what it is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What a figure is made from, and what of it is missing.

    Attributes:
        profile: Name of the profile, under which the figure is written.
        planned: Number of records, or of models with a run, that there should be.
        digests: Digests of what was read; empty where there is nothing to draw from.
        nothing: Error where there is nothing to draw from; the command that helps follows it.
        names: Fields of the template of the title.
        unit: What is counted, in the plural.
        n_absent: How many are missing, those that cannot be read included.
        absent: Commands that measure what is missing.
        notes: Of each file that cannot be read, and of what a reader must know besides.
    """

    profile: str
    planned: int
    digests: Sequence[str] = ()
    nothing: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    unit: str = "records"
    n_absent: int = 0
    absent: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def left_out(self) -> list[str]:
        """Notes of files that cannot be read."""
        return [note for note in self.notes if note.startswith("Left out")]


def because(broken: Sequence[str]) -> str:
    """Return the first file that cannot be read, in brackets; nothing where there is none."""
    return f" ({broken[0].rstrip('.')})" if broken else ""


@dataclass(frozen=True)
class Spec:
    """One figure, declared: of finished records, or of an efficiency study (``results/bench/``).

    Attributes:
        name: Stem of the written files.
        place: Where the paper has it, or that it does not.
        title: One line; a template that is filled with the names of the sources.
        caption: What is seen, which field of a file it is, and what differs from the paper's.
        measure: :class:`FigureRecords` or :class:`FigureStudies` → numbers.
        draw: Numbers → figure, at its printed size.
        parts: Parts of the experiment ``figures`` (``conf/experiment/figures.yaml``).
        tasks: Of those parts, the tasks that are shown; all where empty.
        model: Of ``profile.figures.models``, the place (from 0) of the one model that is shown;
            None for all models of the parts.
        study: One of :data:`capmoe_eval.experiment.timings.STUDIES`; empty for a figure of records.
        runs: ``best``: one run of each model; ``fullest``: all runs of one file.
        models: The models that there should be of the study; empty where any will do.
    """

    name: str
    place: str
    title: str
    caption: str
    measure: Callable[[Any], Measured]
    draw: Callable[[Numbers], Figure]
    parts: Sequence[str] = ()
    tasks: Sequence[str] = ()
    model: int | None = None
    study: str = ""
    runs: Literal["best", "fullest"] = "best"
    models: Sequence[str] = ()
