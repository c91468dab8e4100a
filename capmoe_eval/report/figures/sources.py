"""The material of figures: planned, there, and missing with the commands for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from omegaconf import open_dict

from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.commands import as_evaluated, other_sources, sweeps
from capmoe_eval.experiment.composition import composed, load_option
from capmoe_eval.experiment.configuration import (
    CellPlan,
    expand_parts,
    model_notes,
    plans_at,
    profile_name,
)
from capmoe_eval.experiment.names import BENCHMARKS
from capmoe_eval.experiment.results import read_records
from capmoe_eval.lazy import pd
from capmoe_eval.report.figures.catalogue import Spec
from capmoe_eval.results.frames import Results, results_of

_NUMBERS: Final = (
    *("gamma", "drop_rate", "effective_gamma", "value", "stderr", "load.mean_peak_after"),
)
"""The columns of cells that figures compute with; γ of another kind is missing."""
_OF_LAYER: Final = (
    *("cell", "model", "title", "task", "asked", "method", "cell.gamma", "candidates", "m"),
)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The material of a figure, and what of it is missing; everything in the order of the plan."""

    profile: str
    planned: int  # records, or models with a run, that there should be
    digests: Sequence[str] = ()  # of what is there; empty where there is nothing to draw from
    nothing: str = ""  # the error in that case; the command that helps, if any, follows it
    names: Mapping[str, str] = field(default_factory=dict)  # for the template of the title
    unit: str = "records"  # what is counted
    n_absent: int = 0  # missing ones, those that cannot be read included
    absent: Sequence[str] = ()  # commands that measure what is missing
    # On each file that cannot be read, and for readers; the data of a figure add theirs.
    notes: list[str] = field(default_factory=list)
    frames: Callable[[], Results] = lambda: results_of(())  # called when a figure first asks
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)  # digests of their cells
    models: Mapping[str, str] = field(default_factory=dict)  # titles by their keys
    tasks: Mapping[str, str] = field(default_factory=dict)  # titles by their keys
    bench: Path = BENCHMARKS  # of the benchmarks, which a figure may show beside its records

    @property
    def model(self) -> str:
        """Key of the model of a figure of one model."""
        return next(iter(self.models))

    @property
    def title(self) -> str:
        """Title of that model."""
        return self.models[self.model]

    @functools.cached_property
    def results(self) -> Results:
        """The results that are shown; ``title`` is a cell's model's, and ``asked`` its task's."""
        results = self.frames()
        cells = results.cells
        titles = {"title": cells["model"].map(self.models), "asked": cells["task"].map(self.tasks)}
        numbers = {name: pd.to_numeric(cells[name], errors="coerce") for name in _NUMBERS}
        return results._replace(cells=cells.assign(**titles, **numbers))

    def cells(self, *parts: str) -> pd.DataFrame:
        """Return the rows of some parts' cells, each once, in the order of the plan."""
        digests = {digest for part in parts for digest in self.parts.get(part, ())}
        return self.results.cells[self.results.cells["cell"].isin(digests)].copy()

    def layers(self, *parts: str) -> pd.DataFrame:
        """Return the layers of some parts' cells, with the cells' columns that tell them apart."""
        cells = self.cells(*parts).rename(columns={"gamma": "cell.gamma"})
        return self.results.layers.merge(cells[[*_OF_LAYER]], on="cell")


