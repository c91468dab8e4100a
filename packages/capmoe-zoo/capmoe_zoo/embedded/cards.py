"""Measure trained tiny models: for their model cards, and to compare training seeds.

``card.json`` holds the numbers of a card, ``README.md`` shows them. The accuracies are measured on
the ``dev`` sets of the model's world: of the mini-world by lm-eval's own tasks, with the shots and
metrics of Table 5; of the picture world by MME, MMBench and SEED-Bench.

A study compares the balance of routing in upcycled models and models trained from scratch. The
paper compares models that differ in everything (Figures 1, 2 and 13). Here the class, the data, the
total number of steps and the seeds are the same; only the initial weights differ.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
import numpy as np
import torch
from capmoe_eval.errors import UsageError, reading
from capmoe_eval.evaluation.evaluate import evaluate
from capmoe_eval.evaluation.loading import without_capacity
from capmoe_eval.evaluation.provenance import weights_hash
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import TASK_FIELDS, Cell, ModelId, TaskId
from capmoe_eval.experiment.composition import load_option
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.datasource import DataSource
from capmoe_eval.experiment.files import read_bytes, write_text
from capmoe_eval.experiment.names import base_name, split_seed
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.settings import TASK_DEFAULTS
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.checkpoint import load_checkpoint
from capmoe_eval.zoo.checkpoints import copy_checkpoint, trained_reader
from capmoe_eval.zoo.hub import embedded_hub
from capmoe_eval.zoo.llava import IMAGE_TOKENS
from capmoe_eval.zoo.sets import WORLDS

from capmoe_zoo.embedded import train
from capmoe_zoo.embedded.train import Recipe
from capmoe_zoo.training import say
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


def tasks_of(chosen: Recipe) -> list[TaskId]:
    """Return the tasks that a card measures: those of the model's world, by lm-eval's names."""
    names = ("table2",) if chosen.data == "miniworld" else ("mme", "mmbench", "seedbench")
    options = [option for name in names for option in load_option("tasks", name).values()]
    tasks = [TASK_DEFAULTS | dict(option) for option in options]
    return [TaskId(task["lm_eval"], **{key: task[key] for key in TASK_FIELDS}) for task in tasks]


def write(name: str, chosen: Recipe, directory: Path, losses: Sequence[float] = ()) -> None:
    """Write the card of a model beside its weights; measure one that has a world for it.

    ``directory`` has the weights, and ``losses`` are those of every step of its training by a
    recipe; without losses the card says of the training what it said before. An OSError if
    there are no weights or the card cannot be written.
    """
    file = directory / "card.json"
    before: dict[str, Any] = {}
    if not losses or file.is_file():
        before = json.loads(read_bytes(file))
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = copy_checkpoint(directory, Path(scratch))
        model = load_checkpoint(checkpoint, kind=train.model_class(chosen), dtype=torch.float32)
    card = {
        "name": name,
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights": weights_hash(model),  # as its records have it, in their provenance
        "training": before.get("training"),
    }
    if losses:
        card["training"] = {
            "world_seed": chosen.world if chosen.data == "miniworld" else None,
            "corpus_seed": train.corpus_seed(chosen.seed),
            "seed": chosen.seed,
            "steps": chosen.steps,
            **({"restart": chosen.restart} if chosen.restart else {}),
            "dense_steps": chosen.dense_steps,
            "rate": chosen.rate,
            "auxiliary_loss": chosen.aux,
            "final_loss": _final(losses),
        }
    if chosen.data in WORLDS:
        reader = trained_reader(directory, pictures=chosen.data == "pictures")
        card |= _measured(name, chosen, model, reader)
        write_text(directory / "README.md", page(card, WORLDS[chosen.data]))
    write_text(file, json.dumps(card, indent=1) + "\n")
    if before.get("weights", card["weights"]) != card["weights"]:
        say(f"other weights than before: {card['weights']}, not {before['weights']}")


def page(card: Mapping[str, Any], world: str) -> str:
    """Return the README of a measured model from its card."""
    text = Path(__file__).with_name("model_card.md.j2").read_text(encoding="utf-8")
    template = jinja2.Template(text, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    chance = {task: CHANCE[task] for task in card["accuracy"]}
    columns = (*(card[f"accuracy{key}"] for key in ("", "_dropped", "_silent")), chance)
    means = [fmean(column.values()) for column in columns]
    words = {"card": card, "training": card["training"], "world": world, "chance": chance}
    page: str = template.render(words, option=_option(card["name"]), means=means)
    return page


def _measured(name: str, chosen: Recipe, model: Any, reader: Any) -> dict[str, Any]:
    dropped = create_method("score", 1.0, ep_size=_option(name).ep_size)
    columns = {
        "accuracy": ("baseline", create_method("baseline")),
        "accuracy_silent": ("all experts disabled", create_method("score", 0.0)),
        "accuracy_dropped": ("Token Drop at γ=1", dropped),
    }
    results = {}
    for column, (title, method) in columns.items():
        say(title)
        results[column] = measure(name, model, method, reader, tasks_of(chosen))
    baseline, idle = results["accuracy"], {}
    for same in zip(*(record.layers for record in baseline.values()), strict=True):
        total_E = np.sum([layer.load_before for layer in same], axis=0)
        # Experts with under a hundredth of the mean load of all.
        idle[same[0].name] = int((100 * len(total_E) * total_E < total_E.sum()).sum())
    numbers: dict[str, Any] = {
        "first_right": {task: sum(right(record)[:FIRST]) for task, record in baseline.items()},
        **{column: accuracies(records) for column, records in results.items()},
        "peak_load": {layer: round(peak, 2) for layer, peak in peaks(baseline).items()},
        "idle_experts": idle,
    }
    if chosen.data == "pictures":
        numbers["image_tokens"] = IMAGE_TOKENS
        numbers["scores"] = _scores(baseline)
        numbers["scores_dropped"] = _scores(results["accuracy_dropped"])
    return numbers


def measure(
    name: str,
    model: Any,
    method: Method,
    reader: Any,
    tasks: Iterable[TaskId],
    *,
    limit: int | None = None,
) -> dict[str, Record]:
    """Evaluate a loaded model on dev documents; return a record of each task, by its name.

    ``limit`` takes the first documents of each task.
    """
    chosen = train.recipe(name)
    world = chosen.data if chosen.world == WORLD_SEED else f"miniworld_w{chosen.world}"
    source = DataSource(world, embedded_hub(world, "dev"))
    batch_size = _option(name).batch_size
    lm = without_capacity(model, reader, batch_size)
    library = TaskLibrary()
    identity = ModelId(name, f"zoo:{name}", dtype="float32")
    results = {}
    for task in tasks:
        cell = Cell(identity, method, task, batch_size, limit, source.name)
        results[task.name] = evaluate(CellPlan(cell, source, Path()), lm, library)
    return results


def right(record: Record) -> list[float]:
    """Return the score of each document of a record."""
    return [score for part in record.capmoe["documents"].values() for score in part["correct"]]


def accuracies(results: Mapping[str, Record]) -> dict[str, float]:
    """Return the percentage of right answers, by task."""
    return {task: round(100 * record.value, 1) for task, record in results.items()}


def _scores(results: Mapping[str, Record]) -> dict[str, dict[str, float]]:
    """Return lm-eval's other scores, by task."""
    scores: dict[str, dict[str, float]] = {}
    for task, record in results.items():
        of_task = record.content["results"][record.cell.task.lm_eval]
        scores[task] = {
            key.partition(",")[0]: round(value, 4)
            for key, value in of_task.items()
            if "," in key and "_stderr" not in key and isinstance(value, float)
        }
    return scores


