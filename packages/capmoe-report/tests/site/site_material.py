"""A site, and what it is made of: records, figures, verdicts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.record import Record

from capmoe_report.report import PAGES, build
from tests import records


def made(cell: Cell, root: Path, right: int = 30, n: int = 40, **parts: Any) -> Record:
    """A record with so many right answers, of which a fifth of the pairs was dropped."""
    correct = [1] * right + [0] * (n - right)
    return records.record(cell, root, correct, load={"drop_rate": 0.2}, **parts)


@dataclass(frozen=True)
class Site:
    """A site that was built from made-up records."""

    root: Path

    @property
    def out(self) -> Path:
        return self.root / "reports"

    @property
    def words(self) -> list[str]:
        return ["profile=zoo", f"results_dir={self.root}/results/zoo"]

    def text(self, page: str) -> str:
        return (self.out / page).read_text(encoding="utf-8")

    def pages(self) -> dict[str, str]:
        return {page: self.text(page) for page in PAGES}

    def build(self) -> int:
        return build(self.words, self.out, self.root / "results/bench", None, False)


_COMPLETE = {"records": 0, "of": 3, "commands": []}


def write_figure(folder: Path, name: str, drawn: bool = True, **about: Any) -> None:
    """Write what a figure consists of; without words about it, its picture alone."""
    folder.mkdir(parents=True, exist_ok=True)
    if about:
        rest = {"place": "", "caption": "", "notes": [], "missing": _COMPLETE}
        (folder / f"{name}.json").write_text(json.dumps(rest | about), encoding="utf-8")
    if drawn:
        svg = '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="40"></svg>'
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")


LEDGER = {"profile": "zoo", "counts": {"confirmed": 3, "not testable here": 1}}
_EFFECT = {"effect": 2.0, "low": 1.0, "high": 3.0, "p": 0.001, "unit": "points"}
_CONTRASTS = (
    {"label": "x", "verdict": "confirmed", "models": {"zoo_olmoe": 2.0}, **_EFFECT},
    {"label": "y", "verdict": "not shown", "effect": None, "note": "too few"},
)
_CLAIM = {"id": "a", "place": "Table 1", "statement": "score > order & random"}
REPLICATION: dict[str, Any] = {
    **{"profile": "zoo", "models": ["zoo_olmoe"], "records": 12, "missing": 3, "notes": []},
    "claims": [_CLAIM | {"verdict": "partly", "contrasts": _CONTRASTS}],
}
