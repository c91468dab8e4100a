"""Facts on the trained models that no record has: balance over seeds, losses without experts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Final, Literal

from capmoe_eval.errors import UsageError, field_problem
from capmoe_eval.experiment.files import read_bytes
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from capmoe_report.effects import by_family

TRAININGS: Final = Path("results/training_seeds.json")
"""The file of the balance of the trained tiny models of several training seeds."""
NEEDED: Final = 20.0
"""Points that the dev set of a task must lose with all experts disabled, for the task to enter a
contrast of several tasks: in the mean over the families, and for each model on the model itself.
The first half was written before any test record of the models that it judges, the second after
them (2026-11-27)."""


class SeedTraining(BaseModel):
    """One training of a tiny model, from scratch or upcycled."""

    name: str
    origin: str  # "scratch" or "upcycled"
    seed: int
    steps: int
    peaks: tuple[float, ...] = Field(min_length=1)  # highest load of each layer over the mean load
    accuracy: Mapping[str, float] = {}  # percent, by task
    documents: int = 60  # number of each task
    path: Path = TRAININGS  # the file that it was read from


_FILE: Final = TypeAdapter(dict[Literal["trainings"], tuple[SeedTraining, ...]])


@dataclass(frozen=True)
class DevLosses:
    """The losses of dev sets with all experts disabled, and the tasks that hardly need experts."""

    # By task of lm-eval and model.
    points: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def idle_tasks(self, model: str) -> list[str]:
        """Return the tasks for which a model hardly needs experts; :data:`NEEDED` has the rule."""
        return [
            task
            for task, mean in self._means.items()
            if min(mean, self.points[task].get(model, mean)) < NEEDED
        ]

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on all contrasts of several tasks."""
        idle = [f"{task} ({mean:.1f})" for task, mean in self._means.items() if mean < NEEDED]
        alone = sorted(
            (model, task, loss)
            for task, mean in self._means.items()
            for model, loss in self.points[task].items()
            if loss < NEEDED <= mean
        )
        names = ", ".join(idle + [f"{task} of {model} ({loss:.1f})" for model, task, loss in alone])
        reason = f"with all experts disabled they lose less than {NEEDED:g} points on the dev sets"
        return (f"left out of contrasts of several tasks: {names}; {reason}",) if names else ()

    @cached_property
    def _means(self) -> dict[str, float]:
        """The mean over the families of each task."""
        return {t: fmean(by_family(losses).values()) for t, losses in sorted(self.points.items())}


@cache
def dev_losses(models: frozenset[str]) -> DevLosses:
    """Return the losses of the embedded models among ``models``, from their cards.

    Without a card nothing is known of a model.
    """
    losses: dict[str, dict[str, float]] = {}
    weights = resources.files("capmoe_eval") / "zoo" / "weights"
    for model in sorted(models):
        card = weights / model.removeprefix("zoo_") / "card.json"
        content = json.loads(card.read_text(encoding="utf-8")) if card.is_file() else {}
        for task, accuracy in content.get("accuracy", {}).items():
            loss = accuracy - content["accuracy_silent"][task]
            losses.setdefault(task, {})[model] = loss
    return DevLosses(losses)


def read_trainings(path: Path | None, profile: str) -> tuple[SeedTraining, ...]:
    """Return the trainings of several seeds, none where there is no file.

    Where no path is given it is :data:`TRAININGS` in profile zoo, and none in the others: trained
    tiny models say nothing of them. A damaged file is a UsageError, and so is a path that was named
    and is no file.
    """
    if path is None and (profile != "zoo" or not TRAININGS.is_file()):
        return ()
    path = path or TRAININGS
    try:
        trainings = _FILE.validate_json(read_bytes(path))["trainings"]
    except (OSError, KeyError, ValidationError) as error:
        reason = field_problem(error) if isinstance(error, ValidationError) else error
        raise UsageError(
            f"{path}: not a whole file of trainings ({reason}); delete it, or make it anew with "
            "`capmoe-eval train --origins`"
        ) from error
    return tuple(training.model_copy(update={"path": path}) for training in trainings)
