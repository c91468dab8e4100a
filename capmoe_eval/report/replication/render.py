"""Judgements as JSON, as Markdown and as a picture."""

from __future__ import annotations

import dataclasses
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.paper.replication.claims import MARGIN
from capmoe_eval.paper.replication.verdict import Finding, Judgement
from capmoe_eval.paper.verdicts import CONFIRMED, CONTRADICTED, LEVEL, NOT_SHOWN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Told apart by shape, too: Okabe and Ito's blue, vermilion and grey.
_LOOK: Final = {CONFIRMED: ("#0072b2", "o"), CONTRADICTED: ("#d55e00", "X")}
_OTHER: Final = ("#7f7f7f", "s")


def to_json(judgements: Sequence[Judgement], about: Mapping[str, Any]) -> str:
    """Return the judgements as JSON text.

    Args:
        judgements: All claims.
        about: What they rest on: profile, models, number of records.
    """
    claims = [
        {
            "id": judgement.claim.key,
            "place": judgement.claim.place,
            "statement": judgement.claim.statement,
            "verdict": judgement.verdict,
            "contrasts": [_rounded(finding) for finding in judgement.findings],
        }
        for judgement in judgements
    ]
    content = {**about, "level": LEVEL, "margin": MARGIN, "claims": claims}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _rounded(finding: Finding) -> dict[str, Any]:
    content = dataclasses.asdict(finding)
    for key in ("effect", "low", "high", "p"):
        if content[key] is not None:
            content[key] = round(content[key], 5)
    content["models"] = {name: round(value, 5) for name, value in finding.models.items()}
    return content


def to_markdown(judgements: Sequence[Judgement], about: Mapping[str, Any]) -> str:
    """Return the judgements as a report."""
    counts = Counter(judgement.verdict for judgement in judgements)
    lines = [
        f"# Replication on {len(about['models'])} models, profile {about['profile']}",
        "",
        f"Models: {', '.join(about['models'])}. Evaluations: {about['records']}. "
        f"{', '.join(f'{n} {verdict}' for verdict, n in counts.items())}.",
        "",
        *(f"**{note}**\n" for note in about["notes"]),
        "Effects are differences between two ways to route on the same documents, in points of "
        "accuracy: tasks count equally, a document's difference is its mean over the models (and "
        "seeds). In brackets the 95 % confidence interval (bootstrap over documents). p: sign-flip "
        f"test over documents, corrected within the claim (Holm); {LEVEL:g} decides. `≥ … - "
        f"{MARGIN:g}` asks for no more than {MARGIN:g} point lost and is decided by the interval. "
        "Measures of load have no interval: they hold on every model or not. Contrasts with "
        "*mixed batches* put four tasks into one batch at random; all others have batches of one "
        "task, by length, as lm-eval makes them.",
        "",
        "| | claim | place | verdict |",
        "|---|---|---|---|",
    ]
    for judgement in judgements:
        claim = judgement.claim
        lines.append(
            f"| ({claim.key}) | {claim.statement} | {claim.place} | **{judgement.verdict}** |"
        )
    for judgement in judgements:
        lines += ["", *_section(judgement, about["models"])]
    return "\n".join(lines) + "\n"


def _section(judgement: Judgement, models: Sequence[str]) -> list[str]:
    claim = judgement.claim
    lines = [f"## ({claim.key}) {claim.statement}", "", f"{claim.place}: **{judgement.verdict}**."]
    by_model = [f for f in judgement.findings if set(f.models) <= set(models)]
    other = [f for f in judgement.findings if f not in by_model]
    if by_model:
        heads = [model.removeprefix("zoo_") for model in models]
        lines += ["", f"| | effect | p | verdict | {' | '.join(heads)} |"]
        lines += ["|---|---:|---:|---|" + "---:|" * len(models)]
        for finding in by_model:
            own = [_number(finding.models.get(model)) for model in models]
            lines.append(f"{_row(finding)} {' | '.join(own)} |")
    for finding in other:
        own = [f"{name} {_number(value)}" for name, value in finding.models.items()]
        lines += ["", "| | effect | p | verdict | |", "|---|---:|---:|---|---|"]
        lines.append(f"{_row(finding)} {', '.join(own)} |")
    notes = dict.fromkeys(finding.note for finding in judgement.findings if finding.note)
    return [*lines, *(f"\n{note[0].upper()}{note[1:]}." for note in notes)]


def _row(finding: Finding) -> str:
    interval = ""
    if finding.low is not None:
        interval = f" [{_number(finding.low)}, {_number(finding.high)}]"
    unit = "" if finding.unit == "points" else f" {finding.unit}"
    p = "" if finding.p is None else f"{finding.p:.4f}" if finding.p >= 1e-4 else "< 0.0001"
    return (
        f"| {finding.label} | {_number(finding.effect)}{interval}{unit} | {p} | {finding.verdict} |"
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"


def draw(judgements: Sequence[Judgement], title: str) -> Figure:
    """Draw every contrast's effect with its interval, and each model's effect beside it."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rows = [
        (judgement.claim.key, finding)
        for judgement in judgements
        for finding in judgement.findings
        if finding.unit == "points" and finding.effect is not None
    ]
    figure = Figure(figsize=(7.2, 0.6 + 0.155 * len(rows)), layout="constrained")
    axes = figure.subplots()
    previous = ""
    for place, (key, finding) in enumerate(rows):
        colour, marker = _LOOK.get(finding.verdict, _OTHER)
        assert finding.effect is not None
        if finding.low is not None and finding.high is not None:
            axes.plot([finding.low, finding.high], [place, place], color=colour, linewidth=1.6)
        axes.plot(
            list(finding.models.values()), [place] * len(finding.models), "|", color="#999999"
        )
        axes.plot(finding.effect, place, marker, color=colour, markersize=4.5)
        if key != previous and place:
            axes.axhline(place - 0.5, color="#cccccc", linewidth=0.6)
        previous = key
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"({key}) {f.label}" for key, f in rows], fontsize=6.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xscale("symlog", linthresh=5)
    axes.set_xticks([-50, -20, -5, -2, 0, 2, 5, 20, 50])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("difference of accuracy in points (axis logarithmic beyond ±5)", fontsize=7.5)
    axes.set_title(title, fontsize=8.5)
    axes.grid(axis="x", color="#e5e5e5", linewidth=0.5)
    axes.set_axisbelow(True)
    legend = [*((word, *look) for word, look in _LOOK.items()), (NOT_SHOWN, *_OTHER)]
    handles = [
        Line2D([], [], color=colour, marker=marker, markersize=4.5, label=name)
        for name, colour, marker in legend
    ]
    handles.append(Line2D([], [], color="#999999", marker="|", linestyle="", label="one model"))
    figure.legend(handles=handles, fontsize=7, ncols=4, loc="outside lower center", frameon=False)
    return figure


def to_png(figure: Figure) -> bytes:
    """Return a figure as PNG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=170, metadata={"Software": None})
    return buffer.getvalue()
