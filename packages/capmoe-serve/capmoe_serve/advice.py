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
        keeps to none.
        """
        if self.at_least_speedup is not None and setting.speedup < self.at_least_speedup:
            return False
        if self.at_most_points is None or setting.is_lossless:
            return True
        return setting.change is not None and setting.change.low >= -self.at_most_points


class Advice(AdvicePart):
    """An advice: what was asked, every setting, the recommended one, and what is not known."""

    version: Literal[3] = 3
    source: str
    model: str | None
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
    groups: Positive = 1  # of neighbouring experts, each of which EPLB keeps on one node
    nodes: Positive = 1
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

    It is one of those that can be compared. Of equals it is the first.

    If a speedup is asked, it is the setting that loses least. A setting without loss comes before
    every capacity; of several the simplest does (:func:`_complexity`). Of capacities, those with a
    measured loss come first. Among those whose interval reaches the smallest loss, it is the one
    that drops least. If only a loss is allowed, it is the fastest.
    """
    keeping = [setting for setting in comparable(settings) if budget.holds(setting)]
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
        return (0, *_complexity(setting))
    lost = cost(setting, axis)
    if lost is not None:
        return (1, lost, -setting.speedup)
    by_trace = setting.drop_rate if setting.dropped_score is None else setting.dropped_score
    return (2, by_trace, -setting.speedup)


def _complexity(setting: ServingSetting) -> tuple[float, bool, bool]:
    """Return what a server needs: memory for copies, a plan (EPLB), a program per step (LPLB)."""
    return setting.extra, setting.kind != "unchanged", setting.by_program


def reason(settings: Sequence[ServingSetting], budget: Budget) -> str:
    """Return in one sentence why :func:`choose` recommends its setting, or none."""
    chosen, compared = choose(settings, budget), comparable(settings)
    lossless = (setting for setting in compared if setting.is_lossless)
    best = max(lossless, key=lambda setting: setting.speedup)
    if chosen is None:
        return _none(compared, budget, best)
    if not chosen.is_lossless:
        return (
            f"{chosen.title}: the fullest rank gets {chosen.straggler:.2f} instead of "
            f"{settings[0].straggler:.2f} times the mean load, so that the expert step is at most "
            f"{chosen.speedup:.2f}× as fast; {_price(chosen)}; without loss {best.title} reaches "
            f"{best.speedup:.2f}×.{_by_layer(chosen)}{_gentler(compared, chosen)}"
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


def _by_layer(setting: ServingSetting) -> str:
    if setting.layer_gammas is None:
        return ""
    return f" The γ of its layers: {', '.join(map(gamma_text, setting.layer_gammas))}."


def _gentler(compared: Sequence[ServingSetting], chosen: ServingSetting) -> str:
    """Return in a sentence what drops least of as fast settings whose loss is not measured."""
    if chosen.change is None:
        return ""
    unmeasured = [s for s in compared if s.kind == "capacity" and s.change is None]
    as_fast = [s for s in unmeasured if s.speedup >= chosen.speedup - _EQUAL]
    least = min(as_fast, key=lambda setting: (setting.drop_rate, setting.extra), default=chosen)
    if least.drop_rate >= chosen.drop_rate:
        return ""
    return (
        f" As fast, {least.title} drops {least.drop_rate:.1%}; what the answers lose under it is "
        "not measured."
    )


def _none(compared: Sequence[ServingSetting], budget: Budget, best: ServingSetting) -> str:
    capacities = [setting for setting in compared if not setting.is_lossless]
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
