"""Results of `ep` as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from capmoe_eval.experiment.timings.schema import Miss, Point, Run, Study, Timing


def table(study: Study) -> str:
    """Return a file as text: a block for each run, a line for each method."""
    kind = study.note or f"measured on real processes ({study.backend})"
    lines = [f"{study.study or 'ep'}, {study.dtype}, {study.machine.name}", kind]
    for run in study.runs:
        lines += ["", *_run_lines(run)]
    return "\n".join(lines)


def _run_lines(run: Run) -> list[str]:
    shape, link = run.shape, run.link
    shared = f", shared experts of width {shape.shared}" if shape.shared else ""
    lines = [
        f"{run.title}: H={shape.hidden} I={shape.intermediate} E={shape.n_experts} "
        f"K={shape.top_k}{shared}; {run.ranks} ranks"
    ]
    if link is not None:
        lines.append(
            f"link: {link.bandwidth / 1e9:.3g} GB/s, {1e6 * link.latency:.3g} µs; {link.source}"
        )
    for point in run.points:
        lines += _point_lines(point)
    return lines


def _point_lines(point: Point) -> list[str]:
    place = f" ({point.place})" if point.place else ""
    lines = [
        f"{point.tokens_per_rank} tokens per rank{place}, routing of {point.routing.source}, "
        f"peak load {point.routing.peak:.2f} × mean",
        *_timing_lines(point.timings),
    ]
    if point.validation:
        lines += _error_lines("layer", point.validation.errors)
    if point.prefill:
        whole = point.prefill
        lines.append(f"prefill, {whole.layers} layers, prompts of {whole.prompt}")
        lines += _timing_lines(whole.timings)
        if point.validation and point.validation.prefill:
            lines += _error_lines("prefill", point.validation.prefill.errors)
    return lines


def _error_lines(what: str, errors: Mapping[str, Miss]) -> list[str]:
    return [
        f"  emulated {what}, {name}: total {100 * error.total:+.0f} %, "
        f"speedup {100 * error.speedup:+.0f} %"
        for name, error in errors.items()
    ]


def _timing_lines(rows: Sequence[Timing]) -> list[str]:
    """Return a heading and a line per method; milliseconds are medians."""
    phases = [phase for phase in rows[0].seconds if phase != "total"]
    lines = [
        f"{'method':<38}{'ms':>9}{'speedup':>9}{'quartiles':>14}{'ideal':>7}{'reached':>9}"
        f"{'dropped':>9}  " + "".join(f"{phase:>9}" for phase in phases)
    ]
    for row in rows:
        quartiles = f"{row.speedup.low:.2f}–{row.speedup.high:.2f}"
        lines.append(
            f"{row.method:<38}{1e3 * row.seconds['total'].median:>9.2f}"
            f"{row.speedup.median:>9.2f}{quartiles:>14}{row.ideal_rank:>7.2f}"
            f"{'–' if row.reached is None else f'{100 * row.reached:.0f} %':>9}"
            f"{100 * row.dropped_share:>7.1f} %  "
            + "".join(f"{1e3 * row.seconds[phase].median:>9.2f}" for phase in phases)
        )
    return lines
