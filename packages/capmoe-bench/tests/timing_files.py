"""Files of benchmarks that nobody ran: every number is given, or follows from a small formula."""

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


MODELS = {"OLMoE": (8, 64), "DeepSeek-V2-Lite": (8, 64), "Qwen1.5-MoE": (6, 60), "Mixtral": (8, 8)}
"""Ranks and experts of the models of Figures 4 and 5."""


def speedup_rows(base: float = 1.0) -> list[dict[str, Any]]:
    """Return dropless and both methods: γ = 2, 1.5, 1 gain 1.1, 1.2 and 1.3 times ``base``."""
    found = [row()]
    for name, less in (("score", 0.0), ("expanded_drop", 0.05)):
        for gamma, gain in ((2.0, 1.1), (1.5, 1.2), (1.0, 1.3)):
            found.append(row(label(name, gamma), base * gain - less, ideal=2 * base, dropped=0.125))
    return found


def speedup_study(kind: str = "emulated", **other: Any) -> dict[str, Any]:
    """Return a study with the four models of Figures 4 and 5."""
    runs = [
        run([point(speedup_rows(1 + n), prefill=speedup_rows(1 + n / 2))], model, *size)
        for n, (model, size) in enumerate(MODELS.items())
    ]
    return study("speedup", runs, kind, **other)


def granularity_study() -> dict[str, Any]:
    """Return a study in which a device's capacity gains 0.1 more, and one of γ = 1 0.2 more."""
    rows = [row()] + [
        row(label("expanded_drop", gamma, unit), 1.2 + device + tight, ideal=2.0)
        for unit, device in (("expert", 0.0), ("device", 0.1))
        for gamma, tight in ((1.0, 0.2), (1.5, 0.0))
    ]
    return study("granularity", [run([point(rows, prefill=rows)], "Qwen3", 8, 128)])


def breakdown_study() -> dict[str, Any]:
    """Return a study in which a tight γ saves half of all but gate, and global costs more."""
    whole = dict(zip(PHASES, (0.001, 0.0, 0.002, 0.003, 0.008, 0.003, 0.001), strict=True))
    rows = [row(phases=whole)]
    for gamma, share in ((1.0, 0.5), (1.5, 0.7), (2.0, 0.9)):
        for name, candidates, more in (
            ("score", "local", 1.0),
            ("expanded_drop", "local", 1.05),
            ("expanded_drop", "global", 1.6),
        ):
            factor = {"gate": 1.0, "decide": 1.0, "permute": share * more}
            factor |= {"dispatch": share * more, "return": share * more}
            times = {phase: value * factor.get(phase, share) for phase, value in whole.items()}
            times["decide"] = 0.0005
            gain = sum(whole.values()) / sum(times.values())
            method = label(name, gamma, candidates=candidates)
            rows.append(row(method, gain, ideal=2.0, phases=times))
    return study("breakdown", [run([point(rows)])])


WORKLOADS = (
    "8K x prompt 0.1K",
    "8K x prompt 0.2K",
    "8K x prompt 0.4K",
    "4K x prompt 1K",
    "2K x prompt 1K",
    "2K x prompt 2K",
    "1K x prompt 1K",
    "1K x prompt 2K",
    "1K x prompt 4K",
)


def workload_study() -> dict[str, Any]:
    """Return a study of Table 10's nine workloads: 1.1, 1.15, 1.2, … and 1.05 … end to end."""
    points = [
        point(
            [row(), row(label("score", 2.0), 1.1 + 0.05 * n, ideal=1.6)],
            place=f"batch {place}",
            prefill=[row(), row(label("score", 2.0), 1.05 + 0.05 * n, ideal=1.6)],
        )
        for n, place in enumerate(WORKLOADS)
    ]
    return study("workload", [run(points, "DeepSeek-V2", 8, 160)])


def placement_study() -> dict[str, Any]:
    """Return a study of 64 experts over 64, 32, 8 and 4 ranks: fewer on each gain more."""
    runs = [
        run(
            [point([row(), row(label("score", 1.0), 1 + ranks / 64, ideal=1 + ranks / 32)])],
            ranks=ranks,
        )
        for ranks in (64, 32, 8, 4)
    ]
    return study("placement", runs)


def skew_study() -> dict[str, Any]:
    """Return a study in which half of the ideal gain is reached, at three peaks."""
    points = [
        point(
            [row(), row(label("score", 1.0), 1 + (peak - 1) / 4, ideal=1 + (peak - 1) / 2)],
            routing={"source": "peak", "peak": peak + 0.1, "wanted_peak": peak, "together": False},
        )
        for peak in (2.0, 4.0, 7.0)
    ]
    return study("skew", [run(points)])


ALL = (
    speedup_study,
    granularity_study,
    breakdown_study,
    workload_study,
    placement_study,
    skew_study,
)


def write_all(folder: Path) -> Path:
    """Write an emulated file of every study that is drawn."""
    for make in ALL:
        write(folder, make())
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
