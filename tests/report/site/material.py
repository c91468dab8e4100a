"""What a site is made of beside records: odd cells, figures, verdicts."""

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


LEDGER = {"profile": "zoo", "counts": {"confirmed": 3, "not testable here": 1}, "claims": []}

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
