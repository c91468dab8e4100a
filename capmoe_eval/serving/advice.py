"""Recommend a setting under a budget, in a sentence, and say what is not known."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from capmoe_eval.experiment.configuration import options
from capmoe_eval.experiment.names import gamma_number
from capmoe_eval.serving.front import Axis, Part, Setting, axis_of, cost

_WORDS = {
    "points": "points of accuracy",
    "scores": "the dropped share of the gate scores",
    "pairs": "the dropped share of the pairs",
}


class Budget(Part):
    """What a setting may cost, and what it must give; at least one of them."""

    at_most_points: Annotated[float, Field(ge=0)] | None = None  # lost, of accuracy
    at_least_speedup: Annotated[float, Field(gt=0)] | None = None  # of the expert step

    @model_validator(mode="after")
    def _asks_something(self) -> Budget:
        if self.at_most_points is None and self.at_least_speedup is None:
            raise ValueError("asks nothing")
        return self

    def __str__(self) -> str:
        """Return the budget in words."""
        points, gain = self.at_most_points, self.at_least_speedup
        return " and ".join(
            [
                *([] if points is None else [f"at most {_counted(points, 'point')} lost"]),
                *([] if gain is None else [f"an expert step at least {gain:g}× as fast"]),
            ]
        )

    def holds(self, setting: Setting) -> bool:
        """Return whether a setting is known to keep the budget.

        A loss is kept to where the whole 95 % interval is; a capacity whose loss nobody measured
        keeps to none. Transfers in every step are not charged, so that their speedup is not known.
        """
        if setting.kind == "transfers":
            return False
        if self.at_least_speedup is not None and setting.speedup < self.at_least_speedup:
            return False
        if self.at_most_points is None or setting.is_lossless:
            return True
        return setting.change is not None and setting.change.low >= -self.at_most_points


class Recommendation(Part):
    """The recommended setting by its place among the settings, or that there is none."""

    kind: Literal["capacity", "lossless", "none"]
    setting: Annotated[int, Field(ge=0)] | None
    sentence: str


class Advice(Part):
    """An advice: what was asked, every setting, the recommended one, and what is not known."""

    version: Literal[1] = 1
    source: str
    model: str | None
    basis: Literal["trace", "records"]
    n_experts: Annotated[int, Field(ge=1)]
    top_k: Annotated[int, Field(ge=1)] | None
    layers: Annotated[int, Field(ge=1)]
    ranks: Annotated[int, Field(ge=2)]
    experts_per_rank: Annotated[int, Field(ge=1)]
    steps: Annotated[int, Field(ge=1)]
    decode_steps: Annotated[int, Field(ge=0)] | None = None  # None where a trace does not say
    assumed_steps: str | None = None  # how tokens were put into steps, where the trace does not say
    link_share: Annotated[float, Field(ge=0, le=1)]
    budget: Budget
    axis: Axis
    settings: Annotated[tuple[Setting, ...], Field(min_length=1, strict=False)]
    recommendation: Recommendation
    unknown: Annotated[tuple[str, ...], Field(strict=False)] = ()
    commands: Annotated[tuple[str, ...], Field(strict=False)] = ()  # that would tell
    files: dict[str, str] = Field(default={})  # for servers: how each is used

    @model_validator(mode="after")
    def _recommends_one_of_them(self) -> Advice:
        place = self.recommendation.setting
        if (place is None) != (self.recommendation.kind == "none") or (
            place is not None and place >= len(self.settings)
        ):
            raise ValueError("recommendation: names no setting of the advice")
        return self


def choose(settings: Sequence[Setting], budget: Budget) -> int | None:
    """Return the place of the recommended setting, or None if none is known to keep the budget.

    If a speedup is asked, it is the setting that loses least: one without loss before every
    capacity, of these the simplest: with the fewest copies, and EPLB before LPLB; of capacities one
    whose loss is measured.
    If only a loss is allowed, it is the fastest.
    """
    keeping = [number for number, setting in enumerate(settings) if budget.holds(setting)]
    order = _by_loss if budget.at_least_speedup is not None else _by_speed
    axis = axis_of(settings)
    return min(keeping, key=lambda number: (*order(settings[number], axis), number), default=None)


def _by_loss(setting: Setting, axis: Axis) -> tuple[float, ...]:
    lost = cost(setting, axis)
    if lost is None:  # then by what the trace says of it
        by_trace = setting.dropped_score
        return (2, setting.drop_rate if by_trace is None else by_trace, 0, -setting.speedup)
    if setting.is_lossless:  # the simplest stand first
        return (0, 0, setting.extra, 0)
    return (1, lost, 0, -setting.speedup)


def _by_speed(setting: Setting, axis: Axis) -> tuple[float, ...]:
    return (-setting.speedup, *_by_loss(setting, axis))


def recommend(settings: Sequence[Setting], budget: Budget) -> Recommendation:
    """Return the recommended setting with its reason in one sentence."""
    place = choose(settings, budget)
    lossless = [s for s in settings if s.is_lossless and s.kind != "transfers"]
    best = max(lossless, key=lambda setting: setting.speedup)
    if place is None:
        return Recommendation(kind="none", setting=None, sentence=_none(settings, budget, best))
    chosen = settings[place]
    if not chosen.is_lossless:
        sentence = (
            f"{chosen.title}: the fullest rank gets {chosen.straggler:.2f} instead of "
            f"{settings[0].straggler:.2f} times the mean load, so that the expert step is at most "
            f"{chosen.speedup:.2f}× as fast; {_price(chosen)}; without loss {best.title} reaches "
            f"{best.speedup:.2f}×."
        )
        return Recommendation(kind="capacity", setting=place, sentence=sentence)
    if chosen.kind == "unchanged":
        sentence = f"Nothing need change: as it is served, it keeps the budget ({budget})."
    else:
        reached = f"{chosen.title} makes the expert step at most {chosen.speedup:.2f}× as fast"
        copies = f"{chosen.extra:g} copies of experts in a layer" if chosen.extra else "no copies"
        sentence = (
            f"Balancing without loss reaches this, no capacity is needed: {reached}, with {copies}."
        )
    return Recommendation(kind="lossless", setting=place, sentence=sentence)


def _price(setting: Setting) -> str:
    drops = f"it drops {setting.drop_rate:.1%} of the pairs"
    if setting.dropped_score is not None:
        drops += f" with {setting.dropped_score:.1%} of the gate scores"
    if setting.change is None:
        return f"{drops}, and what the answers lose is not known"
    change = setting.change
    return (
        f"{drops} and changes accuracy by {change.effect:+.2f} [{change.low:+.2f}, "
        f"{change.high:+.2f}] points on {_counted(len(change.tasks), 'task')}"
    ).replace("-", "−")


def _none(settings: Sequence[Setting], budget: Budget, best: Setting) -> str:
    capacities = [setting for setting in settings if setting.kind == "capacity"]
    fast = [s for s in capacities if s.speedup >= (budget.at_least_speedup or 0)]
    unmeasured = sum(setting.change is None for setting in fast)
    told = f"None: no setting is known to keep the budget ({budget})"
    reach = f"; without loss {best.title} reaches {best.speedup:.2f}×"
    if not fast:
        fastest = max(capacities, key=lambda setting: setting.speedup, default=best)
        return f"{told}: the fastest, {fastest.title}, reaches {fastest.speedup:.2f}×{reach}."
    lost = f", and of {unmeasured} of them the loss is not measured" if unmeasured else ""
    return f"{told}: {len(fast)} capacities are fast enough{lost}{reach}."


def unknown(
    settings: Sequence[Setting],
    *,
    basis: str,
    has_scores: bool,
    steps: int,
    knows_kinds: bool = False,
) -> tuple[str, ...]:
    """Return, in sentences, what cannot be known from what was given."""
    capacities = [setting for setting in settings if setting.kind == "capacity"]
    without = sum(setting.change is None for setting in capacities)
    lines = []
    if basis == "trace" and not has_scores:
        lines.append(
            "Which pairs score would drop, and with how much of the gate scores: the trace has no "
            "gate scores. The drop rate is exact all the same, whoever is kept."
        )
    if basis == "trace" and not knows_kinds:
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
    if basis == "records":
        lines.append(
            "What balancing without loss gives: records hold loads that are summed over forwards; "
            "a trace (save_trace=DIR) has them step by step."
        )
    elif steps < 2:
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
    settings: Sequence[Setting], budget: Budget, *, model: str | None, ranks: int, results: str
) -> tuple[str, ...]:
    """Return the commands that would measure what the answers lose, where nobody has."""
    wanted = budget.at_least_speedup or 1.0
    open_ = [s for s in settings if s.kind == "capacity" and s.change is None]
    fast = {s.gamma for s in open_ if s.speedup >= wanted and s.granularity == "expert"}
    gammas = sorted(gamma for gamma in fast if gamma is not None)[-3:]
    if not gammas or any(setting.change is not None for setting in settings):
        return ()
    if model in options("model"):
        words = [f"model={model}"]
    else:
        words = ["model=custom", f"model.name={model or 'NAME'}", "model.pretrained=PATH"]
    last = f"results_dir={results}"
    swept = [f"gamma={','.join(map(gamma_number, gammas))}", "granularity=expert,device"]
    return (
        shlex.join(["python", "-m", "capmoe_eval", *words, "method=baseline", last]),
        shlex.join(
            [
                *("python", "-m", "capmoe_eval", "-m", *words, "method=score"),
                *(*swept, f"ep_size={ranks}", last),
            ]
        ),
    )


def _counted(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"


def axis_words(axis: Axis) -> str:
    """Return what the cost of a capacity is counted in."""
    return _WORDS[axis]
