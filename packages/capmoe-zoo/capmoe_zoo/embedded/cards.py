"""Measure trained tiny models: for their model cards, and to compare training seeds.

``card.json`` holds the numbers of a card, ``README.md`` shows them. The accuracies are measured on
the ``dev`` sets of the model's world: of the mini-world by lm-eval's own tasks, with the shots and
metrics of Table 5; of the picture world by MME, MMBench and SEED-Bench.

A study compares the balance of routing in upcycled models and models trained from scratch. The
paper compares models that differ in everything (Figures 1, 2 and 13). Here the class, the data, the
total number of steps and the seeds are the same; only the initial weights differ.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.evaluate import evaluate
from capmoe_eval.evaluation.loading import without_capacity
from capmoe_eval.evaluation.provenance import weights_hash
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import TASK_FIELDS, Cell, ModelId, TaskId
from capmoe_eval.experiment.composition import load_option
from capmoe_eval.experiment.datasource import DataSource
from capmoe_eval.experiment.files import read_bytes, write_text
from capmoe_eval.experiment.names import base_name
from capmoe_eval.experiment.settings import TASK_DEFAULTS
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.checkpoint import load_checkpoint
from capmoe_eval.zoo.checkpoints import own_tokenizer
from capmoe_eval.zoo.hub import embedded_hub
from capmoe_eval.zoo.llava import IMAGE_TOKENS, picture_processor
from capmoe_eval.zoo.sets import WORLDS
from capmoe_eval.zoo.tokenizer import miniworld_tokenizer

from capmoe_zoo.embedded import recipes
from capmoe_zoo.worlds.miniworld.world import WORLD_SEED

#: Number of first documents of a task whose right answers the card counts, for a quick check.
FIRST = 48
#: Score of random answers, in percent; word problems have no choices.
CHANCE: Mapping[str, float] = {
    **dict.fromkeys(("openbookqa", "arc_challenge", "hellaswag", "mmlu"), 25.0),
    **dict.fromkeys(("piqa", "rte", "winogrande", "boolq"), 50.0),
    "gsm8k": 0.0,
    **{"mme": 50.0, "mmbench": 25.0, "seedbench": 25.0},
}
#: The tasks that a study measures the load on: two without shots and one with 25.
STUDIED = ("openbookqa", "boolq", "arc_challenge")
STUDIED_DOCUMENTS = 60
_TRAINING = ("name", "origin", "seed", "steps")  # what tells one training of a study from another


def _tasks(option: str) -> list[TaskId]:
    """Return the tasks of an option of ``tasks`` by lm-eval's names."""
    configured = [TASK_DEFAULTS | dict(task) for task in load_option("tasks", option).values()]
    return [
        TaskId(task["lm_eval"], **{key: task[key] for key in TASK_FIELDS}) for task in configured
    ]


@dataclass(frozen=True)
class Sets:
    """Evaluation sets, and what reads them."""

    tasks: Sequence[TaskId]
    source: DataSource
    reader: Any  # a tokenizer, or a processor of texts and pictures


def miniworld_sets(seed: int = WORLD_SEED, reader: Any = None) -> Sets:
    """Return the sets of the mini-world of a seed; by default they are read by its tokenizer."""
    name = "miniworld" if seed == WORLD_SEED else f"miniworld_w{seed}"
    source = DataSource(name, embedded_hub(name, "dev"))
    return Sets(_tasks("table2"), source, reader or miniworld_tokenizer())


