"""Find the front of speedup and cost: the settings that no other beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from capmoe_eval.serving.settings import Setting

Axis = Literal["points", "scores", "pairs"]
"""What a capacity costs, as far as it is known: points of accuracy, else the dropped share of the
gate scores, else the dropped share of the pairs."""


AXES: Final[dict[Axis, str]] = {
    "points": "points of accuracy",
    "scores": "the dropped share of the gate scores",
    "pairs": "the dropped share of the pairs",
}
"""What each is counted in."""


def comparable(settings: Sequence[Setting]) -> list[int]:
    """Return the places of the settings whose speedups can be compared.

    They are of the same loads as the first, the unchanged one; transfers are not charged, so that
    their speedup is not known.
    """
    return [
        place
        for place, one in enumerate(settings)
        if one.speedup is not None and one.kind != "transfers" and one.loads == settings[0].loads
    ]


def axis_of(settings: Sequence[Setting]) -> Axis:
    """Return what is known of the cost of the comparable settings."""
    lossy = [settings[n] for n in comparable(settings) if not settings[n].is_lossless]
    if any(setting.change is not None for setting in lossy):
        return "points"
    return "scores" if any(s.dropped_score is not None for s in lossy) else "pairs"


def cost(setting: Setting, axis: Axis) -> float | None:
    """Return what a setting costs on an axis, at least 0; None where that is not known.

    An accuracy above the unlimited model's counts as no cost, not as a gain.
    """
    if setting.is_lossless:
        return 0.0
    if axis == "points":
        return None if setting.change is None else max(0.0, -setting.change.effect)
    return setting.dropped_score if axis == "scores" else setting.drop_rate


def with_front(settings: Sequence[Setting], axis: Axis) -> tuple[Setting, ...]:
    """Return the settings with those marked that no other beats in speedup and cost.

    Settings of unknown cost are not on the front, nor those whose speedup cannot be compared, nor
    what equals a setting without loss: a capacity that drops nothing.
    """
    known = [
        (settings[number].reached, found, number)
        for number in comparable(settings)
        if (found := cost(settings[number], axis)) is not None
    ]
    front: set[int] = set()
    cheapest = float("inf")  # cost of those that are faster
    fastest_first = sorted({speed for speed, _, _ in known}, reverse=True)
    for speed in fastest_first:
        equal = [(found, number) for other, found, number in known if other == speed]
        least = min(found for found, _ in equal)
        if least < cheapest:
            best = {number for found, number in equal if found == least}
            front |= {number for number in best if settings[number].is_lossless} or best
            cheapest = least
    return tuple(
        setting.model_copy(update={"is_on_front": number in front})
        for number, setting in enumerate(settings)
    )
