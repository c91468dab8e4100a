"""Whole records that nothing had to be evaluated for: the one maker of all tests.

Every number is given, or follows from a small formula. What is written goes through `Record.write`,
so it is what readers take; an odd record that tests keep in memory may be none.
"""

import dataclasses
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from capmoe_eval.evaluation.multimodal.scores import CAPABILITIES, DIMENSIONS
from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.experiment.composition import composed
from capmoe_eval.experiment.configuration import CellPlan, plans
from capmoe_eval.experiment.names import BITS_PER_BYTE
from capmoe_eval.experiment.packs import sealed
from capmoe_eval.experiment.record import SCHEMA, Proofs, Record, TaskAnswers
from capmoe_eval.experiment.results import read_results
from capmoe_eval.paper.pairing import RunScores
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method

GAMMAS = [step / 4 for step in range(17)]
Correct = Sequence[float] | Mapping[str, Sequence[float]]


def planned(*overrides: str) -> list[CellPlan]:
    """The plans of a command line."""
    return plans(composed(overrides))


def cell(method: Method, model: str = "m", task: str = "obqa", **fields: Any) -> Cell:
    """A cell of a model that is none of the configuration."""
    return Cell(
        ModelId(model, f"zoo:{model}", dtype="float32"),
        method,
        TaskId(task, task, "org/data", "acc", 0, images=task in IMAGE_METRICS),
        **{"batch_size": 16, "data": "miniworld", **fields},
    )


def layer(
    before: Sequence[int] = (8, 4, 2, 2),
    after: Sequence[int] | None = None,
    *,
    top_k: int = 2,
    scores: Sequence[float] | None = None,
    name: str = "layers.0",
    **changes: Any,
) -> dict[str, Any]:
    """A layer's statistics for one batch in which its experts were asked so often."""
    after = list(before if after is None else after)
    total, experts = sum(before), len(before)
    mean = total / experts
    dropped = total - sum(min(a, b) for a, b in zip(before, after, strict=True))
    capacities = [math.ceil(gamma * mean) for gamma in GAMMAS]
    return {
        "name": name,
        "n_experts": experts,
        "top_k": top_k,
        "forwards": 1,
        "tokens": total // top_k,
        "assignments": total,
        "dropped": dropped,
        "added": sum(after) - total + dropped,
        "lost_all": 0,
        "drop_rate": dropped / total,
        "pad_waste": None,
        "load_before": list(before),
        "load_after": after,
        "score_by_rank": None if scores is None else list(scores),
        "peak": {
            f"{unit}_{when}": dict.fromkeys(("mean", "max", "last"), max(load) / mean)
            for unit in ("expert", "device")
            for when, load in (("before", before), ("after", after))
        },
        "grid": {
            "gamma": GAMMAS,
            "drop_rate": [sum(max(n - c, 0) for n in before) / total for c in capacities],
            "pad_waste": [
                sum(max(c - n, 0) for n in before) / (c * experts) if c else None
                for c in capacities
            ],
        },
        **changes,
    }


WEIGHTS = {
    "image": 0.5,
    "visual_ratio": 0.8,
    "beyond_base": 0.25,
    "experts": {"visual": 2, "text": 1, "shared": 1},
}
SERVER = {
    "engine": "vllm",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "max_model_len": 2048,
    "block_size": 128,
    "num_gpu_blocks": 100,
    "steps": 3,
    "preemptions": 0,
    "rows": [[64, 0, 2], [10, 2, 1]],
}
CALIBRATION = {"file": "m/calibration/one.json", "checksum": "0" * 64}
_NO_MORE = (None, "factor_curves")  # kinds of which a record says nothing, or more than a file