def picture_sets(directory: Path) -> Sets:
    """Return the sets of the picture world, for a model whose tokenizer is in a directory."""
    tasks = [task for name in ("mme", "mmbench", "seedbench") for task in _tasks(name)]
    reader = picture_processor(own_tokenizer(directory))
    return Sets(tasks, DataSource("pictures", embedded_hub("pictures", "dev")), reader)


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

    ``name`` is one of ``ZOO``, and ``directory`` has the weights. A ``training`` of None keeps that
    of the existing card. ``say`` takes progress lines.

    Raises:
        UsageError: If the name is unknown.
        OSError: If there are no weights or the card cannot be written.
    """
    recipe, file = recipes.recipe(name), directory / "card.json"
    before: dict[str, Any] = {}
    if training is None or file.is_file():
        before = json.loads(read_bytes(file))
    model = load_checkpoint(directory, kind=recipes.model_class(recipe), dtype=torch.float32)
    card = {
        "name": name,
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights": weights_hash(model),  # as its records have it, in their provenance
        "training": before["training"] if training is None else _training(recipe, training),
    }
    if recipe.data in WORLDS:
        has_tokenizer = (directory / "tokenizer.json").is_file()
        reader = own_tokenizer(directory) if has_tokenizer else None
        is_text = recipe.data == "miniworld"
        sets = miniworld_sets(recipe.world, reader) if is_text else picture_sets(directory)
        card |= _measured(name, model, sets, say)
        write_text(directory / "README.md", _readme(card, recipe))
    write_text(file, json.dumps(card, indent=1) + "\n")
    if before.get("weights", card["weights"]) != card["weights"]:
        say(f"other weights than before: {card['weights']}, not {before['weights']}")


def _measured(name: str, model: Any, sets: Sets, say: Callable[[str], None]) -> dict[str, Any]:
    say("baseline")
    baseline = measure(name, model, create_method("baseline"), sets)
    say("all experts disabled")
    disabled = measure(name, model, create_method("score", 0.0), sets)
    say("Token Drop at γ=1")
    dropped = measure(name, model, create_method("score", 1.0, ep_size=_option(name).ep_size), sets)
    numbers: dict[str, Any] = {
        "first_right": {task: sum(part["right"][:FIRST]) for task, part in baseline.items()},
        "accuracy": {task: part["value"] for task, part in baseline.items()},
        "accuracy_silent": {task: part["value"] for task, part in disabled.items()},
        "accuracy_dropped": {task: part["value"] for task, part in dropped.items()},
        "peak_load": {layer: round(peak, 2) for layer, peak in peaks(baseline).items()},
        "idle_experts": _idle(baseline),
    }
    if sets.source.name == "pictures":
        numbers["image_tokens"] = IMAGE_TOKENS
        numbers["scores"] = {task: part["scores"] for task, part in baseline.items()}
        numbers["scores_dropped"] = {task: part["scores"] for task, part in dropped.items()}
    return numbers


def measure(
    name: str, model: Any, method: Method, sets: Sets, *, limit: int | None = None
) -> dict[str, Any]:
    """Evaluate a loaded model on some sets, of which ``limit`` takes the first of each (sub)task.

    Returns:
        For each task its ``value`` in percent, the score of each document (``right``), lm-eval's
        other ``scores``, and the ``layers`` of the meter's report.
    """
    batch_size = _option(name).batch_size
    lm = without_capacity(model, sets.reader, batch_size)
    library = TaskLibrary()
    identity = ModelId(name, f"zoo:{name}", dtype="float32")
    results = {}
    for task in sets.tasks:
        cell = Cell(identity, method, task, batch_size, limit, sets.source.name)
        record = evaluate(cell, lm, library, sets.source, root=Path())
        part = record.capmoe
        results[task.name] = {
            "value": round(100 * part["value"], 1),
            "right": [right for each in part["documents"].values() for right in each["correct"]],
            "scores": {
                key.partition(",")[0]: round(value, 4)
                for key, value in record.content["results"][task.lm_eval].items()
                if "," in key and "_stderr" not in key and isinstance(value, float)
            },
            "layers": part["layers"],
        }
    return results


def _training(recipe: recipes.Recipe, training: Training) -> dict[str, Any]:
    last = training.losses[-100:]
    seed = recipe.seed if training.seed is None else training.seed
    return {
        "world_seed": recipe.world if recipe.data == "miniworld" else None,
        "corpus_seed": recipes.corpus_seed(seed),
        "seed": seed,
        "steps": training.steps,
        **({"restart": recipe.restart} if recipe.restart else {}),
        "dense_steps": recipe.dense_steps * training.steps // recipe.steps,
        "rate": recipe.rate,
        "auxiliary_loss": recipe.aux,
        "final_loss": round(sum(last) / len(last), 4),
    }


def _option(name: str) -> Any:
    """Return the settings of a trained model, which are those of all its training seeds."""
    return load_option("model", f"zoo_{base_name(name)}")


def peaks(results: Mapping[str, Any]) -> dict[str, float]:
    """Return each layer's highest load over the mean load, averaged over forwards, then tasks."""
    by_task = (part["layers"] for part in results.values())
    return {
        same[0]["name"]: sum(layer["peak"]["expert_before"]["mean"] for layer in same) / len(same)
        for same in zip(*by_task, strict=True)
    }


