"""Recommend a setting under a budget, in a sentence, and say what is not known."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Literal

from capmoe_eval.experiment.composition import options
from capmoe_eval.experiment.names import gamma_text
from capmoe_eval.experiment.record_part import Amount, Count, Positive, Share
from pydantic import Field, model_validator

from capmoe_serve.settings import (
    AdvicePart,
    Axis,
    Change,
    ServingSetting,
    axis_of,
    comparable,
    cost,
)
from capmoe_serve.trace import Trace

_EQUAL = 1e-9  # speedups that are no different


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
        keeps to none. Of settings that cannot be compared no speedup is known here.
        """
        if self.at_least_speedup is not None and setting.reached < self.at_least_speedup:
            return False
        return self.allows(setting)

    def allows(self, setting: ServingSetting) -> bool:
        """Return whether a setting is known to lose no more than may be lost."""
        if self.at_most_points is None or setting.is_lossless:
            return True
        return setting.change is not None and setting.change.low >= -self.at_most_points


Kind = Literal["capacity", "lossless", "none"]


class Recommendation(AdvicePart):
    """The recommended setting by its place among the settings, or that there is none."""

    kind: Kind
    setting: Count | None
    sentence: str


class Advice(AdvicePart):
    """An advice: what was asked, every setting, the recommended one, and what is not known."""

    version: Literal[2] = 2
    source: str
    model: str | None
    basis: Literal["trace", "records"]
    n_experts: Positive
    top_k: Positive | None
    layers: Positive
    ranks: Annotated[int, Field(ge=2)]
    experts_per_rank: Positive
    steps: Positive
    decode_steps: Count | None = None  # None where a trace does not say
    assumed_steps: str | None = None  # how tokens were put into steps, where the trace does not say
    link_share: Share
    expert_bytes: Positive | None = None  # of the weights of one expert
    budget: Budget
    axis: Axis
    settings: Annotated[tuple[ServingSetting, ...], Field(min_length=1, strict=False)]
    recommendation: Recommendation
    activation: str = ""  # of the experts whose weights a step reads, in a sentence or two
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


def choose(settings: Sequence[ServingSetting], budget: Budget) -> ServingSetting | None:
    """Return the recommended setting, or None if none is known to keep the budget.

    It is one of those that can be compared. Of equals it is the first.

    If a speedup is asked, it is the setting that loses least. A setting without loss comes before
    every capacity; of several the simplest does (:func:`_complexity`). Of capacities, those with a
    measured loss come first. Among those whose interval reaches the smallest loss, it is the one
    that drops least. If only a loss is allowed, it is the fastest.
    """
    keeping = [setting for setting in comparable(settings) if budget.holds(setting)]
    axis = axis_of(settings)
    if budget.at_least_speedup is None:
        return min(keeping, key=lambda s: (-s.reached, *_by_loss(s, axis)), default=None)
    best = min(keeping, key=lambda setting: _by_loss(setting, axis), default=None)
    if best is None or best.change is None:
        return best
    smallest = cost(best, axis) or 0.0
    alike = [s for s in keeping if s.change is not None and -s.change.high <= smallest]
    return min(alike, key=lambda setting: (setting.drop_rate, -setting.reached))


def _by_loss(setting: ServingSetting, axis: Axis) -> tuple[float, ...]:
    """Return the key by which settings are ordered: the least is the one that loses least."""
    if setting.is_lossless:
        return (0, *_complexity(setting))
    lost = cost(setting, axis)
    if lost is not None:
        return (1, lost, -setting.reached)
    by_trace = setting.drop_rate if setting.dropped_score is None else setting.dropped_score
    return (2, by_trace, -setting.reached)


def _complexity(setting: ServingSetting) -> tuple[float, bool, bool]:
    """Return what a server needs: memory for copies, a plan (EPLB), a program per step (LPLB)."""
    return setting.extra, setting.kind != "unchanged", setting.by_program


def recommend(settings: Sequence[ServingSetting], budget: Budget) -> Recommendation:
    """Return the recommended setting with its reason in one sentence."""
    chosen, compared = choose(settings, budget), comparable(settings)
    lossless = (setting for setting in compared if setting.is_lossless)
    best = max(lossless, key=lambda setting: setting.reached)
    if chosen is None:
        return Recommendation(kind="none", setting=None, sentence=_none(compared, budget, best))
    if not chosen.is_lossless:
        sentence = (
            f"{chosen.title}: the fullest rank gets {chosen.straggler:.2f} instead of "
            f"{settings[0].straggler:.2f} times the mean load, so that the expert step is at most "
            f"{chosen.reached:.2f}× as fast; {_price(chosen)}; without loss {best.title} reaches "
            f"{best.reached:.2f}×.{_by_layer(chosen)}{_gentler(compared, chosen)}"
        )
    elif chosen.kind == "unchanged":
        sentence = f"Nothing need change: as it is served, it keeps the budget ({budget})."
    else:
        reached = f"{chosen.title} makes the expert step at most {chosen.reached:.2f}× as fast"
        copies = f"{chosen.extra:g} copies of experts in a layer" if chosen.extra else "no copies"
        sentence = (
            "Lossless load balancing reaches this, no capacity is needed: "
            f"{reached}, with {copies}."
        )
    kind: Kind = "lossless" if chosen.is_lossless else "capacity"
    return Recommendation(kind=kind, setting=settings.index(chosen), sentence=sentence)


