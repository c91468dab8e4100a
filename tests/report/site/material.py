"""What a site is made of beside records: odd cells, figures, a ledger, verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.routing.registry import create_method

HOSTILE = "<img src=x onerror=alert(1)>&amp;"
"""A name that must be read as it is written."""


def odd_cell(model: str = HOSTILE, task: str = "piqa", **method: Any) -> Cell:
    """A cell of a model that is none of the configuration."""
    return Cell(
        ModelId(model, "org/odd", dtype="float32"),
        create_method(**{"name": "score", "gamma": 1.0, **method}),
        TaskId(task, task, "org/data", "acc", 0),
        batch_size=16,
        data="elsewhere",
    )


COMPLETE = {"records": 0, "of": 3, "commands": []}
ABOUT = {"place": "", "caption": "", "notes": [], "missing": COMPLETE}


def write_figure(folder: Path, name: str, about: dict[str, Any] | None, drawn: bool = True) -> None:
    """Write what a figure consists of."""
    folder.mkdir(parents=True, exist_ok=True)
    if about is not None:
        text = json.dumps(ABOUT | {"title": name} | about)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
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
        "p": 0.01,
        "unit": "points",
        "outcome": "holds",
        "wide": None,
        "models": {},
        "records": [0, 1],
    }
    other = {**detail, "label": "score − random", "effect": 2.25}
    finding = {
        "source": "measured",
        "outcome": "holds",
        "text": "by 1.25",
        "details": [detail, other],
    }
    first = {
        "id": "one",
        "version": "v2",
        "section": "S",
        "place": "Table 1",
        "quote": "score is <b>best</b>",
        "kind": "effect",
        "published": {"values": [3.5], "unit": "points"},
        "verdict": "confirmed",
        "scope": "at toy scale",
        "decided_by": "score − random",
        "note": "",
        "findings": [finding],
    }
    second = {**first, "id": "two", "verdict": "not testable here", "kind": "number"}
    second |= {"published": None, "decided_by": None, "findings": [], "version": "v1"}
    paths = [record_path, "none.json"]
    about: dict[str, Any] = {"profile": "zoo", "models": [], "broken": [], "counts": {}}
    return about | {"records": paths, "claims": [first, second]}


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
