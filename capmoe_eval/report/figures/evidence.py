"""Records of a figure: planned, there, and missing with the commands for them."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omegaconf import open_dict

from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.commands import DIRECTORY, cell_command, sweeps
from capmoe_eval.experiment.composition import load_option
from capmoe_eval.experiment.configuration import (
    CellPlan,
    expand_parts,
    model_notes,
    plans_at,
    profile_name,
)
from capmoe_eval.experiment.record import Record, read_record
from capmoe_eval.experiment.results import Reader, record_paths
from capmoe_eval.experiment.selection import composed, refuse_experiment
from capmoe_eval.report.figures.catalogue import Sources, Spec, because
from capmoe_eval.results.frames import Results, results_of
from capmoe_eval.routing.registry import knobs

if TYPE_CHECKING:
    import pandas as pd

    from capmoe_eval.paper.benchmarks import Bench


_NUMBERS: Final = (
    *("gamma", "drop_rate", "effective_gamma", "value", "stderr", "load.mean_peak_after"),
)
"""The columns of cells that figures compute with; γ of another kind is missing."""


@dataclass(frozen=True, kw_only=True)
class FigureRecords(Sources):
    """The records that a figure shows; everything is in the order of the plan."""

    records: Mapping[str, Sequence[Record]]  # by part; only those that are there and whole
    models: Mapping[str, str]  # titles by their keys
    tasks: Mapping[str, str]  # titles by their keys
    # Rows of `placement.json`, of a figure that shows that benchmark beside its records.
    balances: Sequence[Mapping[str, Any]] = ()

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
        """The records as data frames, in the order of the plan.

        A cell has the titles of its model and task, too: ``title`` and ``asked``.
        """
        import pandas as pd

        results = results_of(record for records in self.records.values() for record in records)
        cells = results.cells
        titles = {"title": cells["model"].map(self.models), "asked": cells["task"].map(self.tasks)}
        numbers = {name: pd.to_numeric(cells[name], errors="coerce") for name in _NUMBERS}
        return results._replace(cells=cells.assign(**titles, **numbers))

    def cells(self, *parts: str) -> pd.DataFrame:
        """Return the rows of some parts' cells, each once, in the order of the plan."""
        digests = {r.digest for part in parts for r in self.records.get(part, ())}
        return self.results.cells[self.results.cells["cell"].isin(digests)].copy()

    def layers(self, *parts: str) -> pd.DataFrame:
        """Return the layers of some parts' cells, with the cells' columns that tell them apart."""
        cells = self.cells(*parts).rename(columns={"gamma": "cell.gamma"})
        names = [
            "cell",
            "model",
            "title",
            "task",
            "asked",
            "method",
            "cell.gamma",
            "candidates",
            "m",
        ]
        return self.results.layers.merge(cells[names], on="cell")


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
        self.overrides = [*overrides, *_as_evaluated(overrides)]
        self.config = composed([f"experiment={experiment}", *self.overrides])
        self.profile = profile_name(self.config)
        # A model of the command line takes the place of those of the parts.
        self.own: str | None = None
        if _names_model(overrides):
            self.own, self.profile = str(self.config.model.name), str(self.config.model.profile)
            with open_dict(self.config):
                for part in self.config.parts.values():
                    part.pop("model", None)
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


def _names_model(overrides: Sequence[str]) -> bool:
    return any(word.partition("=")[0] in ("model", "model.name") for word in overrides)


def _as_evaluated(overrides: Sequence[str]) -> list[str]:
    """Return the settings that a command line leaves out of the records of its own model.

    With ``model.name=NAME results_dir=DIR`` they are those of its records there, such as
    ``model.pretrained``, ``limit`` and ``ep_size``; none where it has none.

    Raises:
        UsageError: If the weights are not named, and there is no record that names them.
    """
    words = dict(word.lstrip("+").partition("=")[::2] for word in overrides)
    if not {"model.name", "results_dir"} <= words.keys():
        return []
    root = Path(words["results_dir"]).expanduser()
    paths = record_paths(root, words["model.name"])
    cells = [read_record(path, root).cell for path in paths]
    if not cells:
        if "model.pretrained" not in words and words.get("model") == "custom":
            raise UsageError(
                f"model.name={words['model.name']}: has no record in {root}; name its weights, "
                "too: model.pretrained=PATH_OR_HUB_ID"
            )
        return []
    # Without a limit a method knows no ranks.
    cell = next((cell for cell in cells if not cell.method.is_stock), cells[0])
    command = cell_command(cell, str(root)) or ""
    of_plan = {*knobs(), "method", "gamma", "tasks", "shuffle"} - {"ep_size"}
    return [
        word
        for word in shlex.split(command)[2:]
        if (key := word.partition("=")[0]) not in of_plan | words.keys()
        and not key.startswith("tasks.")
        and not word.endswith(f"={DIRECTORY}")
    ]


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
    titles = {
        name: str(
            experiment.config.model.title
            if name == experiment.own
            else load_option("model", name).title
        )
        for name in models
    }
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
        notes=[*notes, *broken, *model_notes(planned.values(), titles.__getitem__)],
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
