"""Define the settings that an advice compares, their cost, and which no other beats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.experiment.record_part import Amount, Part, Positive, Share
from pydantic import Field

Granularity = Literal["expert", "device"]


class AdvicePart(Part, extra="forbid"):
    """A part of an advice; further fields are refused."""


class Change(AdvicePart):
    """The accuracy under a setting minus that of the unlimited model, on the same documents."""

    effect: float  # points, tasks counting equally
    low: float  # of its 95 % interval over documents
    high: float
    documents: Positive
    tasks: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    drop_rate: Share  # of the pairs in the records, which have batches of their own

    def __str__(self) -> str:
        """Return the effect with its interval."""
        return f"{self.effect:+.2f} [{self.low:+.2f}, {self.high:+.2f}]".replace("-", "−")


class ServingSetting(AdvicePart):
    """A way to serve, with its loads on a trace."""

    # ``transfers``: weights of experts are sent in every step (LLEP), which is not charged here.
    kind: Literal["unchanged", "placement", "transfers", "capacity"]
    method: str
    gamma: Amount | None = None
    layer_gammas: Annotated[tuple[Amount, ...], Field(strict=False)] | None = None
    matched: Amount | None = None  # with layer_gammas: the γ that drops as much where it is planned
    granularity: Granularity | None = None
    placement: str | None = None  # that a capacity is on; None for the contiguous one
    straggler: Amount
    """Pairs of the fullest rank over a rank's mean before any drop, both summed over steps."""
    speedup: Amount
    """See :func:`speedup`: a bound for the expert step of a layer, never of the whole model."""
    drop_rate: Share = 0.0  # of the router's pairs
    pad_waste: Share | None = None  # of the slots of a fixed capacity
    dropped_score: Share | None = None  # share of the gate scores; None where they are not known
    active: Amount | None = None
    """Copies of experts that compute in a layer of a step, over all ranks, mean: weights that are
    read. None where it is not known who is kept."""
    extra: Amount = 0.0  # copies of experts in memory, in a layer
    moved: Amount = 0.0  # weights of experts sent in a layer of a step
    set_up: Amount = 0.0  # weights of experts sent once in a layer
    change: Change | None = None  # None where no records have it, and where nothing is dropped
    is_on_front: bool = False

    @property
    def is_lossless(self) -> bool:
        """True if every pair is computed."""
        return self.kind != "capacity"

    @property
    def by_program(self) -> bool:
        """True if a linear program splits the tokens of every step (LPLB)."""
        return self.kind == "placement" and self.method.startswith("LPLB")

    @property
    def name(self) -> str:
        """The method in words, without its capacity."""
        return "contiguous placement" if self.kind == "unchanged" else self.method

    @property
    def bound(self) -> str:
        """The capacity in words, such as ``γ=1.5 per expert``; empty without one."""
        words = (
            gamma_suffix(self.gamma, "γ="),
            gamma_suffix(self.matched, "γ by layer ≈"),
            self.granularity and f"per {self.granularity}",
            self.placement and f"on {self.placement}",
        )
        return " ".join(word for word in words if word)

    @property
    def title(self) -> str:
        """Its name in a few words, such as ``score γ=1.5 per expert``."""
        return self.name if self.is_lossless else f"{self.method} {self.bound}"


def speedup(straggler: float, unchanged: float, sent: float, link_share: float) -> float:
    """Return the bound on the speedup of a layer's expert step.

    The step's time is taken as a part that follows the fullest rank, and a part, ``link_share`` of
    the time before, that follows the pairs that are sent at all. Launches, gathering, attention and
    transfers of weights are left out, so the whole model gains less.

    Args:
        straggler: Straggler factor of the setting.
        unchanged: Straggler factor before.
        sent: Pairs that are sent over those before: 1 without drops.
        link_share: Share of the expert step's time that the link takes before, from 0 to 1.
    """
    after = (1 - link_share) * straggler / unchanged + link_share * sent
    return 1 / max(after, 1e-9)


Axis = Literal["points", "scores", "pairs"]
"""What a capacity costs, as far as it is known: points of accuracy, else the dropped share of the
gate scores, else the dropped share of the pairs."""


AXES: Final[dict[Axis, str]] = {
    "points": "points of accuracy",
    "scores": "the dropped share of the gate scores",
    "pairs": "the dropped share of the pairs",
}
"""What each is counted in."""


def comparable(settings: Sequence[ServingSetting]) -> list[ServingSetting]:
    """Return the settings whose speedups can be compared: transfers are not charged."""
    return [setting for setting in settings if setting.kind != "transfers"]


def axis_of(settings: Sequence[ServingSetting]) -> Axis:
    """Return what is known of the cost of the comparable settings."""
    lossy = [setting for setting in comparable(settings) if not setting.is_lossless]
    if any(setting.change is not None for setting in lossy):
        return "points"
    return "scores" if any(setting.dropped_score is not None for setting in lossy) else "pairs"


def cost(setting: ServingSetting, axis: Axis) -> float | None:
    """Return what a setting costs on an axis, at least 0; None where that is not known.

    An accuracy above the unlimited model's counts as no cost, not as a gain.
    """
    if setting.is_lossless:
        return 0.0
    if axis == "points":
        return None if setting.change is None else max(0.0, -setting.change.effect)
    return setting.dropped_score if axis == "scores" else setting.drop_rate


def priced(settings: Sequence[ServingSetting], axis: Axis) -> dict[ServingSetting, float]:
    """Return the comparable settings of known cost, with it."""
    costs = {setting: cost(setting, axis) for setting in comparable(settings)}
    return {setting: lost for setting, lost in costs.items() if lost is not None}


def with_front(settings: Sequence[ServingSetting], axis: Axis) -> tuple[ServingSetting, ...]:
    """Return the settings with those marked that no other beats in speedup and cost.

    Settings of unknown cost are not on the front, nor those whose speedup cannot be compared, nor
    what equals a setting without loss: a capacity that drops nothing.
    """
    places = {
        setting: (setting.speedup, -lost, setting.is_lossless)
        for setting, lost in priced(settings, axis).items()
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
