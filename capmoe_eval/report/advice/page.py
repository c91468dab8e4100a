"""An advice as text and as a page by itself; the site shows the same parts."""

from __future__ import annotations

from capmoe_eval.report.templates import render
from capmoe_eval.report.templates.texts import ABSENT, shown
from capmoe_eval.serving.advice import Advice, axis_words
from capmoe_eval.serving.exports.files import MEGATRON
from capmoe_eval.serving.front import Change, Setting, cost
from capmoe_eval.serving.trace import steps_in_words

_HEADINGS = (
    ("setting", ""),
    ("fullest rank over the mean", "number"),
    ("speedup of the expert step, at most", "number"),
    ("pairs dropped", "number"),
    ("gate scores dropped", "number"),
    ("padding", "number"),
    ("accuracy, points", "number"),
    ("95 % interval", "number"),
    ("tasks (documents)", "number"),
    ("pairs dropped there", "number"),
    ("copies of experts in a layer", "number"),
    ("weights sent in a layer and step", "number"),
)


def to_html(advice: Advice) -> str:
    """Return the advice as one page that needs nothing besides."""
    return render("advice.html", **content(advice))


def content(advice: Advice) -> dict[str, object]:
    """Return what the templates show of an advice."""
    place = advice.recommendation.setting
    rows = [(number == place, one, _cells(one)) for number, one in enumerate(advice.settings)]
    return {
        "advice": advice,
        "about": about(advice),
        "remark": remark(advice),
        "headings": _HEADINGS,
        "front": sorted(
            (row for row in rows if row[1].is_on_front), key=lambda row: row[1].speedup
        ),
        "rows": rows,
        "axis": axis_words(advice.axis),
        "picture": _picture(advice),
    }


def about(advice: Advice) -> str:
    """Return what the advice is on, in one sentence."""
    steps = "their own batches"
    if advice.basis == "trace":
        steps = steps_in_words(advice.steps, advice.decode_steps)
    top_k = "" if advice.top_k is None else f", top-{advice.top_k}"
    return (
        f"{advice.model or 'unknown model'} ({advice.source}): {steps}, {advice.layers} MoE layers "
        f"of {advice.n_experts} experts{top_k}; {advice.ranks} ranks, {advice.experts_per_rank} "
        f"experts on each with copies; {advice.link_share:.0%} of the expert step is the link. "
        f"Asked: {advice.budget}."
    )


def remark(advice: Advice) -> str:
    """Return a sentence on a recommended capacity that no server has, or nothing."""
    if advice.recommendation.kind != "capacity" or MEGATRON in advice.files:
        return ""
    return (
        "No server takes it from a file: SGLang, TensorRT-LLM and vLLM have no capacity, and "
        "Megatron-LM has one of score and of order, of each expert."
    )


def _cells(setting: Setting) -> list[tuple[str, float | None]]:
    """Return the numbers of a setting as text and value."""
    return [
        (shown(setting.straggler, "{:.2f}"), setting.straggler),
        (shown(setting.speedup, "{:.2f}×"), setting.speedup),
        (shown(setting.drop_rate, "{:.1%}"), setting.drop_rate),
        (shown(setting.dropped_score, "{:.1%}"), setting.dropped_score),
        (shown(setting.pad_waste, "{:.1%}"), setting.pad_waste),
        *_accuracy(setting.change),
        (shown(setting.extra, "{:.3g}"), setting.extra),
        (shown(setting.moved, "{:.3g}"), setting.moved),
    ]


def _accuracy(change: Change | None) -> list[tuple[str, float | None]]:
    if change is None:
        return [(ABSENT, None)] * 4
    low, high = (shown(bound, "{:+.2f}") for bound in (change.low, change.high))
    return [
        (shown(change.effect, "{:+.2f}"), change.effect),
        (f"[{low}, {high}]", change.low),
        (f"{len(change.tasks)} ({change.documents:,})", change.documents),
        (shown(change.drop_rate, "{:.1%}"), change.drop_rate),
    ]


def text(advice: Advice) -> str:
    """Return the advice as lines: the recommendation, the front, and what is not known."""
    front = [setting for setting in advice.settings if setting.is_on_front]
    rows = [
        ["front", "fullest/mean", "speedup ≤", "dropped", axis_words(advice.axis)],
        *(
            [
                one.title,
                f"{one.straggler:.2f}",
                f"{one.speedup:.2f}×",
                f"{one.drop_rate:.1%}",
                _cost(one, advice),
            ]
            for one in sorted(front, key=lambda setting: setting.speedup)
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]
    steps = [] if advice.assumed_steps is None else [f"steps: {advice.assumed_steps}"]
    return "\n".join(
        [
            about(advice),
            *steps,
            "",
            f"{advice.recommendation.sentence} {remark(advice)}".rstrip(),
            "",
            *table,
            "",
            "Not known:",
            *(f"- {line}" for line in advice.unknown),
            *(
                ["", "To measure what the answers lose:", *advice.commands]
                if advice.commands
                else []
            ),
        ]
    )


def _cost(setting: Setting, advice: Advice) -> str:
    if setting.is_lossless:
        return "no loss"
    if setting.change is not None:
        change = setting.change
        return f"{change.effect:+.2f} [{change.low:+.2f}, {change.high:+.2f}]".replace("-", "−")
    return shown(cost(setting, advice.axis), "{:.1%}")


_WIDTH, _HEIGHT, _LEFT, _TOP = 560, 260, 44, 8


def _picture(advice: Advice) -> dict[str, object]:
    """Return the places of all settings of known cost in a picture of speedup and cost."""
    known = [
        (setting, found)
        for setting in advice.settings
        if setting.kind != "transfers" and (found := cost(setting, advice.axis)) is not None
    ]
    most = max((setting.speedup for setting, _ in known), default=1.0)
    least = min((setting.speedup for setting, _ in known), default=1.0)
    dearest = max((found for _, found in known), default=0.0) or 1.0
    span = (most - least) or 1.0

    def place(setting: Setting, found: float) -> tuple[float, float]:
        across = _LEFT + _WIDTH * (setting.speedup - least) / span
        return round(across, 1), round(_TOP + _HEIGHT * (1 - found / dearest), 1)

    points = [(*place(setting, found), setting) for setting, found in known]
    front = sorted((point for point in points if point[2].is_on_front), key=lambda point: point[0])
    scale = 1 if advice.axis == "points" else 100
    return {
        "width": _WIDTH + _LEFT + 12,
        "height": _HEIGHT + _TOP + 40,
        "left": _LEFT,
        "top": _TOP,
        "right": _LEFT + _WIDTH,
        "bottom": _TOP + _HEIGHT,
        "points": points,
        "line": " ".join(f"{x},{y}" for x, y, _ in front),
        "least": f"{least:.2f}×",
        "most": f"{most:.2f}×",
        "dearest": f"{scale * dearest:.3g}",
        "unit": "points" if advice.axis == "points" else "%",
    }
