"""The result of the benchmark of expert parallelism as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(content: Mapping[str, Any]) -> str:
    """Return the content of a file as text: a block for each run, a line for each method."""
    kind = content["note"] or f"measured on real processes ({content['backend']})"
    lines = [f"{content['study'] or 'ep'}, {content['dtype']}, {content['machine']['name']}", kind]
    for run in content["runs"]:
        lines += ["", *_run_lines(run)]
    return "\n".join(lines)


def _run_lines(run: Mapping[str, Any]) -> list[str]:
    shape = run["shape"]
    shared = f", shared experts of width {shape['shared']}" if shape["shared"] else ""
    lines = [
        f"{run['model'] or shape['name']}: H={shape['hidden']} I={shape['intermediate']} "
        f"E={shape['n_experts']} K={shape['top_k']}{shared}; {run['ranks']} ranks"
    ]
    if run["link"] is not None:
        link = run["link"]
        lines.append(
            f"link: {link['bandwidth'] / 1e9:.3g} GB/s, {1e6 * link['latency']:.3g} µs; "
            f"{link['source']}"
        )
    for point in run["points"]:
        lines += _point_lines(point)
    return lines


def _point_lines(point: Mapping[str, Any]) -> list[str]:
    routing = point["routing"]
    place = f" ({point['place']})" if point["place"] else ""
    lines = [
        f"{point['tokens_per_rank']} tokens per rank{place}, routing of {routing['source']}, "
        f"peak load {routing['peak']:.2f} × mean",
        *_timing_lines(point["timings"]),
    ]
    validation = point.get("validation")
    if validation:
        lines += _error_lines("layer", validation["errors"])
    if "prefill" in point:
        whole = point["prefill"]
        lines.append(f"prefill, {whole['layers']} layers, prompts of {whole['prompt']}")
        lines += _timing_lines(whole["timings"])
        if validation:
            lines += _error_lines("prefill", validation["prefill"]["errors"])
    return lines


def _error_lines(what: str, errors: Mapping[str, Mapping[str, float]]) -> list[str]:
    return [
        f"  emulated {what}, {name}: total {100 * error['total']:+.0f} %, "
        f"speedup {100 * error['speedup']:+.0f} %"
        for name, error in errors.items()
    ]


def _timing_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a heading and a line per method; milliseconds are medians."""
    phases = [phase for phase in rows[0]["seconds"] if phase != "total"]
    lines = [
        f"{'method':<38}{'ms':>9}{'speedup':>9}{'quartiles':>14}{'ideal':>7}{'reached':>9}"
        f"{'dropped':>9}  " + "".join(f"{phase:>9}" for phase in phases)
    ]
    for row in rows:
        speedup, reached = row["speedup"], row["reached"]
        quartiles = f"{speedup['low']:.2f}–{speedup['high']:.2f}"
        lines.append(
            f"{row['method']:<38}{1e3 * row['seconds']['total']['median']:>9.2f}"
            f"{speedup['median']:>9.2f}{quartiles:>14}{row['ideal_rank']:>7.2f}"
            f"{'–' if reached is None else f'{100 * reached:.0f} %':>9}"
            f"{100 * row['load']['dropped_share']:>7.1f} %  "
            + "".join(f"{1e3 * row['seconds'][phase]['median']:>9.2f}" for phase in phases)
        )
    return lines
