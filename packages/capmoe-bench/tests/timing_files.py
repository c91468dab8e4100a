"""The committed files of studies, and studies that nobody ran, whose numbers a test says."""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

STUDIES = ("speedup", "granularity", "breakdown", "workload", "placement", "skew")
"""The studies that figures, claims and Table 10 read."""
BENCH = Path(__file__).parents[3] / "results" / "bench"


def committed(name: str) -> dict[str, Any]:
    """The emulated study of the repository."""
    content: dict[str, Any] = json.loads((BENCH / f"ep-{name}-emulated.json").read_text())
    return content


SKEW = committed("skew")  # a layer of OLMoE on 8 ranks
(RUN,) = SKEW["runs"]


def write(folder: Path, content: Mapping[str, Any], name: str = "") -> Path:
    """Write a study where the benchmark would, or under another name."""
    path = folder / (name or f"ep-{content['study']}-{content['kind']}.json")
    path.write_text(json.dumps(content))
    return path


def write_all(folder: Path) -> Path:
    """Write the emulated file of every study."""
    for name in STUDIES:
        write(folder, committed(name))
    return folder


def spread(median: float) -> dict[str, float]:
    """A median with quartiles of 5 % around it."""
    return {"median": median, "low": 0.95 * median, "high": 1.05 * median}


def label(name: str, gamma: float) -> dict[str, Any]:
    return {"name": name, "gamma": gamma, "granularity": "expert", "candidates": "local"}


def row(
    method: Mapping[str, Any] | None = None,
    speedup: float = 1.0,
    *,
    phases: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """A row; its phases take a millisecond each, divided by the speedup."""
    timing = copy.deepcopy(RUN["points"][0]["timings"][0])
    if phases is None:
        phases = dict.fromkeys([*timing["seconds"]][:-1], 0.001 / speedup)
    seconds = {**phases, "total": sum(phases.values())}
    return timing | {
        "method": f"{method['name']}-g{method['gamma']:g}" if method else "dropless",
        "label": method,
        "seconds": {phase: spread(value) for phase, value in seconds.items()},
        "speedup": spread(speedup),
    }


def point(timings: Sequence[Mapping[str, Any]], **other: Any) -> dict[str, Any]:
    return RUN["points"][0] | {"timings": timings} | other


def run(
    points: Iterable[Mapping[str, Any]], model: str = "OLMoE", ranks: int = 8, **other: Any
) -> dict[str, Any]:
    spread_over = {"ranks": ranks, "experts_per_rank": 64 // ranks}
    return RUN | {"model": model, **spread_over, "points": list(points)} | other


def study(
    name: str, runs: Iterable[Mapping[str, Any]], kind: str = "emulated", **other: Any
) -> dict[str, Any]:
    real = {"note": None, "backend": "gloo"} if kind == "measured" else {}
    return SKEW | {"study": name, "kind": kind, "runs": list(runs)} | real | other
