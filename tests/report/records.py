"""Records that nothing had to be evaluated for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from capmoe_eval.cell import Cell
from capmoe_eval.configuration import Plan, plans
from capmoe_eval.finished import composed
from capmoe_eval.record import PROOFS, SCHEMA, Record


def planned(*overrides: str) -> list[Plan]:
    """The plans of a command line."""
    return plans(composed(overrides))


def record(cell: Cell, root: Path, correct: Sequence[int], documents: str = "hash") -> Record:
    """A whole record of a cell whose documents are right (1) or wrong (0)."""
    share, n = sum(correct) / len(correct), len(correct)
    part = {
        "schema": SCHEMA,
        "cell": cell.identity(),
        "digest": cell.digest,
        "value": share,
        "stderr": math.sqrt(share * (1 - share) / (n - 1)),
        "n": n,
        "documents": {cell.task.lm_eval: {"documents": documents, "correct": list(correct)}},
        "load": {},
        "layers": [],
        "proofs": {name: {"passed": True} for name in PROOFS},
        "provenance": {},
    }
    return Record({"capmoe": part}, cell.path(root))


def write_all(found: Sequence[Plan], correct: Callable[[Cell], Sequence[int]]) -> list[Path]:
    """Write a record for every plan; return the paths."""
    for plan in found:
        record(plan.cell, plan.root, correct(plan.cell)).write()
    return [plan.path for plan in found]
