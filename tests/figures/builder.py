"""Valid records that no model produced: every number is given, or follows from a small formula."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capmoe_eval.cell import Cell
from capmoe_eval.record import PROOFS, SCHEMA, Record

GAMMAS = [step / 4 for step in range(17)]


def layer(
    before: Sequence[int],
    after: Sequence[int] | None = None,
    *,
    top_k: int = 2,
    scores: Sequence[float] | None = None,
    name: str = "layers.0",
) -> dict[str, Any]:
    """Return a layer's statistics for one batch in which its experts were asked so often."""
    after = list(before if after is None else after)
    total, experts = sum(before), len(before)
    mean = total / experts
    capacities = [math.ceil(gamma * mean) for gamma in GAMMAS]
    return {
        "name": name,
        "n_experts": experts,
        "top_k": top_k,
        "forwards": 1,
        "tokens": total // top_k,
        "assignments": total,
        "dropped": total - sum(min(a, b) for a, b in zip(before, after, strict=True)),
        "drop_rate": 1 - sum(min(a, b) for a, b in zip(before, after, strict=True)) / total,
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
    }


def record(
    cell: Cell,
    root: Path,
    layers: Sequence[dict[str, Any]],
    *,
    value: float = 0.5,
    stderr: float | None = 0.02,
    correct: Sequence[int] = (0, 1),
    documents: str = "aaaa",
    drop_rate: float = 0.0,
    peak: float = 2.0,
) -> Record:
    """Return a whole record of a cell, not yet written."""
    load = {
        "forwards": 1,
        "decode_forwards": 0,
        "tokens": layers[0]["tokens"],
        "dropped": 0,
        "added": 0,
        "lost_all": 0,
        "drop_rate": drop_rate,
        "pad_waste": None,
        "peak_before": peak,
        "peak_after": peak,
        "mean_peak_before": peak,
        "mean_peak_after": peak,
    }
    content = {
        "results": {},
        "capmoe": {
            "schema": SCHEMA,
            "cell": cell.identity(),
            "digest": cell.digest,
            "value": value,
            "stderr": stderr,
            "n": len(correct),
            "documents": {cell.task.name: {"documents": documents, "correct": list(correct)}},
            "load": load,
            "layers": list(layers),
            "proofs": {name: {"passed": True} for name in PROOFS},
            "provenance": {"seconds": 1.0},
        },
    }
    return Record(content, cell.path(root))


def plausible(cell: Cell, root: Path, *, experts: int = 32, depth: int = 4) -> Record:
    """Return a record that looks like a real one: seeded by the cell's own identity."""
    rng = random.Random(f"{cell.model.name} {cell.task.name}")
    method = cell.method
    gamma = 8.0 if method.gamma is None else method.gamma
    top_k = max(1, experts // 8)
    layers = []
    for number in range(depth):
        weights = [math.exp(rng.gauss(0, 0.9)) for _ in range(experts)]
        before = [int(8000 * top_k * w / sum(weights)) + 1 for w in weights]
        mean = sum(before) / experts
        cap = math.ceil(gamma * mean)
        after = [min(n, cap) for n in before]
        if method.name in ("expanded_drop", "token_reroute"):
            more = 1.0 if method.candidates == "global" else 0.3 + 0.03 * method.m
            after = [n + int(more * 0.8 * (cap - n)) for n in after]
        falling = [math.exp(-0.35 * rank) + 0.02 for rank in range(experts)]
        scores = [s / sum(falling) for s in falling] if method.name == "baseline" else None
        layers.append(
            layer(before, after, top_k=top_k, scores=scores, name=f"model.layers.{number}.mlp")
        )
    drop = sum(one["drop_rate"] for one in layers) / depth
    cost = {"score": 0.25, "expanded_drop": 0.2, "order": 0.9, "reverse_order": 0.8, "random": 0.6}
    own = random.Random(cell.digest)
    value = 0.9 - cost.get(method.name, 0.4) * drop + own.gauss(0, 0.004)
    flips = {"order": 0.1, "score": 0.03, "expanded_drop": 0.04}.get(method.name, 0.0)
    correct = [int((rng.random() < 0.85) != (own.random() < flips)) for _ in range(400)]
    peak = min(gamma, 4.0) if method.granularity == "expert" else 0.6 * gamma + 1.5
    return record(
        cell,
        root,
        layers,
        value=max(0.25, value),
        correct=correct,
        drop_rate=drop,
        peak=peak,
    )
