"""Recommend a way to serve by a budget, and say why."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Final, Literal

from capmoe_eval.experiment.composition import options
from capmoe_eval.experiment.names import gamma_suffix, gamma_text
from capmoe_eval.experiment.record_part import Amount, Count, Part, Positive, Share
from pydantic import Field, model_validator

from capmoe_serve.capacities import Granularity
from capmoe_serve.trace import Trace


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

    kind: Literal["unchanged", "placement", "capacity"]
    method: str
    gamma: Amount | None = None
    granularity: Granularity | None = None
    placement: str | None = None  # that a capacity is on; None for the contiguous one
    straggler: Amount
    """Pairs of the fullest rank over a rank's mean before any drop, both summed over steps."""
    speedup: Amount
    """A bound for the expert step of a layer, never of the whole model."""
    drop_rate: Share = 0.0  # of the router's pairs
    pad_waste: Share | None = None  # of the slots of a fixed capacity
    dropped_score: Share | None = None  # share of the gate scores; None where they are not known
    extra: Amount = 0.0  # copies of experts in memory, in a layer
    set_up: Amount = 0.0  # weights of experts sent once in a layer
    change: Change | None = None  # None where no records have it, and where nothing is dropped
    is_on_front: bool = False

    @property
    def is_lossless(self) -> bool:
        """True if every pair is computed."""
        return self.kind != "capacity"

    @property
    def bound(self) -> str:
        """The capacity in words, such as ``γ=1.5 per expert``; empty without one."""
        words = (
            gamma_suffix(self.gamma, "γ="),
            self.granularity and f"per {self.granularity}",
            self.placement and f"on {self.placement}",
        )
        return " ".join(word for word in words if word)

    @property
    def title(self) -> str:
        """Its name in a few words, such as ``score γ=1.5 per expert``."""
        name = "contiguous placement" if self.kind == "unchanged" else self.method
        return name if self.is_lossless else f"{name} {self.bound}"


Axis = Literal["points", "scores", "pairs"]
"""What a capacity costs, as far as it is known: points of accuracy, else the dropped share of the
gate scores, else the dropped share of the pairs."""


AXES: Final[dict[Axis, str]] = {
    "points": "points of accuracy",
    "scores": "the dropped share of the gate scores",
    "pairs": "the dropped share of the pairs",
}
"""What each is counted in."""


def axis_of(settings: Sequence[ServingSetting]) -> Axis:
    """Return what is known of the cost of the settings."""
    lossy = [setting for setting in settings if not setting.is_lossless]
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


