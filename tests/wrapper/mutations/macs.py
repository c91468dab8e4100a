"""Wrong weights of tokens, wrong bounds on them and wrong rerouting: MACS."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.extensions.macs.decision import UNIT
from capmoe_eval.routing.scores import Scores
from tests.wrapper.mutations.concerns import named
from tests.wrapper.mutations.mutation import (
    Call,
    Decide,
    Mutation,
    decision,
    knobs,
    of_first_call,
    outcome,
    result,
)

_MACS = named("macs")
_WEIGHTS = "extensions.macs.decision:token_weights"
_LIMITS = "extensions.macs.decision:weighted_limits"
_FULL = "extensions.macs.decision:_until_full"


def _weights(name: str, change: Callable[[Tensor, Tensor], Tensor]) -> Mutation:
    """Return a mutation of the tokens' weights [T], from the true ones and the images' mask."""

    def of_images(units_T: Tensor, _hidden: Tensor, image_T: Tensor, *_: Any) -> Tensor:
        return change(units_T, image_T)

    return result(name, _WEIGHTS, of_images, _MACS)


def _weighed_by(name: str, change: Callable[..., tuple[Any, ...]]) -> Mutation:
    """Return a mutation of the tokens' weights that are computed from other arguments."""

    def wrap(token_weights: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *arguments: token_weights(*change(*arguments))

    return Mutation(name, _WEIGHTS, wrap, _MACS)


def _one_group(hidden: Tensor, image: Tensor, groups: Any, delta: float) -> tuple[Any, ...]:
    from tests.wrapper.mutations.capacities import _regrouped

    return hidden, image, _regrouped(0 * groups.group_T, groups, 1), delta


def _limits(name: str, change: Callable[[Tensor], Tensor]) -> Mutation:
    """Return a mutation of the capacities [G, E]."""
    return result(name, _LIMITS, lambda limit_GE, *_, **__: change(limit_GE), _MACS)


def _limits_by(name: str, change: Callable[..., tuple[Any, ...]]) -> Mutation:
    """Return a mutation of the capacities that are computed from other arguments."""

    def wrap(weighted_limits: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *arguments: weighted_limits(*change(*arguments))

    return Mutation(name, _LIMITS, wrap, _MACS)


def _filled(name: str, fits: Callable[[int, int, bool], bool], first_pass: bool = True) -> Mutation:
    """Return a mutation of how an expert is filled.

    ``fits`` gets the capacity that is left, the weight of the next token, and whether one before
    it did not fit. ``first_pass`` says whether it concerns a token's own experts, too.
    """

    def wrap(until_full: Callable[..., Tensor]) -> Callable[..., Tensor]:
        calls: list[int] = []

        def mutated(*arguments: Any) -> Tensor:
            calls.append(1)
            if not first_pass and len(calls) % 2:
                return until_full(*arguments)
            return _fill(fits, *arguments)

        return mutated

    return Mutation(name, _FULL, wrap, _MACS)


def _fill(
    fits: Callable[[int, int, bool], bool],
    scores: Scores,
    groups: Any,
    weighted: Any,
    room_GE: Tensor,
    index_TS: Tensor,
    valid_TS: Tensor,
) -> Tensor:
    keep_TS, left_GE = torch.zeros_like(valid_TS), room_GE.clone()
    full: set[tuple[int, int]] = set()
    slots = [
        (-float(scores.score_TE[token, index_TS[token, slot]]), token, slot)
        for token, slot in valid_TS.nonzero().tolist()
    ]
    for _, token, slot in sorted(slots):
        bucket = int(groups.group_T[token]), int(index_TS[token, slot])
        unit = int(weighted.unit_T[token])
        if fits(int(left_GE[bucket]), unit, bucket in full):
            keep_TS[token, slot] = True
            left_GE[bucket] -= unit
        else:
            full.add(bucket)
    return keep_TS


def _arguments(name: str, change: Callable[..., tuple[Any, ...]]) -> Mutation:
    """Return a mutation of what an expert is filled with, in the second pass."""

    def wrap(until_full: Callable[..., Tensor]) -> Callable[..., Tensor]:
        calls: list[tuple[Any, ...]] = []

        def mutated(*arguments: Any) -> Tensor:
            calls.append(arguments)
            if len(calls) % 2:
                return until_full(*arguments)
            return until_full(*change(calls[-2], *arguments))

        return mutated

    return Mutation(name, _FULL, wrap, _MACS)


def _ranked_by_number(ranked_TE: Tensor, scores: Scores) -> Tensor:
    top_k = scores.topk_TK.shape[1]
    return torch.cat([ranked_TE[:, :top_k], ranked_TE[:, top_k:].sort(dim=1).values], dim=1)


def _ranked_backwards(ranked_TE: Tensor, scores: Scores) -> Tensor:
    top_k = scores.topk_TK.shape[1]
    return torch.cat([ranked_TE[:, :top_k], ranked_TE[:, top_k:].flip(1)], dim=1)


def _one_moved(decided: Any, call: Any) -> Any:
    """Move one pair of the whole batch alone."""
    top_k = call["scores"].topk_TK.shape[1]
    decided.keep_TS[:, top_k:] &= decided.keep_TS[:, top_k:].cumsum(dim=1) == 1
    added_T = decided.keep_TS[:, top_k:].any(dim=1)
    decided.keep_TS[:, top_k:] &= (added_T.cumsum(dim=0) == 1)[:, None]
    return decided


def _unweighted(decide: Decide, call: Call) -> Any:
    """Decide by tokens that all weigh 1, and tell the true weights."""
    decided = decide(**call | {"image_T": None, "calibrated": None})
    return dataclasses.replace(decided, details=decide(**call).details)


MUTATIONS: tuple[Mutation, ...] = (
    _weights("tokens of images weigh 1", lambda units, _: torch.full_like(units, UNIT)),
    _weights(
        "tokens of images weigh one half", lambda units, image: units.where(~image, UNIT // 2)
    ),
    _weights("text weighs one half", lambda units, image: units.where(image, UNIT // 2)),
    _weights(
        "weights are one less theirs",
        lambda units, image: (UNIT - units).clamp_min(1).where(image, units),
    ),
    _weights("tokens' weights are those of the token before", lambda units, _: units.roll(1)),
    _weights(
        "weights are the mean of the images'",
        lambda units, image: (0 * units + units[image].sum() // image.sum()).where(image, units),
    ),
    _weights("weights are eighths", lambda units, _: (units * 8 // UNIT).clamp_min(1) * UNIT // 8),
    _weights(
        "tokens' weights are squared",
        lambda units, _: (units.double() ** 2 / UNIT).round().long().clamp_min(1),
    ),
    _weighed_by("delta has another sign", lambda h, i, g, delta: (h, i, g, -delta)),
    _weighed_by("delta is doubled", lambda h, i, g, delta: (h, i, g, 2 * delta)),
    _weighed_by(
        "the softmax is at half its temperature", lambda h, i, g, delta: (2 * h, i, g, delta)
    ),
    _weighed_by(
        "entropies are those of the token before",
        lambda h, i, g, delta: (h.roll(1, dims=0), i, g, delta),
    ),
    _weighed_by(
        "text is weighed as well", lambda h, i, g, delta: (h, torch.ones_like(i), g, delta)
    ),
    _weighed_by("the ranks share their mean entropy", _one_group),
    of_first_call("weights are those of the first layer", _WEIGHTS, lambda first, _: first, _MACS),
    _limits("capacities are whole tokens", lambda limit: limit // UNIT * UNIT),
    _limits("capacities are a token larger", lambda limit: limit + UNIT),
    _limits("capacities are half a token smaller", lambda limit: limit - UNIT // 2),
    _limits("the ranks' capacities are swapped", lambda limit: limit.flip(0)),
    _limits("the experts' capacities are shifted", lambda limit: limit.roll(1, dims=1)),
    _limits_by("the ratio is left out", lambda m, g, ratio, *more: (m, g, 0 * ratio + 0.5, *more)),
    _limits_by("the ratio is that of text", lambda m, g, ratio, *more: (m, g, 1 - ratio, *more)),
    _limits_by(
        "the ratio is that of the other rank",
        lambda m, g, ratio, *more: (m, g, ratio.flip(0), *more),
    ),
    _limits_by(
        "the ratio is that of all ranks",
        lambda m, g, ratio, *more: (m, g, 0 * ratio + ratio.mean(), *more),
    ),
    _limits_by(
        "the experts' modalities are swapped", lambda m, g, ratio, bias, k: (m, g, ratio, -bias, k)
    ),
    _limits_by(
        "the experts' modalities are those of the next",
        lambda m, g, ratio, bias, k: (m, g, ratio, bias.roll(1), k),
    ),
    _limits_by(
        "the ratio is taken from nothing", lambda m, g, ratio, *more: (m, g, ratio + 0.5, *more)
    ),
    of_first_call(
        "modalities are those of the first layer",
        "wrapper.hook:LayerHook._calibrated_on",
        lambda first, _: first,
        _MACS,
    ),
    decision("the bounds are Token Drop's", _unweighted, _MACS),
    knobs("nothing is rerouted", lambda _: {"reroute": "none"}, _MACS),
    knobs("pairs are rerouted across ranks", lambda _: {"ep_size": 1}, _MACS),
    result(
        "pairs are rerouted by number", "routing.scores:ranked_experts", _ranked_by_number, _MACS
    ),
    result(
        "pairs are rerouted to the worst expert",
        "routing.scores:ranked_experts",
        _ranked_backwards,
        _MACS,
    ),
    outcome("one pair is rerouted", _one_moved, _MACS),
    _filled("gaps are filled", lambda left, unit, _full: unit <= left),
    _filled(
        "the token that does not fit is kept, too", lambda left, _unit, full: left > 0 and not full
    ),
    _filled(
        "an expert stops a token early", lambda left, unit, full: unit + UNIT <= left and not full
    ),
    _filled("rerouted pairs are not bounded", lambda *_: True, first_pass=False),
    _filled(
        "gaps are filled with rerouted pairs",
        lambda left, unit, _full: unit <= left,
        first_pass=False,
    ),
    _arguments(
        "rerouted pairs find empty experts", lambda first, *now: (*now[:3], first[3], *now[4:])
    ),
    decision(
        "a rank's pairs are rerouted to the other",
        lambda decide, call: decide(**call),
        lambda _: False,
    ),
)