def record(
    of: Cell,
    root: Path = Path("results"),
    correct: Correct = (1, 0, 1, 1),
    *,
    documents: str = "hash",
    load: Mapping[str, Any] | None = None,
    layers: Sequence[Mapping[str, Any]] | None = None,
    broken_invariant: str = "",
    provenance: Mapping[str, Any] | None = None,
    **parts: Any,
) -> Record:
    """A record of a cell whose documents have these scores; nothing is written.

    Args:
        of: The cell.
        root: The results directory.
        correct: The score of each document, for one subtask or by subtask.
        documents: Hash over the documents.
        load: What differs from a load of one forward without drops.
        layers: The layers; by default one of four experts.
        broken_invariant: Name of a proof that failed.
        provenance: What differs in it.
        parts: Other parts in place of those that follow from these.
    """
    by_task = correct if isinstance(correct, Mapping) else {of.task.lm_eval: correct}
    flat = [score for scores in by_task.values() for score in scores]
    value, n = sum(flat) / len(flat), len(flat)

    def sizes(scores: Sequence[float]) -> dict[str, list[int]]:
        return {"bytes": [9] * len(scores)} if of.task.metric == BITS_PER_BYTE else {}

    layers = [layer()] if layers is None else layers
    content = {
        "schema": SCHEMA,
        "cell": of.identity(),
        "digest": of.digest,
        "value": value,
        "stderr": math.sqrt(max(value * (1 - value), 0) / (n - 1)) if n > 1 else None,
        "n": n,
        "documents": {
            name: {"documents": documents, "correct": list(scores), **sizes(scores)}
            for name, scores in by_task.items()
        },
        "load": {
            "forwards": 1,
            "decode_forwards": 0,
            "tokens": layers[0]["tokens"],
            "dropped": 0,
            "added": 0,
            "lost_all": 0,
            "drop_rate": 0.0,
            "pad_waste": None,
            "peak_before": 2.0,
            "peak_after": 2.0,
            "mean_peak_before": 2.0,
            "mean_peak_after": 2.0,
            **({"weights": WEIGHTS} if of.method.name == "macs" else {}),
            **(load or {}),
        },
        "layers": list(layers),
        "proofs": {
            name: {"passed": name != broken_invariant, "checked": 3}
            for name in Proofs.model_fields
            if name != "modality_order" or of.task.images
        },
        "provenance": {
            "date": "2026-11-22T00:00:00+00:00",
            "seconds": 1.5,
            "seeds": {"eval": of.eval_seed, "method": of.method.setting("seed")},
            "versions": {"torch": "2.9.0"},
            "git_revision": None,
            "model": {
                "class": "OlmoeForCausalLM",
                "commit": None,
                "parameters": 1234,
                "dtype": of.model.dtype,
                "weights": "0123456789abcdef",
                "experts_implementation": "grouped_mm",
                "attention": "sdpa",
                "tokenizer": "0123456789abcdef",
            },
            "device": {"type": "cpu", "name": "x86_64"},
            "threads": 1,
            "parallel": None,
            "data_fingerprint": None,
            **(provenance or {}),
        },
        **({"calibration": CALIBRATION} if of.method.calibration not in _NO_MORE else {}),
        **({"server": SERVER} if of.backend == "vllm" else {}),
        **parts,
    }
    # As read from a file: numbers and lists as JSON has them.
    return Record.of(json.loads(json.dumps({"results": {}, "capmoe": content})), of.path(root))


