"""An advice as text and as a page."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Final

from capmoe_eval.report.templates import ABSENT, columns, render, shown

from capmoe_serve.advice import Advice
from capmoe_serve.exports import MEGATRON
from capmoe_serve.settings import AXES, Change, ServingSetting, cost, priced
from capmoe_serve.trace import steps_in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def to_html(advice: Advice) -> str:
    """Return the advice as one page that needs nothing besides."""
    from capmoe_eval.report.figures.write import images_of

    svg = images_of(lambda: draw_settings(advice), ["svg"])["svg"]
    cells = [_cells(setting, advice.expert_bytes) for setting in advice.settings]
    rows = [
        (setting is advice.chosen, setting, [*numbers.values()])
        for setting, numbers in zip(advice.settings, cells, strict=True)
    ]
    front = sorted((row for row in rows if row[1].is_on_front), key=lambda row: row[1].speedup)
    return render(
        "advice.html",
        "capmoe_serve",
        advice=advice,
        about=about(advice),
        remark=remark(advice),
        headings=[("setting", ""), *((heading, "number") for heading in cells[0])],
        front=front,
        rows=rows,
        axis=AXES[advice.axis],
        picture=f"data:image/svg+xml;base64,{b64encode(svg).decode()}",
    )


_LOOKS: Final[dict[str, dict[str, object]]] = {
    "nothing is dropped": {"color": "grey", "linestyle": "", "marker": "o"},
    "a capacity": {"color": "grey", "linestyle": "", "marker": "o", "fillstyle": "none"},
    "the front": {"linestyle": "--", "marker": "o"},
    "recommended": {"linestyle": "", "marker": "*", "markersize": 9, "zorder": 4},
}


def draw_settings(advice: Advice) -> Figure:
    """Draw the settings of known cost by speedup, the front as a line."""
    from capmoe_eval.report.figures import drawing as d

    scale = 1 if advice.axis == "points" else 100
    points = {
        setting: (setting.speedup, scale * lost)
        for setting, lost in sorted(
            priced(advice.settings, advice.axis).items(), key=lambda item: item[0].speedup
        )
    }
    groups = {
        "nothing is dropped": [points[s] for s in points if s.is_lossless],
        "a capacity": [points[s] for s in points if not s.is_lossless],
        "the front": [points[s] for s in points if s.is_on_front],
        "recommended": [points[s] for s in points if s == advice.chosen],
    }
    canvas, ((axes,),) = d.canvas(2.8)
    for name, group in groups.items():
        if group:
            axes.plot(*zip(*group, strict=True), **_LOOKS[name], label=name)
    lost = " lost" if advice.axis == "points" else ", %"
    axes.set(xlabel="speedup of the expert step, at most (×)", ylabel=f"{AXES[advice.axis]}{lost}")
    d.legend(canvas, 1)
    return canvas


def about(advice: Advice) -> str:
    """Return what the advice is on, in one sentence."""
    steps = steps_in_words(advice.steps, advice.decode_steps)
    top_k = "" if advice.top_k is None else f", top-{advice.top_k}"
    nodes = "" if advice.nodes == 1 else f", on {advice.nodes} nodes of {advice.groups} groups"
    return (
        f"{advice.model or 'unknown model'} ({advice.source}): {steps}, {advice.layers} MoE layers "
        f"of {advice.n_experts} experts{top_k}; {advice.ranks} ranks, {advice.experts_per_rank} "
        f"experts on each with copies{nodes}; {advice.link_share:.0%} of the expert step is the "
        f"link. Asked: {advice.budget}."
    )


def remark(advice: Advice) -> str:
    """Return a sentence on a recommended capacity that no server has, or nothing."""
    if advice.chosen is None or advice.chosen.is_lossless or MEGATRON in advice.files:
        return ""
    return (
        "No server takes it from a file: SGLang, TensorRT-LLM and vLLM have no capacity, and "
        "Megatron-LM has Token Drop of each expert in contiguous placement, with one γ "
        "for all layers."
    )


def _cells(
    setting: ServingSetting, expert_bytes: int | None
) -> dict[str, tuple[str, float | None]]:
    """Return the numbers of a setting by heading, as text and value.

    Weights are in MB, if their size is known.
    """
    size, unit = (1.0, "") if expert_bytes is None else (expert_bytes / 1e6, ", MB")
    once, steadily = (shown(sent, "{:.3g}", size) for sent in (setting.set_up, setting.moved))
    return {
        "fullest rank over the mean": (shown(setting.straggler, "{:.2f}"), setting.straggler),
        "speedup of the expert step, at most": (shown(setting.speedup, "{:.2f}×"), setting.speedup),
        "pairs dropped": (shown(setting.drop_rate, "{:.1%}"), setting.drop_rate),
        "gate scores dropped": (shown(setting.dropped_score, "{:.1%}"), setting.dropped_score),
        "padding": (shown(setting.pad_waste, "{:.1%}"), setting.pad_waste),
        "experts active in a layer and step": (shown(setting.active, "{:.1f}"), setting.active),
        **_accuracy(setting.change),
        "copies of experts in a layer": (shown(setting.extra, "{:.3g}"), setting.extra),
        f"weights sent once in a layer{unit}": (once, setting.set_up),
        f"weights sent in a layer and step{unit}": (steadily, setting.moved),
    }


def _accuracy(change: Change | None) -> dict[str, tuple[str, float | None]]:
    headings = ("accuracy, points", "95 % interval", "tasks (documents)", "pairs dropped there")
    if change is None:
        return dict.fromkeys(headings, (ABSENT, None))
    low, high = (shown(bound, "{:+.2f}") for bound in (change.low, change.high))
    cells = (
        (shown(change.effect, "{:+.2f}"), change.effect),
        (f"[{low}, {high}]", change.low),
        (f"{len(change.tasks)} ({change.documents:,})", change.documents),
        (shown(change.drop_rate, "{:.1%}"), change.drop_rate),
    )
    return dict(zip(headings, cells, strict=True))


def text(advice: Advice) -> str:
    """Return the advice as lines: the recommendation, the front, and what is not known."""
    heads = ["front", "fullest/mean", "speedup ≤", "dropped", "active", AXES[advice.axis]]
    lines = [about(advice)]
    if advice.assumed_steps is not None:
        lines.append(f"steps: {advice.assumed_steps}")
    lines += ["", f"{advice.sentence} {remark(advice)}".rstrip(), ""]
    front = front_names(advice).items()
    lines += columns([heads, *([name, *_front_cells(setting, advice)] for name, setting in front)])
    lines += ["", "Not known:", *(f"- {line}" for line in advice.unknown)]
    if advice.commands:
        lines += ["", "To measure what the answers lose:", *advice.commands]
    return "\n".join(lines)


def front_names(advice: Advice) -> dict[str, ServingSetting]:
    """Return the front by name, once for settings that differ in who is kept alone."""
    names: dict[tuple[str, ...], list[ServingSetting]] = {}
    front = (setting for setting in advice.settings if setting.is_on_front)
    for setting in sorted(front, key=lambda setting: setting.speedup):
        key = setting.name if setting.is_lossless else setting.bound
        names.setdefault((key, *_front_cells(setting, advice)), []).append(setting)
    named = {}
    for (key, *_), same in names.items():
        kept = ", ".join(setting.title.partition(" γ")[0] for setting in same)
        named[same[0].title if len(same) == 1 else f"{kept} {key}"] = same[0]
    return named


def _front_cells(setting: ServingSetting, advice: Advice) -> tuple[str, ...]:
    return (
        shown(setting.straggler, "{:.2f}"),
        shown(setting.speedup, "{:.2f}×"),
        shown(setting.drop_rate, "{:.1%}"),
        shown(setting.active, "{:.1f}"),
        _cost(setting, advice),
    )


def _cost(setting: ServingSetting, advice: Advice) -> str:
    if setting.is_lossless:
        return "no loss"
    if setting.change is not None:
        return str(setting.change)
    return shown(cost(setting, advice.axis), "{:.1%}")
