"""All figures, as `catalogue.yaml` declares them, and what each is made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final, Literal

from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.experiment.data_file import read_data

if TYPE_CHECKING:
    from capmoe_eval.report.figures.panels import Picture


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The material of a figure, and what of it is missing."""

    profile: str  # under which the figure is written
    planned: int  # records, or models with a run, that there should be
    digests: Sequence[str] = ()  # of what was read; empty where there is nothing to draw from
    nothing: str = ""  # the error in that case; the command that helps, if any, follows it
    names: Mapping[str, str] = field(default_factory=dict)  # for the template of the title
    unit: str = "records"  # what is counted
    n_absent: int = 0  # missing ones, those that cannot be read included
    absent: Sequence[str] = ()  # commands that measure what is missing
    notes: Sequence[str] = ()  # on each file that cannot be read, and for readers


@dataclass(frozen=True)
class Spec:
    """One figure, declared: of finished records, or of an efficiency study (``results/bench/``)."""

    name: str  # stem of the written files
    place: str  # in the paper, or that it is not there
    title: str  # one line; a template that is filled with the names of the sources
    caption: str  # what is seen, and what differs from the paper's
    # ``module.function`` of this package, from sources to a picture. The module, and with it
    # matplotlib, is imported when the figure is made.
    made_by: str
    # Of records: parts of an experiment of ``conf/experiment/``; of these some tasks, or all; and
    # the place (from 0) in ``profile.figures.models`` of the one model shown, or all models.
    experiment: str = "figures"
    parts: Sequence[str] = ()
    tasks: Sequence[str] = ()
    model: int | None = None
    has_balances: bool = False  # the benchmark ``placement`` is shown beside them
    # Of a study: one run of each model or all runs of one file, and the models that there should
    # be; empty where any will do.
    study: str = ""
    runs: Literal["best", "fullest"] = "best"
    models: Sequence[str] = ()

    def make(self, sources: Sources) -> Picture:
        """Return what the figure shows."""
        picture: Picture = resolve_name(f"{__package__}.{self.made_by}")(sources)
        return picture


def _figures() -> Iterator[Spec]:
    catalogue = read_data(__package__, "catalogue.yaml", dict[str, Any])
    for name, entry in catalogue["figures"].items():
        paper_model = catalogue["paper_models"][entry.get("model", 0)]
        entry["caption"] = entry["caption"].format(**catalogue["phrases"], paper_model=paper_model)
        yield Spec(name=name, **entry)


FIGURES: Final = tuple(_figures())
"""In the order of the file."""


def because(broken: Sequence[str]) -> str:
    """Return the first file that cannot be read, in brackets; nothing where there is none."""
    return f" ({broken[0].rstrip('.')})" if broken else ""


def get_figure(name: str) -> Spec:
    """Return a figure by its name.

    Raises:
        UsageError: If there is none of that name.
    """
    figures = {spec.name: spec for spec in FIGURES}
    if name not in figures:
        mistake = bad_choice("figure", name, ["all", *figures])
        raise UsageError(f"{mistake}; the paper's Figure 3 is a diagram")
    return figures[name]