def _final(losses: Sequence[float]) -> float:
    return round(fmean(losses[-100:]), 4)


def _option(name: str) -> Any:
    """Return the settings of a trained model, which are those of all its training seeds."""
    return load_option("model", f"zoo_{base_name(name)}")


def peaks(results: Mapping[str, Record]) -> dict[str, float]:
    """Return each layer's highest load over the mean load, averaged over forwards, then tasks."""
    return {
        same[0].name: fmean(layer.peak["expert_before"]["mean"] for layer in same)
        for same in zip(*(record.layers for record in results.values()), strict=True)
    }


def compare_origins(name: str, chosen: Recipe, out: Path, *, work: Path) -> None:
    """Train a model by its recipe from scratch and upcycled, and add its balance to a JSON file.

    Both take the steps of the recipe, those of an upcycled model's dense model included. ``out`` is
    the file, in which a training that it has stays. ``work`` is the directory of the checkpoints.

    Raises:
        UsageError: If the model is not upcycled in the zoo, or ``out`` is another file.
        OSError: If the file cannot be written.
    """
    if not chosen.dense_steps:
        upcycled = [key for key, each in train.ZOO.items() if each.dense_steps]
        raise UsageError(f"name={name}: not upcycled; choose among {', '.join(upcycled)}")
    trainings: list[dict[str, Any]] = []
    if out.is_file():
        with reading(out, "no file of trainings", "choose another --out"):
            trainings = json.loads(read_bytes(out))["trainings"]
    in_world, _ = split_seed(name)
    reader, _ = train.data_of(chosen, chosen.steps)
    tasks = [task for task in tasks_of(chosen) if task.name in STUDIED]
    for origin, dense_steps in (("scratch", 0), ("upcycled", chosen.dense_steps)):
        training = {"name": in_world, "origin": origin, "seed": chosen.seed, "steps": chosen.steps}
        if any(training.items() <= made.items() for made in trainings):
            continue
        say(f"{name}, {origin}")
        model, losses = train.build(name, replace(chosen, dense_steps=dense_steps), work)
        baseline = create_method("baseline")
        results = measure(name, model, baseline, reader, tasks, limit=STUDIED_DOCUMENTS)
        numbers = {
            "loss": _final(losses),
            "accuracy": accuracies(results),
            # By layer, the highest load over the mean load.
            "peaks": [round(peak, 3) for peak in peaks(results).values()],
        }
        trainings.append(training | numbers)
        write_text(out, json.dumps({"trainings": trainings}, indent=1) + "\n")
