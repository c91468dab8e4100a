"""Records made up for tests: only what a replication reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from capmoe_eval.cell import Cell, ModelId, TaskId
from capmoe_eval.method import Method
from capmoe_eval.record import PROOFS, SCHEMA, Record


def record(
    method: Method,
    correct: Sequence[float] | Mapping[str, Sequence[float]],
    *,
    model: str = "m",
    task: str = "obqa",
    drop_rate: float = 0.0,
    layers: Sequence[Mapping[str, Any]] = (),
    documents: str = "h",
    **cell: Any,
) -> Record:
    parts = correct if isinstance(correct, Mapping) else {task: correct}
    flat = [score for part in parts.values() for score in part]
    identity = Cell(
        ModelId(model, f"zoo:{model}"),
        method,
        TaskId(task, task, "org/data", "acc", 0),
        **{"batch_size": 16, "data": "miniworld", **cell},
    )
    part = {
        "schema": SCHEMA,
        "cell": identity.identity(),
        "digest": identity.digest,
        "value": sum(flat) / len(flat),
        "stderr": None,
        "n": len(flat),
        "documents": {
            name: {"documents": documents, "correct": list(own)} for name, own in parts.items()
        },
        "load": {"drop_rate": drop_rate},
        "layers": list(layers),
        "proofs": {name: {"passed": True} for name in PROOFS},
        "provenance": {"data_fingerprint": None},
    }
    return Record({"capmoe": part}, identity.path(Path("results")))
