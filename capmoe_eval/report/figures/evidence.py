"""Records of a figure: planned, there, and missing with the commands for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.commands import sweeps
from capmoe_eval.experiment.composition import load_option
from capmoe_eval.experiment.configuration import (
    CellPlan,
    expand_parts,
    model_notes,
    plans_at,
    profile_name,
)
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import Reader
from capmoe_eval.experiment.selection import composed, refuse_experiment
from capmoe_eval.report.figures.catalogue import Sources, Spec, because
from capmoe_eval.report.figures.pooling import by_key

if TYPE_CHECKING:
    from capmoe_eval.experiment.timings.rows import Balance
    from capmoe_eval.paper.benchmarks import Bench


@dataclass(frozen=True, kw_only=True)
class FigureRecords(Sources):
    """The records that a figure shows; everything is in the order of the plan."""

    records: Mapping[str, Sequence[Record]]  # by part; only those that are there and whole
    models: Mapping[str, str]  # titles by their keys
    tasks: Mapping[str, str]  # titles by their keys
    balances: Sequence[Balance] = ()  # of a figure that shows a benchmark beside its records

    @property
    def model(self) -> str:
        """Key of the model of a figure of one model."""
        return next(iter(self.models))

    @property
    def title(self) -> str:
        """Title of that model."""
        return self.models[self.model]

    def by_model(self, *parts: str) -> dict[str, list[Record]]:
        """Return the records of some parts by model, each once, in the order of the plan."""
        records = {record.path: record for part in parts for record in self.records.get(part, ())}
        return by_key(records.values(), lambda record: record.model)

    def of_model(self, *parts: str) -> list[Record]:
        """Return the records of some parts, of :attr:`model` alone."""
        return self.by_model(*parts).get(self.model, [])


class FigurePlans:
    """A composed experiment; its parts are planned once, when first asked for.

    Overrides are as for ``capmoe-eval run``, but without ``experiment=`` (UsageError).
    """

    def __init__(
        self,
        overrides: Sequence[str] = (),
        reader: Reader | None = None,  # of the records
        experiment: str = "figures",
    ) -> None:
        refuse_experiment(overrides)
        self.overrides = overrides
        self.config = composed([f"experiment={experiment}", *overrides])
        self.profile = profile_name(self.config)
        self.reader = reader or Reader()
        self._points = expand_parts(self.config)
        self._plans: dict[str, list[CellPlan]] = {}
        self._experiments = {experiment: self}

    def of(self, experiment: str) -> FigurePlans:
        """Return the plans of an experiment on the same command line."""
        if experiment not in self._experiments:
            self._experiments[experiment] = FigurePlans(self.overrides, self.reader, experiment)
        return self._experiments[experiment]

    def plan(self, part: str) -> list[CellPlan]:
        """Return the plans of one part; UsageError if the experiment has no such part."""
        if part not in self._plans:
            if part not in self._points:
                raise bad_choice("parts", part, self._points)
            self._plans[part] = plans_at(self._points[part]())
        return self._plans[part]


def gather(spec: Spec, experiment: FigurePlans, bench: Bench | None = None) -> FigureRecords:
    """Return the records of a figure; UsageError if the profile does not name the model it shows.

    A record that lies there and belongs to none of the figure's cells is not looked at. One that
    cannot be read is left out, named in a note and counted as missing. ``experiment`` has the plans
    of some experiment on the command line, whichever the figure shows; ``bench`` is for a figure
    that shows a benchmark beside its records.
    """
    experiment = experiment.of(spec.experiment)
    model = _model(spec, experiment)

    def is_shown(cell: Cell) -> bool:
        if model not in (None, cell.model.name):
            return False
        return not spec.tasks or cell.task.name in spec.tasks

    chosen = {part: [p for p in experiment.plan(part) if is_shown(p.cell)] for part in spec.parts}
    planned = {plan.cell.digest: plan for listed in chosen.values() for plan in listed}
    results = experiment.reader.all(place for plan in planned.values() if (place := plan.stored))
    read = {record.cell.digest: record for record in results.records}
    broken = [f"Left out: {line}." for line in results.broken]
    absent = [plan.cell for digest, plan in planned.items() if digest not in read]
    models = dict.fromkeys(plan.cell.model.name for plan in planned.values())
    titles = {name: str(load_option("model", name).title) for name in models}
    tasks = dict.fromkeys(plan.cell.task.name for plan in planned.values())
    backends = {plan.cell.backend for plan in planned.values()} - {"transformers"}
    notes = [f"Evaluated in the steps of an engine (backend={name})." for name in backends]
    return FigureRecords(
        profile=experiment.profile,
        planned=len(planned),
        digests=[record.cell.digest for record in results.records],
        nothing=f"has none of its {len(planned)} records{because(broken)}; compute them"
        if planned
        else f"profile={experiment.profile} has no model for it",
        names={"model": next(iter(titles.values()), "")},
        n_absent=len(absent),
        absent=sweeps(absent, experiment.overrides),
        notes=(*notes, *broken, *model_notes(planned.values(), titles.__getitem__)),
        records={
            part: [read[digest] for plan in listed if (digest := plan.cell.digest) in read]
            for part, listed in chosen.items()
        },
        models=titles,
        tasks={name: str(experiment.config.tasks[name].title) for name in tasks},
        balances=bench.balances if bench else (),
    )


def _model(spec: Spec, experiment: FigurePlans) -> str | None:
    """Return the key of the one model of a figure whose title names it; None if it shows all."""
    if "{model}" not in spec.title:
        return None
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
