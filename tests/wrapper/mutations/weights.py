"""Wrong combine weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.wrapper.mutations.concerns import (
    adds,
    both,
    grouped,
    named,
    neither,
    normalised,
    normalised_after,
    text_alone,
)
from tests.wrapper.mutations.mutation import Mutation, weights

_SERE = named("sere")


def _over_kept(weight_TS: Tensor, call: Any) -> Tensor:
    """Divide by the sum over the kept pairs."""
    kept_TS = weight_TS * call.assignment.keep_TS
    return weight_TS / kept_TS.sum(dim=1, keepdim=True).clamp_min(1e-9)


def _over_topk(weight_TS: Tensor, call: Any) -> Tensor:
    index_TS = call.assignment.index_TS
    return call.layer.gate.weights(call.scores, index_TS)


def _shuffled(weight_TS: Tensor, call: Any) -> Tensor:
    """Move the weights of a token's kept pairs by one kept pair."""
    moved_TS = weight_TS.clone()
    for token, keep in enumerate(call.assignment.keep_TS):
        moved_TS[token, keep] = weight_TS[token, keep].roll(1)
    return moved_TS


def _to_best(weight_TS: Tensor, call: Any) -> Tensor:
    """Give the weights of lost pairs to the token's first kept pair."""
    keep_TS = call.assignment.keep_TS
    top_k = call.weight_TK.shape[1]
    lost_T = (call.weight_TK * ~keep_TS[:, :top_k]).sum(dim=1)
    first_T1 = keep_TS.long().argmax(dim=1, keepdim=True)
    return weight_TS.scatter_add(1, first_T1, lost_T[:, None])


def _added(weight_TS: Tensor, call: Any, factor: Any) -> Tensor:
    top_k = call.weight_TK.shape[1]
    weight_TS[:, top_k:] *= factor
    return weight_TS


def _added_over_all(weight_TS: Tensor, call: Any) -> Tensor:
    """Divide added pairs by the sum over all kept pairs."""
    top_k = call.weight_TK.shape[1]
    over_TS = _over_kept(weight_TS.clone(), call)
    weight_TS[:, top_k:] = over_TS[:, top_k:]
    return weight_TS


def _one_token(weight_TS: Tensor, call: Any) -> Tensor:
    """Double the weights of one token."""
    token = int(call.assignment.keep_TS.any(dim=1).nonzero()[-1])
    weight_TS[token] *= 2
    return weight_TS


def _one_pair(weight_TS: Tensor, call: Any) -> Tensor:
    token, slot = call.assignment.keep_TS.nonzero()[-1].tolist()
    weight_TS[token, slot] *= 1.01
    return weight_TS


def _of_changed(factor: float) -> Any:
    return lambda weight_TS, call: weight_TS * (1 + (factor - 1) * call.changed_T[:, None])


def _with_own_weights(weight_TS: Tensor, call: Any) -> Tensor:
    """Leave SERE's weights with the pairs of the top-k: a moved pair has none."""
    return torch.cat([call.weight_TK, torch.zeros_like(call.weight_TK)], dim=1)


def _of_new_expert(weight_TS: Tensor, call: Any) -> Tensor:
    return _over_topk(weight_TS, call)


def _largest(weight_TS: Tensor, call: Any) -> Tensor:
    """Give SERE's merged pair the largest of its weights instead of their sum."""
    slots = torch.arange(weight_TS.shape[1])
    taken_TKS = call.weight_TK[:, :, None] * (call.assignment.slot_TK[:, :, None] == slots)
    return taken_TKS.amax(dim=1)


MUTATIONS: tuple[Mutation, ...] = (
    weights("weights of changed tokens are times three", _of_changed(3)),
    weights("weights of changed tokens are a thousandth larger", _of_changed(1.001)),
    weights("all weights are halved", lambda w, _: w / 2),
    weights("weights are rounded to bfloat16", lambda w, _: w.bfloat16().to(w.dtype)),
    weights("weights are all 1/K", lambda w, c: torch.full_like(w, 1 / c.weight_TK.shape[1])),
    weights("weights are squared", lambda w, _: w**2),
    weights("weights are those of the token before", lambda w, _: w.roll(1, dims=0)),
    weights("weights are moved among a token's pairs", _shuffled),
    weights("the first pair has the weight of the lost ones", _to_best, neither(_SERE)),
    weights("one token has twice its weights", _one_token),
    weights("one pair has a hundredth too much", _one_pair),
    weights("a changed token's weights are negative", _of_changed(-1)),
    weights("weights are normalised over the kept pairs", _over_kept),
    weights(
        "weights are normalised over the kept pairs where they are over the top-k",
        _over_kept,
        text_alone,
        normalised,
    ),
    weights(
        "weights are normalised over the top-k where they are over the kept pairs",
        _over_topk,
        both(text_alone, neither(_SERE)),
        normalised_after,
    ),
    weights(
        "added pairs are divided by all kept ones",
        _added_over_all,
        both(adds, text_alone),
        normalised,
    ),
    weights("added pairs weigh nothing", lambda w, c: _added(w, c, 0), adds),
    weights("added pairs weigh twice", lambda w, c: _added(w, c, 2), adds),
    weights(
        "the family's scale is left out",
        lambda w, c: w / c.layer.gate.scale,
        both(text_alone),
        grouped,
    ),
    weights(
        "the family's scale is left out of added pairs",
        lambda w, c: _added(w, c, 1 / c.layer.gate.scale),
        both(adds, text_alone),
        grouped,
    ),
    weights("moved pairs have no weight", _with_own_weights, _SERE),
    weights("moved pairs have the weight of their new expert", _of_new_expert, _SERE),
    weights("pairs that meet have the larger weight", _largest, _SERE),
)