def _idle(results: Mapping[str, Any]) -> dict[str, int]:
    """Return each layer's number of experts with under a hundredth of the mean load of all."""
    idle = {}
    for same in zip(*(part["layers"] for part in results.values()), strict=True):
        total_E = np.sum([layer["load_before"] for layer in same], axis=0)
        idle[same[0]["name"]] = int((100 * len(total_E) * total_E < total_E.sum()).sum())
    return idle


def _readme(card: Mapping[str, Any], recipe: recipes.Recipe) -> str:
    chance = {task: CHANCE[task] for task in card["accuracy"]}
    scores = (card["accuracy"], card["accuracy_dropped"], card["accuracy_silent"], chance)
    text = Path(__file__).with_name("model_card.md.j2").read_text(encoding="utf-8")
    template = jinja2.Template(text, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    rendered: str = template.render(
        card=card,
        training=card["training"],
        world=WORLDS[recipe.data],
        option=_option(card["name"]),
        chance=chance,
        means=[sum(values.values()) / len(values) for values in scores],
    )
    return rendered


def compare_origins(
    names: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    out: Path,
    *,
    work: Path,
    say: Callable[[str], None] = print,
) -> None:
    """Train and measure the models that a file lacks; it is written after each training.

    Each of the ``names`` is trained with each seed from scratch and upcycled, in as many ``steps``,
    those of an upcycled model's dense model included. ``out`` is the file, ``work`` the directory
    of the checkpoints, and ``say`` takes progress lines.

    Raises:
        UsageError: If a model is unknown or not upcycled in the zoo, or ``out`` is another file.
        OSError: If the file cannot be written.
    """
    for name in names:
        if not recipes.recipe(name).dense_steps:
            upcycled = [key for key, recipe in recipes.ZOO.items() if recipe.dense_steps]
            raise UsageError(f"names={name}: not upcycled; choose among {', '.join(upcycled)}")
    trainings = _trainings(out)
    sets = miniworld_sets()
    sets = replace(sets, tasks=[task for task in sets.tasks if task.name in STUDIED])
    for name, seed, origin in itertools.product(names, seeds, ("scratch", "upcycled")):
        training = dict(zip(_TRAINING, (name, origin, seed, steps), strict=True))
        if tuple(training.values()) in trainings:
            continue
        say(f"{name}, {origin}, seed {seed}")
        model, losses = recipes.build(
            name, work, steps=steps, seed=seed, scratch=origin == "scratch", say=say
        )
        results = measure(name, model, create_method("baseline"), sets, limit=STUDIED_DOCUMENTS)
        trainings[tuple(training.values())] = {
            **training,
            "loss": round(sum(losses[-100:]) / len(losses[-100:]), 4),
            "accuracy": {task: part["value"] for task, part in results.items()},
            # By layer, the highest load over the mean load.
            "peaks": [round(peak, 3) for peak in peaks(results).values()],
        }
        write_text(out, json.dumps({"trainings": list(trainings.values())}, indent=1) + "\n")


def _trainings(out: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the trainings in the file of results by what they are; none if there is no file."""
    if not out.is_file():
        return {}
    try:
        trainings = json.loads(out.read_text(encoding="utf-8"))["trainings"]
        return {tuple(training[key] for key in _TRAINING): training for training in trainings}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--out={out}: is there and no file of trainings ({error!r}); choose another"
        ) from error
