"""The picture of an advice: settings by speedup and cost, the front by name, the recommendation."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Final, NamedTuple

from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.write import images_of

from capmoe_serve.advice import Advice
from capmoe_serve.settings import AXES, ServingSetting, priced

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BEYOND: Final = 1.6
"""The axis of costs reaches so many times as far as the front and the recommended setting."""
_NEAR: Final = 0.06
"""Points that are nearer, as a share of both axes, have one label for their numbers."""
_LETTERS: Final = 50
"""In a line of the legend."""
_LINE: Final = 0.14
"""Height of a line of the legend, inches."""
_RING: Final[d.Look] = {"color": d.GREY, "linestyle": "", "marker": "o", "fillstyle": "none"}
_DOT: Final[d.Look] = {"color": d.GREY, "linestyle": "", "marker": "o"}
_FRONT: Final[d.Look] = {"color": d.BLUE, "linestyle": "--", "linewidth": 0.8, "marker": "o"}
_NUMBER: Final[d.Look] = {
    **{"color": d.BLUE, "linestyle": "", "markersize": 5, "markeredgewidth": 0}
}
_STAR: Final[d.Look] = {
    "color": d.VERMILLION,
    "linestyle": "",
    "marker": "*",
    "markersize": 9,
    "zorder": 4,
}
_UPRIGHT: Final[d.Look] = {"color": d.VERMILLION, "linestyle": ":"}


class FrontPicture(NamedTuple):
    """The picture of an advice on a page: an address that holds it, and what it shows in words."""

    source: str
    words: str


def front_picture(advice: Advice, front: Mapping[str, ServingSetting]) -> FrontPicture:
    """Return the picture of an advice, whose front has these names, for a page."""
    svg = images_of(lambda: draw_front(advice, front), ["svg"])["svg"]
    source = f"data:image/svg+xml;base64,{b64encode(svg).decode()}"
    return FrontPicture(source, in_words(advice, front))


def in_words(advice: Advice, front: Mapping[str, ServingSetting]) -> str:
    """Return what the picture shows in words."""
    scale, unit = _scale(advice)
    costs = priced(advice.settings, advice.axis)
    words = [f"Settings by the bound on the speedup of the expert step and {AXES[advice.axis]}."]
    if (chosen := _recommended(advice)) is not None:
        words.append(f"Recommended: {chosen.title}, {chosen.reached:.2f}×.")
    for number, (name, setting) in enumerate(front.items(), start=1):
        lost = scale * costs[setting]
        words.append(f"{number}: {name}, {setting.reached:.2f}×, {lost:.3g}{unit}.")
    return " ".join(words)


def _scale(advice: Advice) -> tuple[int, str]:
    return (1, " points") if advice.axis == "points" else (100, " %")


def _recommended(advice: Advice) -> ServingSetting | None:
    place = advice.recommendation.setting
    return None if place is None else advice.settings[place]


def draw_front(advice: Advice, front: Mapping[str, ServingSetting]) -> Figure:
    """Draw the settings of known cost by speedup; the legend has the names of the front."""
    scale, _ = _scale(advice)
    costs = {s: scale * lost for s, lost in priced(advice.settings, advice.axis).items()}
    chosen = _recommended(advice)
    far = max((costs[s] for s in (*front.values(), chosen) if s in costs), default=0.0)
    top = _BEYOND * far or max(costs.values(), default=0.0) or 1.0
    beyond = sum(lost > top for lost in costs.values())
    more = f"; above the picture: {beyond}" if beyond else ""
    others = {s: lost for s, lost in costs.items() if not s.is_on_front and lost <= top}
    points = [(setting.reached, costs[setting]) for setting in front.values()]
    names = [fill(name, _LETTERS) for name in front]
    recommended = "" if chosen is None else fill(f"recommended: {chosen.title}", _LETTERS)
    lines = sum(name.count("\n") + 1 for name in (*names, *filter(None, [recommended])))
    # Three more: of settings that are not on the front, and the front's own.
    canvas, ((axes,),) = d.canvas(2.5 + _LINE * (lines + 3))
    if chosen in costs:
        axes.plot([chosen.reached], [costs[chosen]], **_STAR, label=recommended)
    elif chosen is not None:  # its cost is not known
        axes.axvline(chosen.reached, **_UPRIGHT, label=recommended)
    for name, is_lossless, look in (
        ("nothing is dropped", True, _DOT),
        (f"a capacity{more}", False, _RING),
    ):
        same = [(s.reached, y) for s, y in others.items() if s.is_lossless is is_lossless]
        axes.plot([x for x, _ in same], [y for _, y in same], **look, label=name)
    axes.plot([x for x, _ in points], [y for _, y in points], **_FRONT, label="the front:")
    for text, at in _numbers(points, top):
        beside = {"xytext": (4, -3), "textcoords": "offset points", "va": "top", "color": d.BLUE}
        axes.annotate(text, at, **beside)
    for number, name in enumerate(names, start=1):
        axes.plot([], [], **_NUMBER, marker=f"${number}$", label=name)
    axes.margins(x=0.08)
    lost = " lost" if advice.axis == "points" else ", %"
    axes.set(
        xlabel="speedup of the expert step, at most (×)",
        ylabel=f"{AXES[advice.axis]}{lost}",
        ylim=(-0.08 * top, 1.03 * top),
    )
    d.legend(canvas, 1)
    return canvas


def _numbers(
    points: Sequence[tuple[float, float]], top: float
) -> Iterable[tuple[str, tuple[float, float]]]:
    """Yield the numbers of points along the front, those of near ones in one label."""
    span = (points[-1][0] - 1.0 if points else 0.0) or 1.0
    labels: list[tuple[tuple[float, float], list[str]]] = []
    for number, (x, y) in enumerate(points, start=1):
        if labels:
            (first_x, first_y), numbers = labels[-1]
            if abs(x - first_x) < _NEAR * span and abs(y - first_y) < _NEAR * top:
                numbers.append(str(number))
                continue
        labels.append(((x, y), [str(number)]))
    yield from ((", ".join(numbers), at) for at, numbers in labels)
