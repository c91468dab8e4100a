"""Write the model card of a trained tiny model: its training, scores and loads.

``card.json`` holds the numbers, ``README.md`` shows them. The accuracies are measured on the
``dev`` sets of the mini-world by lm-eval's own tasks, with the shots and metrics of Table 5.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch

from capmoe_eval.evaluation.evaluate import evaluate
from capmoe_eval.evaluation.loading import quiet_libraries, without_capacity
from capmoe_eval.evaluation.provenance import weights_hash
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import TASK_FIELDS, Cell, ModelId, TaskId
from capmoe_eval.experiment.configuration import load_option
from capmoe_eval.experiment.datasource import DataSource
from capmoe_eval.experiment.files import write_text
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.checkpoint import load_checkpoint
from capmoe_eval.zoo import recipes
from capmoe_eval.zoo.miniworld.evaluation import miniworld_hub
from capmoe_eval.zoo.miniworld.tokenizer import miniworld_tokenizer
from capmoe_eval.zoo.miniworld.world import world

BATCH_SIZE = 16
#: Number of first documents of a task whose right answers the card counts, for a quick check.
FIRST = 48
#: Score of random answers, in percent; word problems have no choices.
CHANCE: Mapping[str, float] = {
    **dict.fromkeys(("openbookqa", "arc_challenge", "hellaswag", "mmlu"), 25.0),
    **dict.fromkeys(("piqa", "rte", "winogrande", "boolq"), 50.0),
    "gsm8k": 0.0,
}
SILENT = Method("score", 0.0)


def paper_tasks() -> list[TaskId]:
    """Return the nine tasks of the paper by lm-eval's names, with the settings of its Table 5."""
    configured = load_option("tasks", "table2").values()
    return [TaskId(task.lm_eval, **{key: task[key] for key in TASK_FIELDS}) for task in configured]


@dataclass(frozen=True)
class Training:
    """A finished training, as a card describes it."""

    steps: int
    seed: int | None  # None for the recipe's own
    losses: list[float]  # of every step


def write(
    name: str, directory: Path, training: Training | None, *, say: Callable[[str], None] = print
) -> None:
    """Write the card of a model beside its weights; measure one of the mini-world for it.

    Args:
        name: One of ``ZOO``.
        directory: Directory of the weights.
        training: The training; None keeps that of the existing card.
        say: Function that takes progress lines.

    Raises:
        UsageError: If the name is unknown.
        OSError: If there are no weights or the card cannot be written.
    """
    recipe, file = recipes.recipe(name), directory / "card.json"
    before: dict[str, Any] = {}
    if training is None or file.is_file():
        before = json.loads(file.read_text(encoding="utf-8"))
    if training is None:
        trained: dict[str, Any] = before["training"]
    else:
        trained = _training(recipe, training)
    model = load_checkpoint(directory, dtype=torch.float32)
    card = {
        "name": name,
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights": weights_hash(model),  # as its records have it, in their provenance
        "training": trained,
    }
    if recipe.data == "miniworld":
        card |= _measured(name, model, recipe.ep_size, say)
        write_text(directory / "README.md", _readme(card, recipe))
    write_text(file, json.dumps(card, indent=1) + "\n")
    if before.get("weights", card["weights"]) != card["weights"]:
        say(f"other weights than before: {card['weights']}, not {before['weights']}")


def _measured(name: str, model: Any, ep_size: int, say: Callable[[str], None]) -> dict[str, Any]:
    tasks = paper_tasks()
    say("baseline")
    baseline = measure(name, model, Method("baseline"), tasks)
    say("every expert silent")
    silent = measure(name, model, SILENT, tasks)
    say("Token Drop at γ=1")
    dropped = measure(name, model, Method("score", 1.0, ep_size=ep_size), tasks)
    return {
        "first_right": {task: sum(part["right"][:FIRST]) for task, part in baseline.items()},
        "accuracy": {task: part["value"] for task, part in baseline.items()},
        "accuracy_silent": {task: part["value"] for task, part in silent.items()},
        "accuracy_dropped": {task: part["value"] for task, part in dropped.items()},
        "peak_load": _peaks(baseline),
        "idle_experts": _idle(baseline),
    }


def measure(
    name: str, model: Any, method: Method, tasks: Sequence[TaskId], *, limit: int | None = None
) -> dict[str, Any]:
    """Evaluate a model on tasks of the ``dev`` sets.

    Args:
        name: Name of the model.
        model: A loaded model.
        method: The routing method.
        tasks: The tasks.
        limit: Documents per task (MMLU: per subject); None for all.

    Returns:
        For each task its ``value`` in percent, the score of each document (``right``), and the
        ``layers`` of the meter's report.
    """
    quiet_libraries()
    lm = without_capacity(model, miniworld_tokenizer(), BATCH_SIZE)
    library, source = TaskLibrary(), DataSource("miniworld", miniworld_hub("dev"))
    identity = ModelId(name, f"zoo:{name}", dtype="float32")
    results = {}
    for task in tasks:
        cell = Cell(identity, method, task, BATCH_SIZE, limit, source.name)
        part = evaluate(cell, lm, library, source, root=Path()).capmoe
        results[task.name] = {
            "value": round(100 * part["value"], 1),
            "right": [right for own in part["documents"].values() for right in own["correct"]],
            "layers": part["layers"],
        }
    return results


def _training(recipe: recipes.Recipe, training: Training) -> dict[str, Any]:
    last = training.losses[-100:]
    seed = recipe.seed if training.seed is None else training.seed
    return {
        "world_seed": world().seed if recipe.data == "miniworld" else None,
        "corpus_seed": recipes.corpus_seed(seed),
        "seed": seed,
        "steps": training.steps,
        "dense_steps": recipe.dense_steps * training.steps // recipe.steps,
        "rate": recipe.rate,
        "auxiliary_loss": recipe.aux,
        "final_loss": round(sum(last) / len(last), 4),
    }


def _peaks(results: Mapping[str, Any]) -> dict[str, float]:
    """Return each layer's highest load over the mean load, averaged over forwards, then tasks."""
    layers: dict[str, list[float]] = {}
    for part in results.values():
        for layer in part["layers"]:
            layers.setdefault(layer["name"], []).append(layer["peak"]["expert_before"]["mean"])
    return {name: round(sum(peaks) / len(peaks), 2) for name, peaks in layers.items()}


def _idle(results: Mapping[str, Any]) -> dict[str, int]:
    """Return each layer's number of experts with under a hundredth of the mean load of all."""
    layers: dict[str, list[list[int]]] = {}
    for part in results.values():
        for layer in part["layers"]:
            layers.setdefault(layer["name"], []).append(layer["load_before"])
    idle = {}
    for name, loads in layers.items():
        total = [sum(own) for own in zip(*loads, strict=True)]
        idle[name] = sum(100 * len(total) * own < sum(total) for own in total)
    return idle


def _readme(card: Mapping[str, Any], recipe: recipes.Recipe) -> str:
    scores = (card["accuracy"], card["accuracy_dropped"], card["accuracy_silent"], CHANCE)
    text = Path(__file__).with_name("model_card.md.j2").read_text(encoding="utf-8")
    template = jinja2.Template(text, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    rendered: str = template.render(
        card=card,
        training=card["training"],
        ep_size=recipe.ep_size,
        chance=CHANCE,
        means=[sum(values.values()) / len(values) for values in scores],
    )
    return rendered
