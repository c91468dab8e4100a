"""All figures, as files `catalogue.yaml` declare them, and what each is made from.

The suite's is beside this module; packages beside the suite have theirs, by the entry points of the
group :data:`ENTRY_POINTS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final, Literal

from capmoe_eval.beside import check_installed, load_entry_points
from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.experiment.data_file import read_data

if TYPE_CHECKING:
    from capmoe_eval.report.figures.panels import Picture

ENTRY_POINTS: Final = "capmoe_eval.figures"
"""The group of entry points: an experiment that is drawn, and the package of its catalogue."""


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
    package: str  # of the catalogue
    # ``module.function`` of that package, from sources to a picture. The module, and with it
    # matplotlib, is imported when the figure is made.
    made_by: str
    # Of records: parts of an experiment; of these some tasks, or all; and
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
        picture: Picture = resolve_name(f"{self.package}.{self.made_by}")(sources)
        return picture


def _figures() -> Iterator[Spec]:
    packages = [package.__name__ for package in load_entry_points(ENTRY_POINTS).values()]
    for package in dict.fromkeys([__package__, *packages]):
        catalogue = read_data(package, "catalogue.yaml", dict[str, Any])
        paper_models = catalogue.get("paper_models", [""])
        for name, entry in catalogue["figures"].items():
            words = catalogue["phrases"] | {"paper_model": paper_models[entry.get("model", 0)]}
            entry["caption"] = entry["caption"].format(**words)
            yield Spec(name=name, package=package, **entry)


FIGURES: Final = tuple(_figures())
"""In the order of the files."""


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
        check_installed(f"figure {name}")
        mistake = bad_choice("figure", name, ["all", *figures])
        raise UsageError(f"{mistake}; the paper's Figure 3 is a diagram")
    return figures[name]
