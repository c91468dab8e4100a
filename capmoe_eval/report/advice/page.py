"""An advice as text and as a page by itself; the site shows the same parts."""

from __future__ import annotations

from capmoe_eval.report.templates import render
from capmoe_eval.report.templates.texts import ABSENT, shown
from capmoe_eval.serving.advice import Advice, axis_words
from capmoe_eval.serving.exports.files import MEGATRON
from capmoe_eval.serving.front import comparable, cost
from capmoe_eval.serving.settings import Change, Setting
from capmoe_eval.serving.trace import steps_in_words

_HEADINGS = (
    "fullest rank over the mean",
    "speedup of the expert step, at most",
    "pairs dropped",
    "gate scores dropped",
    "padding",
    "experts active in a layer and step",
    "accuracy, points",
    "95 % interval",
    "tasks (documents)",
    "pairs dropped there",
    "copies of experts in a layer",
    "weights sent once in a layer",
    "weights sent in a layer and step",
)


def to_html(advice: Advice) -> str:
    """Return the advice as one page that needs nothing besides."""
    return render("advice.html", **content(advice))


def content(advice: Advice) -> dict[str, object]:
    """Return what the templates show of an advice."""
    place = advice.recommendation.setting
    size = advice.expert_bytes
    rows = [(number == place, one, _cells(one, size)) for number, one in enumerate(advice.settings)]
    sent = "" if size is None else ", MB"
    return {
        "advice": advice,
        "about": about(advice),
        "remark": remark(advice),
        "headings": [
            ("setting", ""),
            *((name + sent * name.startswith("weights"), "number") for name in _HEADINGS),
        ],
        "front": sorted(
            (row for row in rows if row[1].is_on_front), key=lambda row: row[1].reached
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
        "Megatron-LM has one of score and of order, of each expert in blocks, one γ for all layers."
    )


def _cells(setting: Setting, expert_bytes: int | None) -> list[tuple[str, float | None]]:
    """Return the numbers of a setting as text and value; weights in MB, if their size is known."""
    megabytes = 1.0 if expert_bytes is None else expert_bytes / 1e6
    return [
        (shown(setting.straggler, "{:.2f}"), setting.straggler),
        (shown(setting.speedup, "{:.2f}×"), setting.speedup),
        (shown(setting.drop_rate, "{:.1%}"), setting.drop_rate),
        (shown(setting.dropped_score, "{:.1%}"), setting.dropped_score),
        (shown(setting.pad_waste, "{:.1%}"), setting.pad_waste),
        (shown(setting.active, "{:.1f}"), setting.active),
        *_accuracy(setting.change),
        (shown(setting.extra, "{:.3g}"), setting.extra),
        (shown(setting.set_up * megabytes, "{:.3g}"), setting.set_up),
        (shown(setting.moved * megabytes, "{:.3g}"), setting.moved),
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
    rows = [
        ["front", "fullest/mean", "speedup ≤", "dropped", "active", axis_words(advice.axis)],
        *_front_rows(advice),
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
            *(["", advice.activation] if advice.activation else []),
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


def _front_rows(advice: Advice) -> list[list[str]]:
    """Return the rows of the front, one for settings that differ in who is kept alone."""
    names: dict[tuple[str, ...], list[str]] = {}
    front = (setting for setting in advice.settings if setting.is_on_front)
    for one in sorted(front, key=lambda setting: setting.reached):
        cells = (
            shown(one.straggler, "{:.2f}"),
            shown(one.speedup, "{:.2f}×"),
            shown(one.drop_rate, "{:.1%}"),
            shown(one.active, "{:.1f}"),
            _cost(one, advice),
        )
        key = one.name if one.is_lossless else one.bound
        names.setdefault((key, *cells), []).append(one.title)
    return [
        [titles[0] if len(titles) == 1 else f"{_either(titles)} {key}", *cells]
        for (key, *cells), titles in names.items()
    ]


def _either(titles: list[str]) -> str:
    return ", ".join(title.split(" γ")[0] for title in titles)


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
        (advice.settings[number], found)
        for number in comparable(advice.settings)
        if (found := cost(advice.settings[number], advice.axis)) is not None
    ]
    most = max((setting.reached for setting, _ in known), default=1.0)
    least = min((setting.reached for setting, _ in known), default=1.0)
    dearest = max((found for _, found in known), default=0.0) or 1.0
    span = (most - least) or 1.0

    def place(setting: Setting, found: float) -> tuple[float, float]:
        across = _LEFT + _WIDTH * (setting.reached - least) / span
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
