"""From the file of a study to what it says, every field checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from capmoe_eval.efficiency.content import Content, read_content
from capmoe_eval.efficiency.study import (
    DROPLESS,
    STUDIES,
    Label,
    Link,
    Machine,
    Point,
    Prefill,
    Routing,
    Run,
    Shape,
    Study,
    Timing,
    bench_command,
)
from capmoe_eval.spread import Spread

SCHEMA: Final = 2
_LEAST_SPEEDUP: Final = 1e-9  # a time that is none


def read_study(path: Path) -> Study:
    """Read the file of a study.

    Raises:
        UsageError: If it cannot be read, is of another schema, or lacks something; the message is
            one line that names the field and the command that makes the file anew.
    """
    named = re.match(r"ep-([a-z]+)-", path.name)
    again = bench_command(named[1] if named and named[1] in STUDIES else None)
    content, digest = read_content(path, SCHEMA, again)
    study = content.optional_text("study")
    if study is not None and study not in STUDIES:
        raise content.wrong("study", f"is {study!r}, none of {', '.join(STUDIES)}")
    kind = _kind(content)
    scale = content.number("scale", _LEAST_SPEEDUP)
    machine = content.part("machine")
    return Study(
        path=path,
        digest=digest,
        study=study,
        kind=kind,
        note=content.optional_text("note"),
        date=content.text("date"),
        machine=Machine(
            device=machine.text("device"),
            name=machine.text("name"),
            torch=machine.text("torch"),
            threads=machine.whole("threads"),
        ),
        backend=content.optional_text("backend"),
        dtype=content.text("dtype"),
        repeats=content.whole("repeats", 1),
        warmup=content.whole("warmup"),
        scale=scale,
        runs=tuple(_run(run) for run in content.parts("runs")),
        why=content.optional_text("why") or "",
        batch_divisor=content.optional_number("batch_divisor", _LEAST_SPEEDUP),
    )


def _kind(content: Content) -> Literal["emulated", "measured"]:
    kind = content.text("kind")
    if kind == "measured":
        return "measured"
    if kind != "emulated":
        raise content.wrong("kind", f"is {kind!r}, neither emulated nor measured")
    if "EMULATED" not in (content.optional_text("note") or ""):
        raise content.wrong("note", "does not say that it is EMULATED")
    return "emulated"


def _run(content: Content) -> Run:
    shape = content.part("shape")
    link = content.part("link") if content.has("link") else None
    return Run(
        model=content.optional_text("model"),
        shape=Shape(
            name=shape.text("name"),
            hidden=shape.whole("hidden", 1),
            intermediate=shape.whole("intermediate", 1),
            n_experts=shape.whole("n_experts", 1),
            top_k=shape.whole("top_k", 1),
            shared=shape.whole("shared") if shape.has("shared") else 0,
        ),
        ranks=content.whole("ranks", 1),
        experts_per_rank=content.whole("experts_per_rank", 1),
        link=None
        if link is None
        else Link(link.number("bandwidth"), link.number("latency"), link.text("source")),
        points=tuple(_point(point) for point in content.parts("points")),
        why=content.optional_text("why") or "",
    )


def _point(content: Content) -> Point:
    routing = content.part("routing")
    prefill = content.part("prefill") if content.has("prefill") else None
    return Point(
        tokens_per_rank=content.whole("tokens_per_rank", 1),
        batch=content.whole("batch", 1),
        prompt=content.whole("prompt", 1),
        place=content.optional_text("place"),
        routing=Routing(
            source=routing.text("source"),
            peak=routing.number("peak"),
            wanted_peak=routing.optional_number("wanted_peak"),
            together=routing.flag("together", False),
        ),
        timings=_timings(content),
        prefill=None
        if prefill is None
        else Prefill(
            layers=prefill.whole("layers", 1),
            prompt=prefill.whole("prompt", 1),
            timings=_timings(prefill),
        ),
        errors=_errors(content.part("validation")) if content.has("validation") else {},
    )


def _timings(content: Content) -> tuple[Timing, ...]:
    rows = tuple(_timing(row) for row in content.parts("timings"))
    if [row.method for row in rows if row.label is None] != [DROPLESS]:
        raise content.wrong("timings", f"do not have one row {DROPLESS!r} without a label")
    return rows


def _timing(content: Content) -> Timing:
    label = content.part("label") if content.has("label") else None
    seconds = {phase: _spread(spread) for phase, spread in content.part("seconds").items()}
    if "total" not in seconds:
        raise content.wrong("seconds", "have no total")
    return Timing(
        method=content.text("method"),
        label=None
        if label is None
        else Label(
            name=label.text("name"),
            gamma=label.optional_number("gamma"),
            granularity=label.text("granularity"),
            candidates=label.text("candidates"),
        ),
        seconds=seconds,
        speedup=_spread(content.part("speedup"), _LEAST_SPEEDUP),
        dropped_share=content.part("load").number("dropped_share"),
        ideal_expert=content.number("ideal_expert"),
        ideal_rank=content.number("ideal_rank"),
        reached=content.optional_number("reached", float("-inf")),
    )


def _spread(content: Content, least: float = 0.0) -> Spread:
    median, low, high = (content.number(name, least) for name in ("median", "low", "high"))
    if not low <= median <= high:
        raise content.wrong("median", f"is {median:g}, not between low and high")
    return Spread(median, low, high)


def _errors(content: Content) -> Mapping[str, Mapping[str, float]]:
    """Return the errors of a validation, those of a prefill included."""
    parts = {"": content}
    if content.has("prefill"):
        parts[" (prefill)"] = content.part("prefill")
    return {
        method + suffix: {key: errors.number(key, float("-inf")) for key in ("total", "speedup")}
        for suffix, part in parts.items()
        for method, errors in part.part("errors").items()
    }
