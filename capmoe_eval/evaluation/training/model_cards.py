"""Write the model card of a trained tiny model: its training, scores and loads.

``card.json`` holds the numbers, ``README.md`` shows them. The accuracies are measured on the
``dev`` sets of the mini-world by lm-eval's own tasks, with the shots and metrics of Table 5.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch

from capmoe_eval.evaluation.evaluate import evaluate
from capmoe_eval.evaluation.loading import quiet_libraries, without_capacity
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.experiment.datasource import DataSource
from capmoe_eval.experiment.files import write_text
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.checkpoint import load_checkpoint
from capmoe_eval.zoo import recipes
from capmoe_eval.zoo.miniworld.evaluation import write_miniworld
from capmoe_eval.zoo.miniworld.tokenizer import miniworld_tokenizer
from capmoe_eval.zoo.miniworld.world import world

BATCH_SIZE = 16
#: Number of first documents of a task whose right answers the card counts, for a quick check.
FIRST = 48
#: The nine tasks of the paper, with the shots and metrics of its Table 5.
TASKS = (
    TaskId("openbookqa", "openbookqa", "allenai/openbookqa", "acc_norm", 0),
    TaskId("piqa", "piqa", "baber/piqa", "acc_norm", 0),
    TaskId("rte", "rte", "nyu-mll/glue", "acc", 0),
    TaskId("winogrande", "winogrande", "allenai/winogrande", "acc", 5),
    TaskId("boolq", "boolq", "aps/super_glue", "acc", 0),
    TaskId("arc_challenge", "arc_challenge", "allenai/ai2_arc", "acc_norm", 25),
    TaskId("hellaswag", "hellaswag", "Rowan/hellaswag", "acc_norm", 10),
    TaskId("mmlu", "mmlu", "cais/mmlu", "acc", 5),
    TaskId("gsm8k", "gsm8k", "openai/gsm8k", "exact_match", 5, "flexible-extract"),
)
#: Score of random answers, in percent; word problems have no choices.
CHANCE: Mapping[str, float] = {
    **dict.fromkeys(("openbookqa", "arc_challenge", "hellaswag", "mmlu"), 25.0),
    **dict.fromkeys(("piqa", "rte", "winogrande", "boolq"), 50.0),
    "gsm8k": 0.0,
}
SILENT = Method("score", 0.0)


@dataclass(frozen=True)
class Training:
    """A finished training, as a card describes it."""

    steps: int
    seed: int | None  # None for the recipe's own
    losses: list[float]  # of every step


def write(
    name: str, directory: Path, training: Training | None, *, say: Callable[[str], None] = print
) -> None:
    """Measure a model on the ``dev`` sets and write its card beside the weights.

    Args:
        name: One of ``ZOO``.
        directory: Directory of the weights.
        training: The training; None keeps that of the existing card.
        say: Function that takes progress lines.

    Raises:
        UsageError: If the name is unknown.
        OSError: If there are no weights or the card cannot be written.
    """
    file = directory / "card.json"
    if training is None:
        trained: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["training"]
    else:
        trained = _training(recipes.recipe(name), training)
    model = load_checkpoint(directory, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as hub:
        write_miniworld(Path(hub), "dev")
        say("baseline")
        baseline = measure(name, model, Path(hub), Method("baseline"))
        say("every expert silent")
        silent = measure(name, model, Path(hub), SILENT)
    card = {
        "name": name,
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "training": trained,
        "first_right": {task: sum(part["right"][:FIRST]) for task, part in baseline.items()},
        "accuracy": {task: part["value"] for task, part in baseline.items()},
        "accuracy_silent": {task: part["value"] for task, part in silent.items()},
        "peak_load": _peaks(baseline),
    }
    write_text(file, json.dumps(card, indent=1) + "\n")
    write_text(directory / "README.md", _readme(card, recipes.recipe(name)))


def measure(
    name: str,
    model: Any,
    root: Path,
    method: Method,
    *,
    limit: int | None = None,
    tasks: Sequence[TaskId] = TASKS,
) -> dict[str, Any]:
    """Evaluate a model on tasks.

    Args:
        name: Name of the model.
        model: A loaded model.
        root: Directory of the evaluation sets.
        method: The routing method.
        limit: Documents per task (MMLU: per subject); None for all.
        tasks: The tasks; by default the nine of the paper.

    Returns:
        For each task its ``value`` in percent, the score of each document (``right``), and the
        ``layers`` of the meter's report.
    """
    quiet_libraries()
    lm = without_capacity(model, miniworld_tokenizer(), BATCH_SIZE)
    library, source = TaskLibrary(), DataSource("miniworld", root)
    identity = ModelId(name, f"zoo:{name}", dtype="float32")
    results = {}
    for task in tasks:
        cell = Cell(identity, method, task, BATCH_SIZE, limit, source.name)
        part = evaluate(cell, lm, library, source, root=root).capmoe
        results[task.name] = {
            "value": round(100 * part["value"], 1),
            "right": [right for own in part["documents"].values() for right in own["correct"]],
            "layers": part["layers"],
        }
    return results


def _training(recipe: recipes.Recipe, training: Training) -> dict[str, Any]:
    last = training.losses[-100:]
    return {
        "world_seed": world().seed,
        "corpus_seed": recipes.corpus_seed(training.seed),
        "seed": recipe.seed if training.seed is None else training.seed,
        "steps": training.steps,
        "dense_steps": recipe.dense_steps * training.steps // recipe.steps,
        "rate": recipe.rate,
        "auxiliary_loss": None if recipe.family == "deepseek_v2" else recipe.aux,
        "final_loss": round(sum(last) / len(last), 4),
    }


def _peaks(results: Mapping[str, Any]) -> dict[str, float]:
    """Return each layer's highest load over the mean load, averaged over forwards, then tasks."""
    layers: dict[str, list[float]] = {}
    for part in results.values():
        for layer in part["layers"]:
            layers.setdefault(layer["name"], []).append(layer["peak"]["expert_before"]["mean"])
    return {name: round(sum(peaks) / len(peaks), 2) for name, peaks in layers.items()}


def _readme(card: Mapping[str, Any], recipe: recipes.Recipe) -> str:
    scores = (card["accuracy"], card["accuracy_silent"], CHANCE)
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
