"""Summarise a trace: peaks, stragglers, and what capacities do in every step, on a placement.

A capacity of an expert bounds its pairs, wherever it is; a capacity of a device bounds those that
its slots compute. Replicas of an expert take its pairs in turn, as tokens come, before any drop. An
expert with replicas has no capacity of its own here: no server says whether its copies share one or
each have one. Copies are there to compute what such a capacity would drop.
"""

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import numpy as np
import pandas as pd
from capmoe_eval.routing.capacity import capacity
from capmoe_eval.routing.knobs import Count, check
from pydantic import Field

from capmoe_serve.placements import SlotPlan, contiguous, turns
from capmoe_serve.trace import Array, Trace

# Shape suffixes: T tokens, L layers, K = top-k, S steps, E experts, P slots, R ranks, B buckets
# with a capacity (slots of experts, or devices), X capacity factors, M keepers; of pairs: I.

Granularity = Literal["expert", "device"]
_Gamma = Annotated[float, Field(ge=0, allow_inf_nan=True)]
_Gammas = Annotated[list[_Gamma], Field(min_length=1)]

KEEPERS: Final = ("score", "order", "random")
"""Who is kept: the highest scores, the first tokens, or anyone (then the expectation)."""
_LOST: Final = tuple(f"lost_{keeper}" for keeper in KEEPERS)


def count(
    trace: Trace, gammas: Sequence[float], placement: SlotPlan, granularity: Granularity
) -> pd.DataFrame:
    """Return what capacities do, a row for each MoE layer (its number from 0) and γ, summed.

    - ``asked``, ``kept``: pairs before and after the drops
    - ``slots`` that fixed capacities provide
    - ``fullest``: pairs of each step's fullest rank after the drops
    - with scores, ``mass``: gate scores of all pairs, and ``lost_…``: of the dropped ones by keeper

    Args:
        trace: The trace.
        gammas: The capacity factors.
        placement: The experts in the slots of every rank.
        granularity: What has a capacity; each expert only where no expert has two slots.
    """
    of_devices = granularity == "device"
    assert of_devices or not placement.redundant
    rows = []
    for layer in range(trace.n_layers):
        load_SE = trace.load(layer)
        slot_SP = placement.split(load_SE, layer)
        n_buckets = placement.ranks if of_devices else slot_SP.shape[1]
        load_SB = slot_SP.reshape(len(slot_SP), n_buckets, -1).sum(axis=2)
        limit_XS = _limits(trace, gammas, load_SE.sum(axis=1), placement, of_devices)
        scores: dict[str, Array] = {}
        if trace.score_TLK is not None:
            bucket_TK, score_TK = _pairs(trace, layer, placement, of_devices)
            loads = load_SB if of_devices else load_SE  # in the order of the experts
            mass, lost_XM = _dropped_mass(bucket_TK, score_TK, trace.place_T, loads, limit_XS)
            scores = dict(zip(_LOST, lost_XM.T, strict=True))
            scores["mass"] = np.full(len(gammas), mass)
        for number, (gamma, limit_S) in enumerate(zip(gammas, limit_XS, strict=True)):
            kept_SB = np.minimum(load_SB, limit_S[:, None])
            rank_SR = kept_SB.reshape(len(kept_SB), placement.ranks, -1).sum(axis=2)
            row = {
                "layer": layer,
                "gamma": float(gamma),
                "asked": load_SE.sum(),
                "kept": kept_SB.sum(),
                "slots": limit_S.sum() * n_buckets,
                "fullest": rank_SR.max(axis=1).sum(),
            }
            rows.append(row | {name: values[number] for name, values in scores.items()})
    return pd.DataFrame(rows).set_index(["layer", "gamma"])


def shares(sums: pd.DataFrame, ranks: int) -> pd.DataFrame:
    """Return what sums of :func:`count` mean.

    - ``dropped``: share of the pairs
    - ``padding``: empty share of the slots; NaN where there are none
    - ``straggler``: pairs of the fullest rank over a rank's mean before any drop
    - ``lost_…``: share of the gate scores that is dropped, by keeper; without scores not there
    """
    asked, slots = sums["asked"].clip(lower=1), sums["slots"]
    columns = {
        "dropped": (sums["asked"] - sums["kept"]) / asked,
        "padding": 1 - sums["kept"] / slots.where(slots > 0),
        "straggler": sums["fullest"] * ranks / asked,
    }
    for name in _LOST:
        if name in sums:
            columns[name] = (sums[name] / sums["mass"].replace(0.0, 1.0)).clip(0.0, 1.0)
    return sums.assign(**columns)[list(columns)]


