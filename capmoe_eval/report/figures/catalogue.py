"""All figures, what each is made from, and how a module declares one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.beside import check_installed, load_entry_points
from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.lazy import pd
from capmoe_eval.report.figures.drawing import STYLE, Figure

if TYPE_CHECKING:
    from capmoe_eval.report.figures.sources import FigurePlans, Sources

ENTRY_POINTS: Final = "capmoe_eval.figures"
"""The group of entry points of packages that declare figures when they are imported."""
_MODULES: Final = ("expert_load", "routing", "scores", "images")
"""The modules of this package that declare figures."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One figure."""

    name: str  # stem of the written files
    place: str  # in the paper, or that it is not there
    title: str  # one line; a template that is filled with the names of the sources
    caption: str  # what is seen, and what differs from the paper's
    data: Callable[[Any], pd.DataFrame]  # the numbers of its sources, tidy
    draw: Callable[[pd.DataFrame], Figure]  # the picture of these numbers, of nothing else
    # Of records: parts of an experiment; of these some tasks, or all; and
    # the place (from 0) in ``profile.figures.models`` of the one model shown, or all models.
    experiment: str = "figures"
    parts: Sequence[str] = ()
    tasks: Sequence[str] = ()
    metrics: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of a task, if not its own
    model: int | None = None
    # Of anything else: returns its sources, from the plans of the command line and the directory
    # of the benchmarks.
    gather: Callable[[Spec, FigurePlans, Path], Sources] | None = None
    folder: str = ""  # in that of all reports; empty for that of the plans

    @property
    def package(self) -> str:
        """The package that declares it, with its dots."""
        return self.data.__module__.rpartition(".")[0]

    def __call__(self, sources: Sources) -> Figure:
        """Return the figure of some sources, drawn in the house style."""
        import matplotlib

        with matplotlib.rc_context(fname=STYLE):
            return self.draw(self.data(sources))


_declared: dict[str, Spec] = {}


def figure(
    place: str,
    title: str,
    data: Callable[[Any], pd.DataFrame],
    name: str = "",
    words: Mapping[str, str] | None = None,
    **fields: Any,
) -> Callable[[Callable[[pd.DataFrame], Figure]], Spec]:
    """Declare a function that draws ``data`` as a figure: by its name, its docstring the caption.

    Args:
        place: The figure's place in the paper.
        title: The title, a template of the names of its sources.
        data: Returns the numbers that the function draws.
        name: The figure's name, if it is not the function's.
        words: What the caption's templates stand for.
        fields: Further fields of :class:`Spec`.
    """

    def declare(draw: Callable[[pd.DataFrame], Figure]) -> Spec:
        caption = " ".join((inspect.getdoc(draw) or "").split())
        fields["caption"] = caption.format(**words) if words else caption
        fields.update(name=name or draw.__name__, place=place, title=title)
        spec = _declared[fields["name"]] = Spec(**fields, data=data, draw=draw)
        return spec

    return declare


@functools.cache
def figures() -> Mapping[str, Spec]:
    """Return every figure by its name, the paper's in its order, then the others."""
    for module in _MODULES:
        import_module(f"{__package__}.{module}")
    load_entry_points(ENTRY_POINTS)

    def order(name: str) -> tuple[int, int]:
        number = name.removeprefix("fig")
        if number.isdecimal():
            return 0, int(number)
        return (1 if name.startswith("v1_") else 2), 0

    return {name: _declared[name] for name in sorted(_declared, key=order)}


def get_figure(name: str) -> Spec:
    """Return a figure by its name; UsageError if there is none of that name."""
    if name not in figures():
        check_installed(f"figure {name}")
        mistake = bad_choice("figure", name, ["all", *figures()])
        raise UsageError(f"{mistake}; the paper's Figure 3 is a diagram")
    return figures()[name]
