"""Facts on the trained models that no record has: balance over seeds, losses without experts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Final

from pydantic import BaseModel, Field, ValidationError

from capmoe_eval.errors import UsageError, field_problem
from capmoe_eval.experiment.files import read_bytes
from capmoe_eval.paper.statistics import by_family

TRAININGS: Final = Path("results/training_seeds.json")
"""The file of the balance of the trained tiny models of several training seeds."""


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


class _TrainingFile(BaseModel):
    trainings: tuple[SeedTraining, ...]


@cache
def dev_losses(models: frozenset[str]) -> Mapping[str, float]:
    """Return what each task of lm-eval loses on the dev sets with all experts disabled, in points.

    It is the mean over families of the mean over training seeds, from the cards of the embedded
    models among ``models``; without a card nothing is known.
    """
    losses: dict[str, dict[str, float]] = {}
    weights = resources.files("capmoe_eval") / "zoo" / "weights"
    for name in sorted(model.removeprefix("zoo_") for model in models):
        card = weights / name / "card.json"
        content = json.loads(card.read_text(encoding="utf-8")) if card.is_file() else {}
        for task, accuracy in content.get("accuracy", {}).items():
            loss = accuracy - content["accuracy_silent"][task]
            losses.setdefault(task, {})[name] = loss
    return {task: fmean(by_family(of_task).values()) for task, of_task in losses.items()}


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
        trainings = _TrainingFile.model_validate_json(read_bytes(path)).trainings
    except (OSError, ValidationError) as error:
        reason = field_problem(error) if isinstance(error, ValidationError) else error
        raise UsageError(
            f"{path}: not a whole file of trainings ({reason}); delete it, or make it anew with "
            "`capmoe-eval train --origins`"
        ) from error
    return tuple(training.model_copy(update={"path": path}) for training in trainings)