def _price(setting: ServingSetting) -> str:
    drops = f"it drops {setting.drop_rate:.1%} of the pairs"
    if setting.dropped_score is not None:
        drops += f" with {setting.dropped_score:.1%} of the gate scores"
    if setting.change is None:
        return f"{drops}, and what the answers lose is not known"
    return f"{drops} and changes accuracy by {_changed(setting.change)}"


def _changed(change: Change) -> str:
    return f"{change} points on {_counted(len(change.tasks), 'task')}"


def _by_layer(setting: ServingSetting) -> str:
    if setting.layer_gammas is None:
        return ""
    return f" The γ of its layers: {', '.join(map(gamma_text, setting.layer_gammas))}."


def _gentler(compared: Sequence[ServingSetting], chosen: ServingSetting) -> str:
    """Return in a sentence what drops least of as fast settings whose loss is not measured."""
    if chosen.change is None:
        return ""
    unmeasured = [s for s in compared if s.kind == "capacity" and s.change is None]
    as_fast = [s for s in unmeasured if s.reached >= chosen.reached - _EQUAL]
    least = min(as_fast, key=lambda setting: (setting.drop_rate, setting.extra), default=chosen)
    if least.drop_rate >= chosen.drop_rate:
        return ""
    return (
        f" As fast, {least.title} drops {least.drop_rate:.1%}; what the answers lose under it is "
        "not measured."
    )


def _none(compared: Sequence[ServingSetting], budget: Budget, best: ServingSetting) -> str:
    capacities = [setting for setting in compared if not setting.is_lossless]
    fast = [s for s in capacities if s.reached >= (budget.at_least_speedup or 0)]
    unmeasured = sum(setting.change is None for setting in fast)
    sentence = f"None: no setting is known to keep the budget ({budget})"
    reach = f"; without loss {best.title} reaches {best.reached:.2f}×"
    if not fast:
        fastest = max(capacities, key=lambda setting: setting.reached, default=best)
        return f"{sentence}: the fastest, {fastest.title}, reaches {fastest.reached:.2f}×{reach}."
    lost = f", and of {unmeasured} of them the loss is not measured" if unmeasured else ""
    return f"{sentence}: {len(fast)} capacities are fast enough{lost}{reach}."


def activation(settings: Sequence[ServingSetting], budget: Budget) -> str:
    """Return how many experts a step activates, and what activates fewest within the budget.

    Of settings by records, the share of the experts that the same batches activate without them is
    compared; it counts if their loss is known to keep the budget of points.
    """
    lines = []
    home = settings[0]
    if home.active is not None:
        numbers = [
            f"{setting.active:.1f} with {setting.knobs.split()[0]}"
            for setting in settings
            if setting.kind == "activation" and setting.loads == "trace"
        ]
        by_oea = f"; by OEA {', '.join(numbers)}" if numbers else ""
        lines.append(
            f"Activated experts in a layer of a step: {home.active:.1f} as served{by_oea}."
        )
    if budget.at_most_points is None:
        return " ".join(lines)
    within = f"within at most {_counted(budget.at_most_points, 'point')} lost"
    shares = [(setting.active_share, setting) for setting in settings if budget.allows(setting)]
    fewer = [(share, setting) for share, setting in shares if share is not None and share < 1]
    if fewer:
        share, least = min(fewer, key=lambda pair: pair[0])
        whose = "" if least.loads == "trace" else " in the records’ batches"
        changed = "" if least.change is None else f", changing accuracy by {_changed(least.change)}"
        lines.append(
            f"Fewest {within}: {least.title}, {share:.0%} of those before{whose}{changed}."
        )
    elif any(setting.active is not None for setting in settings):
        lines.append(f"No setting is known to activate fewer {within}.")
    return " ".join(lines)


def unknown(settings: Sequence[ServingSetting], trace: Trace | None) -> tuple[str, ...]:
    """Return, in sentences, what settings on a trace, or of records alone, do not tell."""
    capacities = [setting for setting in comparable(settings) if not setting.is_lossless]
    without = sum(setting.change is None for setting in capacities)
    lines = []
    if trace is not None and trace.score_TLK is None:
        lines.append(
            "Which pairs score would drop, and with how much of the gate scores: the trace has no "
            "gate scores. The drop rate is exact all the same, whoever is kept."
        )
    if trace is not None and trace.decode_S is None:
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
    if trace is None:
        lines.append(
            "What lossless load balancing gives, or a capacity on another placement: records hold "
            "loads that are summed over forwards; a trace (save_trace=DIR) has them step by step."
        )
    elif trace.n_steps < 2:
        lines.append(
            "What a placement gives: the trace has one step, and a plan is judged on other steps "
            "than it is made on."
        )
    if trace is not None and any(setting.kind == "activation" for setting in settings):
        lines.append(
            "Loads after OEA: where a token goes instead depends on scores that no trace has. Its "
            "activated experts are exact where the trace has a token’s experts best first."
        )
    by_records = sum(setting.loads == "records" for setting in settings)
    if trace is not None and by_records:
        lines.append(
            f"Loads of {by_records} settings of records alone on this traffic: the page has those "
            "of the records’ own batches, and they are not on the front."
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
    fast = {s.gamma for s in open_ if s.reached >= speedup and s.granularity == "expert"}
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