def record_of(
    method: Method,
    correct: Correct = (1, 0, 1, 1),
    *,
    model: str = "m",
    task: str = "obqa",
    root: Path = Path("results"),
    parts: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Record:
    """A record of a method's :func:`cell`; ``parts`` are those of :func:`record`."""
    return record(cell(method, model, task, **fields), root, correct, **(parts or {}))


def result(
    method: str,
    gamma: float | None,
    task: str = "obqa",
    value: float = 0.5,
    stderr: float | None = 0.02,
    *,
    seed: int | None = None,
    model: str = "tiny_olmoe",
    knobs: Mapping[str, object] | None = None,
    n: int = 500,
    correct: Correct | None = None,
    documents: str = "",
    metric: str = "acc",
    data: str = "hub",
) -> Record:
    """A record with a score that is given; its documents are no other's, unless it is said."""
    settings = dict(knobs or {}) | ({} if seed is None else {"seed": seed})
    of = cell(create_method(method, gamma, **settings), model, task, data=data)
    of = dataclasses.replace(of, task=dataclasses.replace(of.task, metric=metric))
    correct = {"t": [0.0] * n} if correct is None else correct
    documents = documents or f"{method} {gamma} {seed}"
    return record(of, correct=correct, documents=documents, value=value, stderr=stderr)


def forge(original: Record, path: Path | None = None) -> Path:
    """Write a record with the right checksum, whatever it says and wherever it should lie."""
    path = path or original.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(sealed(original.content))
    return path


IMAGE_METRICS = {
    "mme": {"perception": 1500.0, "cognition": 280.0},
    "mmbench": dict.fromkeys(CAPABILITIES.values(), 0.6),
    "seedbench": dict.fromkeys(DIMENSIONS.values(), 0.7),
}
"""The metrics of the tasks with images that tables and figures show."""


def of_images(original: Record) -> Record:
    """The record of a task with images: its documents share an image two by two, its metrics each
    have a part of them, and an expert's load is of text by a quarter."""
    content = json.loads(json.dumps(original.content))
    part, task = content["capmoe"], original.cell.task
    (documents,) = part["documents"].values()
    count, metrics = len(documents["correct"]), IMAGE_METRICS[task.name]
    documents["images"] = [place // 2 for place in range(count)]
    documents["metrics"] = {
        name: [place for place in range(count) if place % len(metrics) == number]
        for number, name in enumerate(metrics)
    }
    content["results"] = {
        task.lm_eval: {
            f"{name}{suffix},none": value / by
            for name, value in metrics.items()
            for suffix, by in (("", 1), ("_stderr", 50))
        }
    }
    counts = {"tokens": 10, "dropped": 0, "added": 0, "lost_all": 0, "drop_rate": 0.0}
    part["load"]["modalities"] = {"text": counts, "image": counts}
    for one in part["layers"]:
        text = {name: [n // 4 for n in one[name]] for name in ("load_before", "load_after")}
        image = {name: [n - n // 4 for n in one[name]] for name in text}
        peak = {"peak": {"before": None, "after": None}}
        bands = {"tokens": [10] * 8, "dropped": list(range(8))}
        one["modalities"] = {
            "text": counts | text | peak,
            "image": counts | image | peak | {"bands": bands},
        }
    return Record.of(content, original.path)


def write_all(plans: Sequence[CellPlan], correct: Callable[[Cell], Sequence[int]]) -> list[Path]:
    """Write a record for every plan; return the paths."""
    for plan in plans:
        written = record(plan.cell, plan.root, correct(plan.cell))
        (of_images(written) if plan.cell.task.images else written).write()
    return [plan.path for plan in plans]


def calibrated(gammas: Sequence[float]) -> dict[str, Any]:
    """What a record of gamma=adaptive says of its calibration."""
    chosen = {"drop_rate": 0.1, "dropped_scores": 0.05, "straggler": 2.0}
    return {**CALIBRATION, "gammas": gammas, **chosen}


def plausible(of: Cell, root: Path, *, experts: int = 32, depth: int = 4) -> Record:
    """A record of several layers with skewed loads, seeded by the cell's own identity."""
    rng, gamma, top_k = random.Random(of.digest), of.method.uniform_gamma, max(1, experts // 8)
    layers = []
    for number in range(depth):
        before = [int(200 * top_k * math.exp(rng.gauss(0, 0.9))) + 1 for _ in range(experts)]
        most = math.ceil(gamma * sum(before) / experts) if gamma else max(before)
        after = [min(n, most) for n in before]
        scores = [0.5**rank for rank in range(experts)] if of.method.is_stock else None
        name = f"model.layers.{number}.mlp"
        layers.append(layer(before, after, top_k=top_k, scores=scores, name=name))
    drop = sum(part["drop_rate"] for part in layers) / depth
    value = 0.9 - drop / 4
    correct = [int(rng.random() < value) for _ in range(400)]
    peaks = ("peak_before", "peak_after", "mean_peak_before", "mean_peak_after")
    load = {"drop_rate": drop, **dict.fromkeys(peaks, gamma or 4.0)}
    made = record(of, root, correct, layers=layers, value=value, stderr=0.02, load=load)
    return of_images(made) if of.task.images else made


def odd_cell(model: str = "<img src=x onerror=alert(1)>&amp;", task: str = "piqa") -> Cell:
    """A cell of a model and of data that are none of the configuration."""
    of = cell(create_method("score", 1.0), model, task, data="elsewhere")
    return dataclasses.replace(of, model=dataclasses.replace(of.model, pretrained="org/odd"))


def answered(answers: TaskAnswers) -> RunScores:
    """The scores of a record, part by part: what ``answered_by_cells`` reads from the frame."""
    parts = sorted(answers.items())
    asked = {name: (part.documents, len(part.correct)) for name, part in parts}
    scores = np.concatenate([part.correct for _, part in parts])
    if all(part.bytes for _, part in parts):
        sizes = np.concatenate([part.bytes for _, part in parts])
        scores = scores * (sizes / sizes.mean())
    if any(part.images is None for _, part in parts):
        return RunScores(asked, scores)
    images = [(name, image) for name, part in parts for image in part.images or ()]
    numbers = {image: number for number, image in enumerate(dict.fromkeys(images))}
    return RunScores(asked, scores, np.array([numbers[image] for image in images]))


def broken(root: Path) -> list[str]:
    """Return a line for each file of a results directory that is no whole record."""
    lines: list[str] = []
    read_results(root, lines)
    return lines


def undated(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record says, but for when it was computed and how fast."""
    plain: dict[str, Any] = json.loads(json.dumps(content))
    plain["capmoe"].pop("checksum", None)
    for name in ("date", "seconds"):
        del plain["capmoe"]["provenance"][name]
    return plain
