"""Records with chosen scores and loads, whole and valid, without evaluating anything."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capmoe_eval.cell import Cell, ModelId, TaskId
from capmoe_eval.claims import Evidence, Home
from capmoe_eval.method import Method
from capmoe_eval.record import PROOFS, SCHEMA, Record

HOME = Home(ep_size=2, batch_size=16, gamma=1.5)


def record(
    method: str,
    gamma: float | None = None,
    correct: Sequence[float] = (1, 0, 1, 1),
    *,
    model: str = "zoo_olmoe",
    task: str = "obqa",
    documents: str = "d0",
    load: dict[str, Any] | None = None,
    layer: dict[str, Any] | None = None,
    cell: dict[str, Any] | None = None,
    root: Path = Path("results/zoo"),
    broken_promise: str = "",
    **knobs: Any,
) -> Record:
    """Return a record; nothing is written."""
    identity = Cell(
        ModelId(model, f"zoo:{model}", dtype="float32"),
        Method(method, gamma, **{"ep_size": HOME.ep_size, **knobs}),
        TaskId(task, task, f"org/{task}", "acc", 0),
        **{"batch_size": HOME.batch_size, "data": "miniworld", **(cell or {})},
    )
    loads = {"drop_rate": 0.0, "added": 0, "dropped": 0, "pad_waste": None, "peak_before": 4.0}
    layers = {"name": "layer", "assignments": 100, "tokens": 50, "top_k": 2, "n_experts": 8}
    content = {
        "capmoe": {
            "schema": SCHEMA,
            "cell": identity.identity(),
            "digest": identity.digest,
            "value": sum(correct) / len(correct),
            "stderr": 0.01,
            "n": len(correct),
            "documents": {task: {"documents": documents, "correct": list(correct)}},
            "load": {**loads, "mean_peak_before": 3.0, **(load or {})},
            "layers": [{**layers, **(layer or {})}],
            "proofs": {name: {"passed": name != broken_promise} for name in PROOFS},
            "provenance": {},
        }
    }
    # As read from a file: numbers and lists as JSON has them.
    return Record(json.loads(json.dumps(content)), identity.path(root))


def evidence(*records: Record, profile: str = "zoo", **rest: Any) -> Evidence:
    """Return evidence in which every model has the same settings."""
    homes = {found.model: HOME for found in records}
    return dataclasses.replace(Evidence(profile, records, homes=homes), **rest)