class FigurePlans:
    """A composed experiment; its parts are planned once, when first asked for.

    Overrides are as for ``capmoe-eval run``, but without ``experiment=``.
    """

    def __init__(self, overrides: Sequence[str] = (), experiment: str = "figures") -> None:
        self.overrides = as_evaluated(overrides)
        self.config = composed([f"experiment={experiment}", *self.overrides])
        self.folder = self.profile = profile_name(self.config)
        # A model of the command line takes the place of those of the parts.
        self.own: str | None = None
        if any(word.partition("=")[0] in ("model", "model.name") for word in overrides):
            self.own, self.profile = str(self.config.model.name), str(self.config.model.profile)
            self.folder = f"{self.profile}/{self.own}"
            with open_dict(self.config):
                for part in self.config.parts.values():
                    part.pop("model", None)
        self._points = expand_parts(self.config)
        self._plans: dict[str, list[CellPlan]] = {}
        self._experiments = {experiment: self}

    def of(self, experiment: str) -> FigurePlans:
        """Return the plans of an experiment on the same command line."""
        if experiment not in self._experiments:
            self._experiments[experiment] = FigurePlans(self.overrides, experiment)
        return self._experiments[experiment]

    def plan(self, part: str) -> list[CellPlan]:
        """Return the plans of one part; UsageError if the experiment has no such part."""
        if part not in self._plans:
            if part not in self._points:
                raise bad_choice("parts", part, self._points)
            self._plans[part] = plans_at(self._points[part]())
        return self._plans[part]


def gather(spec: Spec, experiment: FigurePlans, bench: Path = BENCHMARKS) -> Sources:
    """Return the material of a figure; UsageError if the profile does not name the model it shows.

    A record that lies there and belongs to none of the figure's cells is not looked at. A file that
    cannot be read is left out, named in a note and counted as missing. ``experiment`` has the plans
    of some experiment on the command line, whichever the figure shows; ``bench`` is the directory
    of the benchmarks, for figures that show some.
    """
    if spec.gather:
        return spec.gather(spec, experiment, bench)
    experiment = experiment.of(spec.experiment)
    model = _model(spec, experiment)

    def is_shown(cell: Cell) -> bool:
        if model not in (None, cell.model.name):
            return False
        return not spec.tasks or cell.task.name in spec.tasks

    chosen = {part: [p for p in experiment.plan(part) if is_shown(p.cell)] for part in spec.parts}
    planned = {plan.cell.digest: plan for listed in chosen.values() for plan in listed}
    left_out: list[str] = []
    places = (place for plan in planned.values() if (place := plan.stored))
    read = {record.digest: record for record in read_records(places, left_out)}
    broken = [f"Left out: {line}." for line in left_out]
    because = f" ({broken[0].rstrip('.')})" if broken else ""
    absent = [plan.cell for digest, plan in planned.items() if digest not in read]
    if not read and (words := other_sources(absent, Path(str(experiment.config.results_dir)))):
        because += f" ({words} shows those of other documents)"
    models = dict.fromkeys(plan.cell.model.name for plan in planned.values())
    config_model = experiment.config.model
    titles = {
        name: str((config_model if name == experiment.own else load_option("model", name)).title)
        for name in models
    }
    tasks = dict.fromkeys(plan.cell.task.name for plan in planned.values())
    backends = {plan.cell.backend for plan in planned.values()} - {"transformers"}
    notes = [f"Evaluated in the steps of an engine (backend={name})." for name in backends]
    return Sources(
        profile=experiment.profile,
        planned=len(planned),
        digests=[*read],
        nothing=f"has none of its {len(planned)} records{because}; compute them"
        if planned
        else f"profile={experiment.profile} has no model for it",
        names={"model": next(iter(titles.values()), "")},
        n_absent=len(absent),
        absent=sweeps(absent, experiment.overrides),
        notes=[*notes, *broken, *model_notes(planned.values(), titles.__getitem__)],
        frames=functools.partial(results_of, [*read.values()], spec.metrics),
        parts={part: [plan.cell.digest for plan in listed] for part, listed in chosen.items()},
        models=titles,
        tasks={name: str(experiment.config.tasks[name].title) for name in tasks},
        bench=bench,
    )


def _model(spec: Spec, experiment: FigurePlans) -> str | None:
    """Return the key of the one model of a figure whose title names it; None if it shows all."""
    if "{model}" not in spec.title or experiment.own is not None:
        return experiment.own
    if spec.model is None:
        every = (plan.cell.model.name for part in spec.parts for plan in experiment.plan(part))
        return next(every, None)
    models = experiment.config.profile.figures.models
    if spec.model >= len(models):
        raise UsageError(
            f"{spec.name}: shows model {spec.model + 1} of the profile, and profile "
            f"{experiment.profile} names {len(models)} under figures.models"
        )
    return str(models[spec.model])
