"""The picture of an advice: settings by speedup and cost, the front by name, the recommendation."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill
from typing import Final, NamedTuple

from capmoe_eval.report.figures import panels as p
from capmoe_eval.report.figures.write import images_of

from capmoe_serve.advice import Advice
from capmoe_serve.settings import AXES, ServingSetting, priced

_BEYOND: Final = 1.6
"""The axis of costs reaches so many times as far as the front and the recommended setting."""
_NEAR: Final = 0.06
"""Points that are nearer, as a share of both axes, have one label for their numbers."""
_LETTERS: Final = 50
"""In a line of the legend."""
_LINE: Final = 0.14
"""Height of a line of the legend, inches."""
_RING: Final[p.Look] = {"color": p.GREY, "linestyle": "", "marker": "o", "fillstyle": "none"}
_DOT: Final[p.Look] = {"color": p.GREY, "linestyle": "", "marker": "o"}
_FRONT: Final[p.Look] = {"color": p.BLUE, "linestyle": "--", "linewidth": 0.8, "marker": "o"}
_NUMBER: Final[p.Look] = {
    **{"color": p.BLUE, "linestyle": "", "markersize": 5, "markeredgewidth": 0}
}
_STAR: Final[p.Look] = {
    "color": p.VERMILLION,
    "linestyle": "",
    "marker": "*",
    "markersize": 9,
    "zorder": 4,
}
_UPRIGHT: Final[p.Look] = {"color": p.VERMILLION, "linestyle": ":"}


class FrontPicture(NamedTuple):
    """The picture of an advice on a page: an address that holds it, and what it shows in words."""

    source: str
    words: str


def front_picture(advice: Advice, front: Mapping[str, ServingSetting]) -> FrontPicture:
    """Return the picture of an advice, whose front has these names, for a page."""
    picture = front_panel(advice, front)
    svg = b64encode(images_of(picture, ["svg"])["svg"]).decode()
    return FrontPicture(f"data:image/svg+xml;base64,{svg}", " ".join(picture.notes))


def front_panel(advice: Advice, front: Mapping[str, ServingSetting]) -> p.Picture:
    """Return the settings of known cost by speedup; the legend has the names of the front."""
    scale, unit = (1, " points") if advice.axis == "points" else (100, " %")
    costs = {s: scale * lost for s, lost in priced(advice.settings, advice.axis).items()}
    place = advice.recommendation.setting
    chosen = None if place is None else advice.settings[place]
    far = max((costs[s] for s in (*front.values(), chosen) if s in costs), default=0.0)
    top = _BEYOND * far or max(costs.values(), default=0.0) or 1.0
    beyond = sum(lost > top for lost in costs.values())
    more = f"; above the picture: {beyond}" if beyond else ""
    others = {s: lost for s, lost in costs.items() if not s.is_on_front and lost <= top}
    points = [(setting.reached, costs[setting]) for setting in front.values()]
    words = [f"Settings by the bound on the speedup of the expert step and {AXES[advice.axis]}."]
    marks: list[p.Mark] = []
    if chosen is not None:
        name = fill(f"recommended: {chosen.title}", _LETTERS)
        if chosen in costs:
            marks.append(p.Curve(name, [chosen.reached], [costs[chosen]], look=_STAR))
        else:  # its cost is not known
            marks.append(p.Level(name, chosen.reached, True, _UPRIGHT))
        words.append(f"Recommended: {chosen.title}, {chosen.reached:.2f}×.")
    marks += [
        _dots("nothing is dropped", {s: y for s, y in others.items() if s.is_lossless}, _DOT),
        _dots(f"a capacity{more}", {s: y for s, y in others.items() if not s.is_lossless}, _RING),
        p.Curve("the front:", [x for x, _ in points], [y for _, y in points], look=_FRONT),
        *_numbers(points, top),
    ]
    for number, (name, (speedup, lost)) in enumerate(zip(front, points, strict=True), start=1):
        look = _NUMBER | {"marker": f"${number}$"}
        marks.append(p.Curve(fill(name, _LETTERS), (), (), look=look))
        words.append(f"{number}: {name}, {speedup:.2f}×, {lost:.3g}{unit}.")
    cost = f"{AXES[advice.axis]}{' lost' if advice.axis == 'points' else ', %'}"
    panel = p.Panel(
        "",
        marks,
        p.Axis("speedup of the expert step, at most (×)", margin=0.08),
        p.Axis(cost, limits=(-0.08 * top, 1.03 * top)),
    )
    names = (mark.name for mark in marks if isinstance(mark, (p.Curve, p.Level)))
    lines = sum(name.count("\n") + 1 for name in names)
    return p.Picture([[panel]], words, "", p.COLUMN, 2.5 + _LINE * lines, {"legend": 1})


def _dots(name: str, costs: Mapping[ServingSetting, float], look: p.Look) -> p.Curve:
    return p.Curve(name, [setting.reached for setting in costs], [*costs.values()], look=look)


def _numbers(points: Sequence[tuple[float, float]], top: float) -> Iterable[p.Words]:
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
    beside = {"xytext": (4, -3), "textcoords": "offset points", "va": "top", "color": p.BLUE}
    for at, numbers in labels:
        yield p.Words(", ".join(numbers), at, look=beside)
