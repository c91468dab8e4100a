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


def comparable(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings whose speedups can be compared.

    They are of the same loads as the first, the unchanged one; transfers are not charged, so that
    their speedup is not known.
    """
    return [
        one
        for one in settings
        if one.speedup is not None and one.kind != "transfers" and one.loads == settings[0].loads
    ]


def axis_of(settings: Sequence[Setting]) -> Axis:
    """Return what is known of the cost of the comparable settings."""
    lossy = [setting for setting in comparable(settings) if not setting.is_lossless]
    if any(setting.change is not None for setting in lossy):
        return "points"
    return "scores" if any(one.dropped_score is not None for one in lossy) else "pairs"


def cost(setting: Setting, axis: Axis) -> float | None:
    """Return what a setting costs on an axis, at least 0; None where that is not known.

    An accuracy above the unlimited model's counts as no cost, not as a gain.
    """
    if setting.is_lossless:
        return 0.0
    if axis == "points":
        return None if setting.change is None else max(0.0, -setting.change.effect)
    return setting.dropped_score if axis == "scores" else setting.drop_rate


def priced(settings: Sequence[Setting], axis: Axis) -> dict[Setting, float]:
    """Return the comparable settings of known cost, with it."""
    costs = {setting: cost(setting, axis) for setting in comparable(settings)}
    return {setting: found for setting, found in costs.items() if found is not None}


def with_front(settings: Sequence[Setting], axis: Axis) -> tuple[Setting, ...]:
    """Return the settings with those marked that no other beats in speedup and cost.

    Settings of unknown cost are not on the front, nor those whose speedup cannot be compared, nor
    what equals a setting without loss: a capacity that drops nothing.
    """
    places = {
        setting: (setting.reached, -found, setting.is_lossless)
        for setting, found in priced(settings, axis).items()
    }
    front = {
        setting
        for setting, place in places.items()
        if not any(
            other[0] >= place[0] and other[1] >= place[1] and other > place
            for other in places.values()
        )
    }
    return tuple(
        setting.model_copy(update={"is_on_front": setting in front}) for setting in settings
    )
