"""The records of a figure: which there should be, which there are, and how to get the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from omegaconf import DictConfig

from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.experiment.commands import sweeps
from capmoe_eval.experiment.configuration import (
    Plan,
    grids,
    load_option,
    model_notes,
    plans,
    profile_name,
)
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import Reader
from capmoe_eval.experiment.selection import composed, refuse_experiment
from capmoe_eval.report.figures.spec import FigureSpec


@dataclass(frozen=True)
class FigureRecords:
    """The records that a figure shows.

    Attributes:
        records: By part, in the order of the plan; only those that are there and whole.
        profile: Name of the profile.
        models: Titles of the models by their keys, in the order of the plan.
        tasks: Titles of the tasks by their keys, in the order of the plan.
        planned: Number of planned cells.
        absent: Commands that measure what is missing.
        n_absent: Number of missing records, those that cannot be read included.
        notes: Of each record that cannot be read, and of models whose numbers need a word.
    """

    records: Mapping[str, tuple[Record, ...]]
    profile: str
    models: Mapping[str, str]
    tasks: Mapping[str, str]
    planned: int
    absent: tuple[str, ...] = ()
    n_absent: int = 0
    notes: tuple[str, ...] = ()
    unit = "records"

    @property
    def digests(self) -> list[str]:
        """The digests of the records' cells."""
        return [record.cell.digest for record in self.all]

    @property
    def names(self) -> Mapping[str, str]:
        """Fields of the templates of title and caption."""
        return {"model": self.models[self.model], "profile": self.profile}

    def nothing(self, name: str) -> UsageError:
        """Return the error for a figure without any record, with the command for the first."""
        broken = [note for note in self.notes if note.startswith("Left out")]
        why = f" ({broken[0].rstrip('.')})" if broken else ""
        more = f" (and {len(self.absent) - 1} more: add --missing)" if self.absent[1:] else ""
        return UsageError(
            f"{name}: none of its {self.planned} records is there{why}; measure them: "
            f"{self.absent[0]}{more}"
        )

    @property
    def all(self) -> tuple[Record, ...]:
        """Every record once, in the order of the plan."""
        found = {record.path: record for records in self.records.values() for record in records}
        return tuple(found.values())

    @property
    def model(self) -> str:
        """The one model of a figure of one model: the first that is planned."""
        return next(iter(self.models))

    def of(self, *parts: str, model: str | None = None) -> list[Record]:
        """Return the records of some parts, for one model or all, each once."""
        found = {record.path: record for part in parts for record in self.records.get(part, ())}
        return [record for record in found.values() if model in (None, record.model)]


@dataclass
class FigurePlans:
    """The composed experiment ``figures``; its parts are planned once, when first asked for.

    Args:
        overrides: As for ``python -m capmoe_eval``: ``profile=zoo``, ``limit=100``.

    Raises:
        UsageError: If ``experiment=`` is among them.
    """

    overrides: Sequence[str] = ()
    _plans: dict[str, list[Plan]] = field(default_factory=dict)
    _reader: Reader = field(default_factory=Reader)

    def __post_init__(self) -> None:
        refuse_experiment(self.overrides)
        self.config: DictConfig = composed(["experiment=figures", *self.overrides])
        grids(self.config)

    @property
    def profile(self) -> str:
        """Name of the profile."""
        return profile_name(self.config)

    @property
    def models(self) -> list[str]:
        """Keys of the models that Figures 13 to 16 show, in this order."""
        return [str(name) for name in self.config.profile.figures.models]

    def plan(self, part: str) -> list[Plan]:
        """Return the plans of one part.

        Raises:
            UsageError: If the experiment has no such part.
        """
        if part not in self._plans:
            if part not in self.config.parts:
                raise bad_choice("parts", part, [str(name) for name in self.config.parts])
            config = self.config.copy()
            config.grid, config.parts = {}, {part: self.config.parts[part]}
            self._plans[part] = plans(config)
        return self._plans[part]

    def record(self, plan: Plan) -> Record | str | None:
        """Return a plan's record, or what is wrong with it, or None; each file is read once."""
        if not plan.path.exists():
            return None
        try:
            return self._reader(plan.path, plan.root)
        except UsageError as error:
            return str(error)


def gather(spec: FigureSpec, experiment: FigurePlans) -> FigureRecords:
    """Return the records of a figure.

    A record that lies there and belongs to none of the figure's cells is not looked at. One that
    cannot be read is left out, named in a note and counted as missing.

    Raises:
        UsageError: If the profile does not name the model that the figure shows.
    """
    chosen = {part: _chosen(spec, experiment, part) for part in spec.parts}
    planned = {plan.path: plan for listed in chosen.values() for plan in listed}
    found = {path: experiment.record(plan) for path, plan in planned.items()}
    read = {path: record for path, record in found.items() if isinstance(record, Record)}
    broken = [f"Left out: {wrong}." for wrong in found.values() if isinstance(wrong, str)]
    absent = [plan.cell for path, plan in planned.items() if path not in read]
    order = [plan.cell for plan in planned.values()]
    titles = {
        name: str(load_option("model", name).title)
        for name in dict.fromkeys(cell.model.name for cell in order)
    }
    return FigureRecords(
        records={
            part: tuple(read[plan.path] for plan in listed if plan.path in read)
            for part, listed in chosen.items()
        },
        profile=experiment.profile,
        models=titles,
        tasks={cell.task.name: _task_title(experiment, cell.task.name) for cell in order},
        planned=len(planned),
        absent=tuple(sweeps(absent, experiment.overrides)),
        n_absent=len(absent),
        notes=(*broken, *model_notes(planned.values(), titles.__getitem__)),
    )


def _chosen(spec: FigureSpec, experiment: FigurePlans, part: str) -> list[Plan]:
    found = experiment.plan(part)
    if spec.tasks:
        found = [plan for plan in found if plan.cell.task.name in spec.tasks]
    if spec.model is not None:
        models = experiment.models
        if spec.model >= len(models):
            raise UsageError(
                f"{spec.name}: shows model {spec.model + 1} of the profile, and profile "
                f"{experiment.profile} names {len(models)} under figures.models"
            )
        found = [plan for plan in found if plan.cell.model.name == models[spec.model]]
    return found


def _task_title(experiment: FigurePlans, name: str) -> str:
    return str(experiment.config.tasks[name].title)
