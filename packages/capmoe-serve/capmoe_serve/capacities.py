"""Count what capacities do to a trace, in every step, on a placement.

A capacity of an expert bounds its pairs, wherever it is; a capacity of a device bounds those that
its slots compute. Replicas of an expert take its pairs in turn, as tokens come, before any drop. An
expert with replicas has no capacity of its own here: no server says whether its copies share one or
each have one. Copies are there to compute what such a capacity would drop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from capmoe_eval.routing.capacity import capacity

from capmoe_serve.placements import SlotPlan
from capmoe_serve.trace import Array, Trace

if TYPE_CHECKING:
    import pandas as pd

# Shape suffixes: T tokens, K = top-k, S steps, E experts, P slots, R ranks, B buckets with a
# capacity (slots of experts, or devices), X capacity factors, M keepers; of pairs: I.

Granularity = Literal["expert", "device"]

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
    import pandas as pd

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
    n_buckets = load_SB.shape[1]
    bucket_I = (step_T[:, None] * n_buckets + bucket_TK).ravel().astype(np.uint64) << np.uint64(32)
    score_I = score_TK.astype(np.float32).ravel()
    load_J = load_SB.ravel()  # of the buckets of all steps, one after the other
    end_J = np.cumsum(load_J)
    # One sort of integers: the bucket above, below it the bits of the score, which of floats of at
    # least 0 are in their order, turned so that they fall; or the place of the pair.
    bits_I = (score_I + np.float32(0)).view(np.uint32)  # makes 0 of -0
    falling_I = np.sort(bucket_I | (np.uint64(2**32 - 1) - bits_I)).astype(np.uint32)
    falling_I = np.uint32(2**32 - 1) - falling_I
    placed_I = np.sort(bucket_I | np.arange(len(score_I), dtype=np.uint64)).astype(np.uint32)
    lost_XM = np.empty((len(limit_XS), len(KEEPERS)))
    sums = [
        np.concatenate([[0.0], np.cumsum(sorted_I, dtype=np.float64)])
        for sorted_I in (falling_I.view(np.float32), score_I[placed_I])
    ]
    mass_J = sums[1][end_J] - sums[1][end_J - load_J]
    for number, limit_S in enumerate(limit_XS):
        kept_J = np.minimum(load_J, np.repeat(limit_S, n_buckets))
        first_J = end_J - load_J + kept_J  # that is dropped
        lost_XM[number, :2] = [(sum_I[end_J] - sum_I[first_J]).sum() for sum_I in sums]
        lost_XM[number, 2] = (mass_J * (load_J - kept_J) / np.maximum(load_J, 1)).sum()
    return float(sums[1][-1]), lost_XM