def with_front(settings: Sequence[ServingSetting], axis: Axis) -> tuple[ServingSetting, ...]:
    """Return the settings with those marked that no other beats in speedup and cost.

    Settings of unknown cost are not on the front, nor what equals a setting without loss: a
    capacity that drops nothing.
    """
    places = {
        setting: (setting.speedup, -lost, setting.is_lossless)
        for setting in settings
        if (lost := cost(setting, axis)) is not None
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


class Budget(AdvicePart):
    """The cost that a setting may have, and the speedup that it must give; at least one of them."""

    at_most_points: Amount | None = None  # lost, of accuracy
    at_least_speedup: Annotated[float, Field(gt=0)] | None = None  # of the expert step

    @model_validator(mode="after")
    def _asks_something(self) -> Budget:
        if self.at_most_points is None and self.at_least_speedup is None:
            raise ValueError("asks nothing")
        return self

    def __str__(self) -> str:
        """Return the budget in words."""
        asked = []
        if self.at_most_points is not None:
            asked.append(f"at most {_counted(self.at_most_points, 'point')} lost")
        if self.at_least_speedup is not None:
            asked.append(f"an expert step at least {self.at_least_speedup:g}× as fast")
        return " and ".join(asked)

    def holds(self, setting: ServingSetting) -> bool:
        """Return whether a setting is known to keep the budget.

        A loss is kept to where the whole 95 % interval is; a capacity whose loss nobody measured
        keeps to none.
        """
        if self.at_least_speedup is not None and setting.speedup < self.at_least_speedup:
            return False
        if self.at_most_points is None or setting.is_lossless:
            return True
        return setting.change is not None and setting.change.low >= -self.at_most_points


class ServingDeployment(AdvicePart):
    """The way in which a model is served."""

    ranks: Positive
    experts_per_rank: Positive | None = None  # with copies; None for the fewest with a copy
    link_share: Share = 0.0  # of the expert step's time
    groups: Positive = 1  # of neighbouring experts, each of which EPLB keeps on one node
    nodes: Positive = 1


class Advice(ServingDeployment):
    """An advice: what was asked, every setting, the recommended one, and what is not known."""

    version: Literal[4] = 4
    source: str
    model: str | None
    n_experts: Positive
    top_k: Positive | None
    layers: Positive
    steps: Positive
    decode_steps: Count | None = None  # None where a trace does not say
    assumed_steps: str | None = None  # how tokens were put into steps, where the trace does not say
    budget: Budget
    axis: Axis
    settings: Annotated[tuple[ServingSetting, ...], Field(min_length=1, strict=False)]
    recommended: Count | None  # the place of the recommended setting among them
    sentence: str  # what is recommended and why, or why nothing is
    unknown: Annotated[tuple[str, ...], Field(strict=False)] = ()
    commands: Annotated[tuple[str, ...], Field(strict=False)] = ()  # that would tell
    files: dict[str, str] = Field(default={})  # for servers: how each is used

    @model_validator(mode="after")
    def _recommends_one_of_them(self) -> Advice:
        if self.recommended is not None and self.recommended >= len(self.settings):
            raise ValueError("recommended: names no setting of the advice")
        return self

    @property
    def chosen(self) -> ServingSetting | None:
        """The recommended setting, or None."""
        return None if self.recommended is None else self.settings[self.recommended]


def choose(settings: Sequence[ServingSetting], budget: Budget) -> ServingSetting | None:
    """Return the recommended setting, or None if none is known to keep the budget.

    If a speedup is asked, it is the setting that loses least, and of equals the first. A setting
    without loss comes before every capacity; of several the one with the fewest copies does, and
    before all that as it is served. Of capacities, those with a measured loss come first. Among
    those whose interval reaches the smallest loss, it is the one that drops least. If only a loss
    is allowed, it is the fastest.
    """
    keeping = [setting for setting in settings if budget.holds(setting)]
    axis = axis_of(settings)
    if budget.at_least_speedup is None:
        return min(keeping, key=lambda s: (-s.speedup, *_by_loss(s, axis)), default=None)
    best = min(keeping, key=lambda setting: _by_loss(setting, axis), default=None)
    if best is None or best.change is None:
        return best
    smallest = cost(best, axis) or 0.0
    alike = [s for s in keeping if s.change is not None and -s.change.high <= smallest]
    return min(alike, key=lambda setting: (setting.drop_rate, -setting.speedup))


def _by_loss(setting: ServingSetting, axis: Axis) -> tuple[float, ...]:
    """Return the key by which settings are ordered: the least is the one that loses least."""
    if setting.is_lossless:
        return (0, setting.extra, setting.kind != "unchanged")
    lost = cost(setting, axis)
    if lost is not None:
        return (1, lost, -setting.speedup)
    by_trace = setting.drop_rate if setting.dropped_score is None else setting.dropped_score
    return (2, by_trace, -setting.speedup)


def reason(settings: Sequence[ServingSetting], budget: Budget) -> str:
    """Return in one sentence why :func:`choose` recommends its setting, or none."""
    chosen = choose(settings, budget)
    lossless = (setting for setting in settings if setting.is_lossless)
    best = max(lossless, key=lambda setting: setting.speedup)
    if chosen is None:
        return _none(settings, budget, best)
    if not chosen.is_lossless:
        return (
            f"{chosen.title}: the fullest rank gets {chosen.straggler:.2f} instead of "
            f"{settings[0].straggler:.2f} times the mean load, so that the expert step is at most "
            f"{chosen.speedup:.2f}× as fast; {_price(chosen)}; without loss {best.title} reaches "
            f"{best.speedup:.2f}×."
        )
    if chosen.kind == "unchanged":
        return f"Nothing need change: as it is served, it keeps the budget ({budget})."
    copies = f"{chosen.extra:g} copies of experts in a layer" if chosen.extra else "no copies"
    fast = f"{chosen.title} makes the expert step at most {chosen.speedup:.2f}× as fast"
    return f"Lossless load balancing reaches this, no capacity is needed: {fast}, with {copies}."


def _price(setting: ServingSetting) -> str:
    drops = f"it drops {setting.drop_rate:.1%} of the pairs"
    if setting.dropped_score is not None:
        drops += f" with {setting.dropped_score:.1%} of the gate scores"
    if setting.change is None:
        return f"{drops}, and what the answers lose is not known"
    tasks = _counted(len(setting.change.tasks), "task")
    return f"{drops} and changes accuracy by {setting.change} points on {tasks}"


def _none(settings: Sequence[ServingSetting], budget: Budget, best: ServingSetting) -> str:
    capacities = [setting for setting in settings if not setting.is_lossless]
    fast = [s for s in capacities if s.speedup >= (budget.at_least_speedup or 0)]
    unmeasured = sum(setting.change is None for setting in fast)
    sentence = f"None: no setting is known to keep the budget ({budget})"
    reach = f"; without loss {best.title} reaches {best.speedup:.2f}×"
    if not fast:
        fastest = max(capacities, key=lambda setting: setting.speedup, default=best)
        return f"{sentence}: the fastest, {fastest.title}, reaches {fastest.speedup:.2f}×{reach}."
    lost = f", and of {unmeasured} of them the loss is not measured" if unmeasured else ""
    return f"{sentence}: {len(fast)} capacities are fast enough{lost}{reach}."


def unknown(settings: Sequence[ServingSetting], trace: Trace) -> tuple[str, ...]:
    """Return, in sentences, what settings on a trace do not tell."""
    capacities = [setting for setting in settings if not setting.is_lossless]
    without = sum(setting.change is None for setting in capacities)
    lines = []
    if trace.score_TLK is None:
        lines.append(
            "Which pairs score would drop, and with how much of the gate scores: the trace has no "
            "gate scores. The drop rate is exact all the same, whoever is kept."
        )
    if trace.decode_S is None:
        lines.append(
            "Which steps are of prompts and which of decoding: the trace does not say, and all are "
            "judged together."
        )
    if without == len(capacities):
        lines.append(
            "What the answers lose under a capacity, for score as for every method: no trace says "
            "it, and no records of the model over so many ranks were given."
        )
    elif without:
        lines.append(
            f"What the answers lose under {without} of the {len(capacities)} capacities, of which "
            "no records were given."
        )
    if trace.n_steps < 2:
        lines.append(
            "What a placement gives: the trace has one step, and a plan is judged on other steps "
            "than it is made on."
        )
    lines.append(
        "Times: a speedup here is a bound for the expert step of a layer, by the stated share of "
        "the link; attention, launches and transfers of weights are not in it."
    )
    return tuple(lines)


def telling(
    settings: Sequence[ServingSetting],
    budget: Budget,
    *,
    model: str | None,
    ranks: int,
    results: str,
) -> tuple[str, ...]:
    """Return the commands that would measure what the answers lose, where nobody has."""
    speedup = budget.at_least_speedup or 1.0
    open_ = [
        s for s in settings if s.kind == "capacity" and s.placement is None and s.change is None
    ]
    fast = {s.gamma for s in open_ if s.speedup >= speedup and s.granularity == "expert"}
    gammas = sorted(gamma for gamma in fast if gamma is not None)[-3:]
    if not gammas or any(setting.change is not None for setting in settings):
        return ()
    if model in options("model"):
        words = [f"model={model}"]
    else:
        words = ["model=custom", f"model.name={model or 'NAME'}", "model.pretrained=PATH"]
    swept = [f"gamma={','.join(map(gamma_text, gammas))}", "granularity=expert,device"]
    if any(setting.placement == "EPLB" for setting in settings):
        swept.append("placement=contiguous,eplb")
    swept = ["sweep", *words, "method=score", *swept, f"ep_size={ranks}"]
    return tuple(
        shlex.join(["capmoe-eval", *command, f"results_dir={results}"])
        for command in (["run", *words, "method=baseline"], swept)
    )


def _counted(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"
