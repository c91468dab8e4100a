"""Compute settings of a deployment on a trace: capacities, balancing without loss, and their front.

All settings are judged on the same steps, the second half of the trace; what is planned, is planned
on the first half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from capmoe_eval.errors import UsageError
from capmoe_eval.serving.placement.comparison import compare
from capmoe_eval.serving.placement.layout import contiguous
from capmoe_eval.serving.placement.outcome import Outcome, judge, judge_least_loaded
from capmoe_eval.serving.score_mass import KEEPERS, dropped_mass
from capmoe_eval.serving.summary import limits
from capmoe_eval.serving.trace import Array, Trace, check_ranks

# Shape suffixes: T tokens, K = top-k, S steps, L layers, E experts, R ranks, B buckets (experts, or
# devices), X capacity factors, M keepers.

Share = Annotated[float, Field(ge=0, le=1)]
Granularity = Literal["expert", "device"]
UNCHANGED = "contiguous"

Axis = Literal["points", "scores", "pairs"]
"""What a capacity costs, as far as it is known: points of accuracy, else the dropped share of the
gate scores, else the dropped share of the pairs."""


class Part(BaseModel):
    """A part of an advice: values of other types, further fields and NaN are refused."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Change(Part):
    """The accuracy under a setting minus that of the unlimited model, on the same documents."""

    effect: float  # points, tasks counting equally
    low: float  # of its 95 % interval over documents
    high: float
    documents: Annotated[int, Field(ge=1)]
    tasks: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    drop_rate: Share  # of the pairs in the records, which have batches of their own


class Setting(Part):
    """A way to serve, with its loads on a trace or in records."""

    # ``transfers``: weights of experts are sent in every step (LLEP), which is not charged here.
    kind: Literal["unchanged", "placement", "transfers", "capacity"]
    method: str
    gamma: Annotated[float, Field(ge=0)] | None = None
    granularity: Granularity | None = None
    knobs: str = ""  # further ones, as words
    straggler: Annotated[float, Field(ge=0)]
    """Pairs of the fullest rank over a rank's mean before any drop, both summed over steps."""
    speedup: Annotated[float, Field(ge=0)]
    """See :func:`speedup`: a bound for the expert step of a layer, never of the whole model."""
    drop_rate: Share = 0.0
    pad_waste: Share | None = None  # of the slots of a fixed capacity
    dropped_score: Share | None = None  # share of the gate scores; None where they are not known
    extra: Annotated[float, Field(ge=0)] = 0.0  # copies of experts in memory, in a layer
    moved: Annotated[float, Field(ge=0)] = 0.0  # weights of experts sent in a layer of a step
    change: Change | None = None  # None where no records have it, and where nothing is dropped
    is_on_front: bool = False

    @property
    def is_lossless(self) -> bool:
        """True if every pair is computed."""
        return self.kind != "capacity"

    @property
    def title(self) -> str:
        """Its name in a few words, such as ``score γ=1.5 per expert``."""
        if self.kind != "capacity":
            return "the placement in blocks" if self.kind == "unchanged" else self.method
        words = [self.method.replace("_", " "), f"γ={self.gamma:g}", f"per {self.granularity}"]
        return " ".join([*words, *([self.knobs] if self.knobs else [])])


def speedup(straggler: float, unchanged: float, drop_rate: float, link_share: float) -> float:
    """Return the bound on the speedup of a layer's expert step.

    The step's time is taken as a part that follows the fullest rank, and a part, ``link_share`` of
    the time before, that follows the pairs that are sent at all. Launches, gathering, attention and
    transfers of weights are left out, so the whole model gains less.

    Args:
        straggler: Straggler factor of the setting.
        unchanged: Straggler factor before.
        drop_rate: Dropped share of the pairs.
        link_share: Share of the expert step's time that the link takes before, from 0 to 1.
    """
    after = (1 - link_share) * straggler / unchanged + link_share * (1 - drop_rate)
    return 1 / max(after, 1e-9)