def _limits(
    trace: Trace, gammas: Sequence[float], asked_S: Array, placement: SlotPlan, of_devices: bool
) -> Array:
    """Return the capacity of a bucket by capacity factor and step [X, S].

    It is γ·T·K/E, of a device γ·T·K/R, and at most a pair for each of its slots and token.
    """
    top_k, slots = trace.top_k or 1, placement.slots if of_devices else 1
    experts = slots * placement.ranks if of_devices else trace.n_experts
    asked_D, place_S = np.unique(asked_S, return_inverse=True)
    limit_XD = [
        [
            capacity(gamma, asked // top_k, top_k, experts, experts=slots)
            for asked in asked_D.tolist()
        ]
        for gamma in gammas
    ]
    limit_XS: Array = np.array(limit_XD)[:, place_S]
    return limit_XS


def _pairs(trace: Trace, layer: int, placement: SlotPlan, of_devices: bool) -> tuple[Array, Array]:
    """Return the bucket and the gate score of every pair of a layer, token by token."""
    assert trace.expert_TLK is not None
    assert trace.score_TLK is not None
    expert_TK, score_TK = trace.expert_TLK[:, layer], trace.score_TLK[:, layer]
    if not of_devices:
        return expert_TK, score_TK
    order_TK = np.argsort(expert_TK, axis=1)  # pairs come in the order of their experts
    expert_TK, score_TK = (
        np.take_along_axis(array, order_TK, axis=1) for array in (expert_TK, score_TK)
    )
    step_I = np.repeat(trace.place_T, expert_TK.shape[1])
    slot_I = placement.slot_of(expert_TK.ravel().astype(np.int64), step_I, layer)
    return slot_I.reshape(expert_TK.shape) // placement.slots, score_TK


def _dropped_mass(
    bucket_TK: Array, score_TK: Array, step_T: Array, load_SB: Array, limit_XS: Array
) -> tuple[float, Array]:
    """Return the scores of one layer's pairs, summed, and what of it is dropped [X, M]."""
    step_I = np.repeat(step_T, bucket_TK.shape[1])
    bucket_I, score_I = bucket_TK.ravel().astype(np.int64), score_TK.ravel().astype(np.float64)
    load_I = load_SB[step_I, bucket_I]
    bucket_I += step_I * load_SB.shape[1]
    falling_I = np.argsort(-score_I, kind="stable")
    rank_I = np.empty_like(bucket_I)  # of a pair in its bucket, by its score
    rank_I[falling_I] = turns(bucket_I[falling_I])
    place_I = turns(bucket_I)
    lost_XM = [
        [
            score_I[rank_I >= limit_I].sum(),
            score_I[place_I >= limit_I].sum(),
            (score_I * np.maximum(1 - limit_I / load_I, 0)).sum(),
        ]
        for limit_I in limit_XS[:, step_I]
    ]
    return float(score_I.sum()), np.array(lost_XM)


# The summary of a whole trace.

GAMMAS: Final = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
"""Capacity factors of a summary."""
ALL: Final = "all layers"
"""The row of a summary for all layers together, behind those of each."""


def summarise(
    trace: Trace, gammas: Sequence[float] = GAMMAS, *, ranks: int | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Summarise a trace: a row for each layer and one for :data:`ALL`.

    The first frame is indexed by ``layer``:

    - ``pairs`` of a token and an expert, summed over steps
    - ``expert_mean``, ``expert_max``: load of a step's fullest expert over the mean of that step
    - with ranks, the same of the fullest rank, ``rank_mean`` and ``rank_max``, and ``straggler``:
      load of the fullest rank over the mean load of a rank, both summed over steps

    The second is indexed by ``layer`` and ``gamma``, and has the columns of :func:`shares`;
    ``straggler`` is there with ranks that divide the experts. The capacity group is a whole step.

    ``C = ceil(γ·T·K/E)`` with the T tokens of a step, as :func:`capacity` has it. Where K is not
    known, C is not bounded by T, which changes no drop, only the waste at γ above E/K. Each of the
    ranks, by default the trace's, has E/R consecutive experts. Where R does not divide E, it has
    E/R rounded up, and the first experts have copies, which take an expert's pairs in turn; what a
    capacity of an expert leaves to each copy is not defined.

    Raises:
        UsageError: Without a γ, for a negative γ, or for fewer than one rank.
    """
    check("gammas", [*gammas], _Gammas)
    check("ranks", ranks, Count | None)
    ranks = trace.ranks if ranks is None else ranks
    home = contiguous(trace.n_layers, trace.n_experts, ranks or 1)
    asked_SL, expert_SL, rank_SL = np.empty((3, trace.n_steps, trace.n_layers), dtype=np.int64)
    for layer in range(trace.n_layers):
        load_SE = trace.load(layer)
        asked_SL[:, layer], expert_SL[:, layer] = load_SE.sum(axis=1), load_SE.max(axis=1)
        rank_SL[:, layer] = home.rank_load(load_SE, layer).max(axis=1)

    rows = []
    for which in (*np.arange(trace.n_layers)[:, None], slice(None)):
        asked = int(asked_SL[:, which].sum())
        row: dict[str, float] = {"pairs": asked}
        row |= _peaks("expert", expert_SL[:, which], asked_SL[:, which], trace.n_experts)
        if ranks is not None:
            row |= _peaks("rank", rank_SL[:, which], asked_SL[:, which], ranks)
            row["straggler"] = int(rank_SL[:, which].sum()) * ranks / (asked or 1)
        rows.append(row)

    alone = contiguous(trace.n_layers, trace.n_experts, 1) if home.redundant else home
    sums = count(trace, gammas, alone, "expert")
    of_layers = [part.droplevel("layer") for _, part in sums.groupby(level="layer")]
    parts = [shares(part, ranks or 1) for part in (*of_layers, sums.groupby("gamma").sum())]
    names = [*trace.layers, ALL]
    capacities = pd.concat(parts, keys=names, names=["layer"])
    if ranks is None or home.redundant:
        capacities = capacities.drop(columns="straggler")
    return pd.DataFrame(rows, pd.Index(names, name="layer")), capacities


def _peaks(what: str, fullest_SL: Array, asked_SL: Array, units: int) -> dict[str, float]:
    """Return mean and highest peak of the fullest of some units, from its load in each step."""
    peak_SL = fullest_SL * units / np.maximum(asked_SL, 1)
    mean = peak_SL.sum() / (np.count_nonzero(asked_SL) or 1)  # over the steps with a token
    return {f"{what}_mean": float(mean), f"{what}_max": float(peak_SL.max())}
