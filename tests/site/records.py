"""Records made up for a site: whole ones, odd ones, and files that are none."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capmoe_eval.cell import Cell, ModelId, TaskId
from capmoe_eval.method import Method
from capmoe_eval.record import SCHEMA, Record

PROOFS = (
    "bound_holds",
    "stock_at_infinity",
    "pads_take_no_slot",
    "overload_drops",
    "every_layer_hooked",
)
HOSTILE = "<script>alert(1)<script>&amp;"
"""A name that must be read as it is written."""


def layer(name: str = "model.layers.0.mlp") -> dict[str, Any]:
    """Four experts, the first of which lost half of its load."""
    return {
        "name": name,
        "n_experts": 4,
        "drop_rate": 0.2,
        "pad_waste": 0.125,
        "load_before": [8, 4, 2, 2],
        "load_after": [4, 4, 2, 2],
        "peak": {"expert_before": {"mean": 2.0}, "expert_after": {"mean": 1.0}},
    }


def record(cell: Cell, path: Path, right: int = 30, n: int = 40, **parts: Any) -> Record:
    """A record of a cell with so many right answers; ``parts`` replace parts of it."""
    share = right / n
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "cell": cell.identity(),
        "digest": cell.digest,
        "value": share,
        "stderr": math.sqrt(share * (1 - share) / (n - 1)),
        "n": n,
        "documents": {
            cell.task.lm_eval: {"documents": "d", "correct": [1] * right + [0] * (n - right)}
        },
        "load": {"drop_rate": 0.2, "peak_before": 2.0, "peak_after": 1.0, "tokens": 1234},
        "layers": [layer()],
        "proofs": {name: {"passed": True, "checked": 3} for name in PROOFS},
        "provenance": {"seconds": 1.5, "versions": {"torch": "2.9.0"}},
    }
    return Record({"capmoe": {**content, **parts}}, path)


def odd_cell(model: str = HOSTILE, task: str = "piqa", **method: Any) -> Cell:
    """A cell of a model that is none of the configuration."""
    return Cell(
        ModelId(model, "org/odd", dtype="float32"),
        Method(**{"name": "score", "gamma": 1.0, **method}),
        TaskId(task, task, "org/data", "acc", 0),
        batch_size=16,
        data="elsewhere",
    )


def write(found: Record) -> Path:
    """Write a record as a file of its content, valid or not."""
    found.path.parent.mkdir(parents=True, exist_ok=True)
    found.path.write_text(json.dumps(found.content), encoding="utf-8")
    return found.path


def write_figure(
    folder: Path, name: str, about: Mapping[str, Any] | None, drawn: bool = True
) -> None:
    """Write what a figure consists of."""
    folder.mkdir(parents=True, exist_ok=True)
    if about is not None:
        (folder / f"{name}.json").write_text(json.dumps(about), encoding="utf-8")
    if drawn:
        svg = '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="40"></svg>'
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")


def ledger(record_path: str) -> dict[str, Any]:
    """A ledger of two claims; the first rests on a record."""
    detail = {
        "label": "score − order",
        "effect": 1.25,
        "low": 0.5,
        "high": 2.0,
        "unit": "points",
        "records": [0, 7],
    }
    finding = {"source": "measured", "outcome": "holds", "text": "by 1.25", "details": [detail]}
    first = {
        "id": "one",
        "version": "v2",
        "place": "Table 1",
        "quote": "score is <b>best</b>",
        "kind": "effect",
        "published": {"values": [3.5], "unit": "points"},
        "verdict": "confirmed",
        "scope": "at toy scale",
        "note": "",
        "findings": [finding],
    }
    second = {**first, "id": "two", "verdict": "not testable here", "kind": "number"}
    second |= {"published": None, "findings": [], "version": "v1"}
    return {"records": [record_path], "claims": [first, second, "not a claim"]}


REPLICATION: dict[str, Any] = {
    "profile": "zoo",
    "models": ["zoo_olmoe"],
    "records": 12,
    "missing": 3,
    "notes": [],
    "claims": [
        {
            "id": "a",
            "place": "Table 1",
            "statement": "score > order & random",
            "verdict": "partly",
            "contrasts": [
                {
                    "label": "x",
                    "effect": 2.0,
                    "low": 1.0,
                    "high": 3.0,
                    "p": 0.001,
                    "unit": "points",
                    "verdict": "confirmed",
                    "models": {"zoo_olmoe": 2.0},
                },
                {"label": "y", "effect": None, "verdict": "not shown", "note": "too few"},
            ],
        }
    ],
}