def judged_part(trace: Trace) -> Trace:
    """Return the second half of a trace's steps, or the whole of a single step."""
    if trace.n_steps < 2:
        return trace
    middle = trace.n_steps // 2
    kinds = None if trace.decode_S is None else trace.decode_S[middle:]
    if trace.load_SLE is not None:
        return dataclasses.replace(trace, load_SLE=trace.load_SLE[middle:], decode_S=kinds)
    tokens_S = trace.tokens_per_step()
    assert tokens_S is not None
    first = int(tokens_S[:middle].sum())
    arrays = ("expert_TLK", "score_TLK", "step_T", "request_T")
    later = {name: array[first:] for name in arrays if (array := getattr(trace, name)) is not None}
    return dataclasses.replace(trace, **later, decode_S=kinds)


def trace_settings(
    trace: Trace, gammas: Sequence[float], ranks: int, slots: int, link_share: float = 0.0
) -> list[Setting]:
    """Return all settings on a trace: unchanged, balanced without loss, and every capacity.

    Args:
        trace: The trace.
        gammas: Capacity factors.
        ranks: Ranks R; it divides E.
        slots: Experts on a rank, with copies.
        link_share: See :func:`speedup`.

    Raises:
        UsageError: If the experts cannot be spread so, or the judged steps are empty.
    """
    balanced = _balanced(trace, ranks, slots, link_share)
    return balanced + _capacities(trace, gammas, ranks, balanced[0].straggler, link_share)


def check_deployment(n_experts: int, ranks: int, slots: int) -> None:
    """Refuse ranks that the experts cannot be spread over, and too few experts on a rank."""
    if ranks < 2:
        raise UsageError("ranks=1: one rank waits for no other; give at least 2")
    check_ranks(ranks, n_experts)
    if slots < n_experts // ranks:
        raise UsageError(
            f"experts_per_rank={slots}: {ranks} ranks have room for {ranks * slots} of {n_experts} "
            f"experts; give at least {n_experts // ranks}"
        )


