"""Compare the balance of routing in upcycled models and models trained from scratch.

The paper compares models that differ in everything (Figures 1, 2 and 13). Here the class, the data,
the total number of steps and the seeds are the same; only the initial weights differ.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.training.model_cards import measure, miniworld_sets, peaks
from capmoe_eval.experiment.files import write_text
from capmoe_eval.routing.registry import create_method
from capmoe_eval.zoo import recipes

#: The tasks that the load is measured on: two without shots and one with 25.
_MEASURED = ("openbookqa", "boolq", "arc_challenge")
_DOCUMENTS = 60
_TRAINING = ("name", "origin", "seed", "steps")  # what tells one training from another


@dataclass(frozen=True)
class Study:
    """The trainings to compare."""

    names: tuple[str, ...]  # models of the zoo that are upcycled
    seeds: tuple[int, ...]  # of weights and corpus
    steps: int  # of each training, including those of an upcycled model's dense model


def study(asked: Study, out: Path, *, work: Path, say: Callable[[str], None] = print) -> None:
    """Train and measure the models that the file lacks; the file is written after each training.

    ``work`` is the directory of the checkpoints, and ``say`` takes progress lines.

    Raises:
        UsageError: If a model is unknown or not upcycled in the zoo, or ``out`` is another file.
        OSError: If the file cannot be written.
    """
    for name in asked.names:
        if not recipes.recipe(name).dense_steps:
            upcycled = [key for key, recipe in recipes.ZOO.items() if recipe.dense_steps]
            raise UsageError(f"names={name}: not upcycled; choose among {', '.join(upcycled)}")
    kept = _trainings(out)
    for name, seed, origin in itertools.product(asked.names, asked.seeds, ("scratch", "upcycled")):
        training = dict(zip(_TRAINING, (name, origin, seed, asked.steps), strict=True))
        if tuple(training.values()) in kept:
            continue
        say(f"{name}, {origin}, seed {seed}")
        model, losses = recipes.build(
            name, work, steps=asked.steps, seed=seed, scratch=origin == "scratch", say=say
        )
        loss = round(sum(losses[-100:]) / len(losses[-100:]), 4)
        kept[tuple(training.values())] = {**training, "loss": loss, **_measured(name, model)}
        write_text(out, json.dumps({"trainings": list(kept.values())}, indent=1) + "\n")


def _trainings(out: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the trainings in the file of results by what they are; none if there is no file."""
    if not out.is_file():
        return {}
    try:
        kept = json.loads(out.read_text(encoding="utf-8"))["trainings"]
        return {tuple(training[key] for key in _TRAINING): training for training in kept}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--out={out}: is there and no file of trainings ({error!r}); choose another"
        ) from error


def _measured(name: str, model: Any) -> dict[str, Any]:
    """Return accuracy by task and, by layer, the highest load over the mean load."""
    sets = miniworld_sets()
    measured = replace(sets, tasks=[task for task in sets.tasks if task.name in _MEASURED])
    results = measure(name, model, create_method("baseline"), measured, limit=_DOCUMENTS)
    return {
        "accuracy": {task: part["value"] for task, part in results.items()},
        "peaks": [round(peak, 3) for peak in peaks(results).values()],
    }
