"""The committed files of benchmarks, and some that nobody ran, whose numbers a test says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

EMULATED = "EMULATED: each rank's work was timed in turn on one device"
PHASES = ("gate", "decide", "permute", "dispatch", "experts", "return", "combine")
LOAD = {"kept": 1, "expert_load": [1], "rank_load": [1], "sent_bytes": 1} | {
    "fullest_expert": 1,
    "fullest_rank": 1,
}
MACHINE = {"device": "cpu", "name": "a CPU", "torch": "2.9.0", "threads": 1}


def spread(median: float, width: float = 0.05) -> dict[str, float]:
    return {"median": median, "low": median * (1 - width), "high": median * (1 + width)}


def label(
    name: str, gamma: float, granularity: str = "expert", candidates: str = "local"
) -> dict[str, Any]:
    return {"name": name, "gamma": gamma, "granularity": granularity, "candidates": candidates}


def row(
    method: Mapping[str, Any] | None = None,
    speedup: float = 1.0,
    *,
    ideal: float = 1.0,
    phases: Mapping[str, float] | None = None,
    dropped: float = 0.0,
    **other: Any,
) -> dict[str, Any]:
    """Return a row; its phases take a millisecond each, divided by the speedup."""
    phases = dict.fromkeys(PHASES, 0.001 / speedup) if phases is None else phases
    seconds = {phase: spread(value) for phase, value in phases.items()}
    name = "dropless"
    if method is not None:
        words = [method["name"], f"g{method['gamma']:g}", method["granularity"]]
        name = "-".join([*words, method["candidates"]])
    return {
        "method": name,
        "label": None if method is None else dict(method),
        "seconds": seconds | {"total": spread(sum(phases.values()))},
        "speedup": spread(speedup),
        "load": LOAD | {"dropped_share": dropped},
        "ideal_expert": ideal + 1,
        "ideal_rank": ideal,
        "reached": (speedup - 1) / (ideal - 1) if ideal > 1.05 else None,
        **other,
    }


def point(
    timings: Sequence[Mapping[str, Any]],
    *,
    batch: int = 64,
    prompt: int = 512,
    prefill: Sequence[Mapping[str, Any]] | None = None,
    routing: Mapping[str, Any] | None = None,
    **other: Any,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tokens_per_rank": batch * prompt // 8,
        "batch": batch,
        "prompt": prompt,
        "place": "batch 8K x prompt 512",
        "routing": {"source": "peak", "peak": 4.0, "wanted_peak": 4.0, "together": False},
        "timings": list(timings),
        **other,
    }
    if routing is not None:
        found["routing"] = dict(routing)
    if prefill is not None:
        found["prefill"] = {"layers": 16, "prompt": prompt, "timings": list(prefill)}
    return found


def run(
    points: Iterable[Mapping[str, Any]],
    model: str | None = "OLMoE",
    ranks: int = 8,
    experts: int = 64,
    **other: Any,
) -> dict[str, Any]:
    link = {"bandwidth": 2e11, "latency": 2e-5, "source": "stated"}
    shape = {"name": (model or "free").lower(), "hidden": 256, "intermediate": 128}
    return {
        "model": model,
        "shape": shape | {"n_experts": experts, "top_k": 8, "shared": 0},
        "ranks": ranks,
        "experts_per_rank": experts // ranks,
        "link": link,
        "points": list(points),
        **other,
    }


def study(
    name: str | None, runs: Iterable[Mapping[str, Any]], kind: str = "emulated", **other: Any
) -> dict[str, Any]:
    return {
        "schema": 2,
        "command": "ep",
        "study": name,
        "kind": kind,
        "note": EMULATED if kind == "emulated" else None,
        "date": "2026-01-02T03:04:05+00:00",
        "machine": MACHINE,
        "backend": None if kind == "emulated" else "gloo",
        "dtype": "float32",
        "repeats": 10,
        "warmup": 3,
        "scale": 8,
        "runs": list(runs),
        **other,
    }


def write(folder: Path, content: Mapping[str, Any], name: str = "") -> Path:
    """Write a study where the benchmark would, or under another name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (name or f"ep-{content['study']}-{content['kind']}.json")
    path.write_text(json.dumps(content))
    return path


STUDIES = ("speedup", "granularity", "breakdown", "workload", "placement", "skew")
"""The studies that figures, claims and Table 10 read."""
_BENCH = Path(__file__).parents[3] / "results" / "bench"


def committed(name: str) -> dict[str, Any]:
    """Return the emulated study of the repository."""
    content: dict[str, Any] = json.loads((_BENCH / f"ep-{name}-emulated.json").read_text())
    return content


def write_all(folder: Path) -> Path:
    """Write the emulated file of every study."""
    for name in STUDIES:
        write(folder, committed(name))
    return folder


def evaluation(name: str = "forward", **other: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "command": name,
        "date": "2026-01-02T03:04:05+00:00",
        "machine": MACHINE,
        "targets": [
            {
                "name": "stock",
                "ratio": {"median": 0.99, "low": 0.97, "high": 1.01},
                "unit": "×",
                "at_least": True,
                "target": 0.98,
                "met": True,
                "what": "Our forward at γ = ∞ over stock transformers' <forward>.",
            },
            {
                "name": "score",
                "ratio": {"median": 1.01, "low": 1.0, "high": 1.02},
                "target": 1.05,
                "met": False,
                "what": "score at γ = 1.0 over the dropless stock forward.",
            },
            {
                "name": "memory",
                "unit": "share",
                "ratio": {"median": 0.02, "low": 0.01, "high": 0.04},
                "target": None,
                "at_least": False,
                "met": None,
                "what": "Reported without a goal.",
            },
        ],
        **other,
    }