def _balanced(trace: Trace, ranks: int, slots: int, link_share: float) -> list[Setting]:
    load_SLE = trace.loads()
    if not load_SLE[len(load_SLE) // 2 :].any():
        raise UsageError("load_SLE: the second half of the steps has no pair; record more traffic")
    extra = slots - trace.n_experts // ranks
    if len(load_SLE) < 2:  # nothing is left to judge a plan on
        home = contiguous(trace.n_layers, trace.n_experts, ranks)
        outcomes = [judge(UNCHANGED, load_SLE, home), judge_least_loaded(load_SLE, ranks)]
    else:
        outcomes = compare(load_SLE, ranks, (extra,) if extra else ())
    unchanged = _straggler(outcomes[0])
    return [_balance(outcome, unchanged, link_share) for outcome in outcomes]


def _balance(outcome: Outcome, unchanged: float, link_share: float) -> Setting:
    factor, summary = _straggler(outcome), outcome.summary()
    kinds = {UNCHANGED: "unchanged", "LLEP": "transfers"}
    return Setting.model_validate(
        {
            "kind": kinds.get(outcome.method, "placement"),
            "method": outcome.method,
            "straggler": factor,
            "speedup": speedup(factor, unchanged, 0.0, link_share),
            "extra": summary.extra,
            "moved": summary.moved,
        }
    )


def _straggler(outcome: Outcome) -> float:
    fullest = float(outcome.load_SLR.max(axis=2).sum())
    return fullest * int(outcome.load_SLR.shape[2]) / max(int(outcome.asked_SL.sum()), 1)


def _capacities(
    trace: Trace, gammas: Sequence[float], ranks: int, unchanged: float, link_share: float
) -> list[Setting]:
    local = trace.n_experts // ranks
    judged = judged_part(trace)
    sizes: dict[Granularity, int] = {"expert": 1}
    if local > 1:  # otherwise devices are experts
        sizes["device"] = local
    return [
        Setting(
            kind="capacity",
            method=keeper,
            gamma=float(gamma),
            granularity=granularity,
            straggler=sums.straggler,
            speedup=speedup(sums.straggler, unchanged, sums.drop_rate, link_share),
            drop_rate=sums.drop_rate,
            pad_waste=sums.pad_waste,
            dropped_score=sums.dropped_score.get(keeper),
        )
        for granularity, size in sizes.items()
        for gamma, sums in zip(gammas, capacity_sums(judged, gammas, ranks, size), strict=True)
        for keeper in KEEPERS
    ]


@dataclasses.dataclass(frozen=True)
class CapacitySums:
    """What one capacity factor does to a trace, over all steps and layers."""

    straggler: float
    drop_rate: float
    pad_waste: float | None
    dropped_score: dict[str, float]  # by keeper; empty without scores


def capacity_sums(
    trace: Trace, gammas: Sequence[float], ranks: int, size: int
) -> list[CapacitySums]:
    """Return what capacities of ``size`` experts together do; ``reference.py`` has the loop."""
    asked = mass = 0.0
    kept_X, slots_X, fullest_X = np.zeros((3, len(gammas)), dtype=np.int64)
    lost_XM = np.zeros((len(gammas), len(KEEPERS)))
    for part in trace.by_steps():
        load_SLB = part.load_SLE.reshape(*part.load_SLE.shape[:2], -1, size).sum(axis=3)
        asked_SL = load_SLB.sum(axis=2)
        asked += float(asked_SL.sum())
        limit_XSL = np.stack([limits(trace, gamma, asked_SL, experts=size) for gamma in gammas])
        for number, limit_SL in enumerate(limit_XSL):
            kept_SLB = np.minimum(load_SLB, limit_SL[:, :, None])
            rank_SLR = kept_SLB.reshape(*kept_SLB.shape[:2], ranks, -1).sum(axis=3)
            kept_X[number] += kept_SLB.sum()
            slots_X[number] += limit_SL.sum() * load_SLB.shape[2]
            fullest_X[number] += rank_SLR.max(axis=2).sum()
        if trace.score_TLK is not None:
            for layer in range(trace.n_layers):
                expert_TK, score_TK = _pairs(trace, part.tokens, layer)
                there, lost = dropped_mass(
                    expert_TK // size, score_TK, load_SLB[:, layer], limit_XSL[:, :, layer]
                )
                mass, lost_XM = mass + there, lost_XM + lost
    return [
        CapacitySums(
            straggler=float(fullest_X[number]) * ranks / max(asked, 1.0),
            drop_rate=float(asked - kept_X[number]) / max(asked, 1.0),
            pad_waste=1 - float(kept_X[number] / slots_X[number]) if slots_X[number] else None,
            dropped_score={}
            if trace.score_TLK is None
            else {
                keeper: min(max(float(lost) / (mass or 1.0), 0.0), 1.0)
                for keeper, lost in zip(KEEPERS, lost_XM[number], strict=True)
            },
        )
        for number in range(len(gammas))
    ]


def _pairs(trace: Trace, tokens: slice, layer: int) -> tuple[Array, Array]:
    """Return experts and scores of a layer, a token's pairs in the order of their experts."""
    assert trace.expert_TLK is not None and trace.score_TLK is not None
    expert_TK, score_TK = trace.expert_TLK[tokens, layer], trace.score_TLK[tokens, layer]
    order_TK = np.argsort(expert_TK, axis=1)
    return (
        np.take_along_axis(expert_TK, order_TK, axis=1),
        np.take_along_axis(score_TK, order_TK, axis=1),
    )


def axis_of(settings: Sequence[Setting]) -> Axis:
    """Return what is known of the cost of capacities."""
    capacities = [setting for setting in settings if setting.kind == "capacity"]
    if any(setting.change is not None for setting in capacities):
        return "points"
    return "scores" if any(s.dropped_score is not None for s in capacities) else "pairs"


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

    Settings of unknown cost are not on the front, nor are transfers, whose time is not charged.
    """
    known = [
        (setting.speedup, found, number)
        for number, setting in enumerate(settings)
        if setting.kind != "transfers" and (found := cost(setting, axis)) is not None
    ]
    front: set[int] = set()
    cheapest = float("inf")  # cost of those that are faster
    fastest_first = sorted({speed for speed, _, _ in known}, reverse=True)
    for speed in fastest_first:
        equal = [(found, number) for other, found, number in known if other == speed]
        least = min(found for found, _ in equal)
        if least < cheapest:
            front |= {number for found, number in equal if found == least}
            cheapest = least
    return tuple(
        setting.model_copy(update={"is_on_front": number in front})
        for number, setting in enumerate(settings)
    )
