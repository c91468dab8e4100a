"""Wrong sets of pairs, whatever the method."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.routing.scores import Assignment, ranked_experts
from tests.wrapper.mutations.concerns import (
    named,
    neither,
    with_capacity,
)
from tests.wrapper.mutations.mutation import Call, Mutation, outcome, sent


def _kept(assignment: Assignment, keep_TS: Tensor) -> Assignment:
    return dataclasses.replace(assignment, keep_TS=keep_TS)


def _sent(assignment: Assignment, index_TS: Tensor) -> Assignment:
    return dataclasses.replace(assignment, index_TS=index_TS)


def _without_first_kept(assignment: Assignment, _: Call) -> Assignment:
    keep_TS = assignment.keep_TS.clone()
    keep_TS[tuple(keep_TS.nonzero()[0])] = False
    return _kept(assignment, keep_TS)


def _with_first_dropped(assignment: Assignment, call: Call) -> Assignment:
    keep_TS, top_k = assignment.keep_TS.clone(), call["scores"].topk_TK.shape[1]
    keep_TS[tuple((~keep_TS[:, :top_k]).nonzero()[0])] = True
    return _kept(assignment, keep_TS)


def _stripped(assignment: Assignment, call: Call) -> Assignment:
    top_k = call["scores"].topk_TK.shape[1]
    return _kept(assignment, assignment.keep_TS & assignment.keep_TS[:, :top_k].all(dim=1)[:, None])


def _best_kept(assignment: Assignment, _: Call) -> Assignment:
    keep_TS = assignment.keep_TS.clone()
    keep_TS[:, :2] = True
    return _kept(assignment, keep_TS)


def _stock(assignment: Assignment, call: Call) -> Assignment:
    top_k = call["scores"].topk_TK.shape[1]
    keep_TS = torch.zeros_like(assignment.keep_TS)
    keep_TS[:, :top_k] = True
    return Assignment(assignment.index_TS, keep_TS)


def _second_group_is_stock(assignment: Assignment, call: Call) -> Assignment:
    is_second_T1 = call["groups"].group_T[:, None] == 1
    keep_TS = _stock(assignment, call).keep_TS.where(is_second_T1, assignment.keep_TS)
    return _kept(assignment, keep_TS)


def _refilled(assignment: Assignment, call: Call) -> Assignment:
    """Give every lost pair to the token's next expert, full or not."""
    scores, top_k = call["scores"], call["scores"].topk_TK.shape[1]
    index_TS, keep_TS = assignment.index_TS.clone(), assignment.keep_TS.clone()
    next_TK = ranked_experts(scores)[:, top_k : 2 * top_k]
    index_TS[:, :top_k] = index_TS[:, :top_k].where(keep_TS[:, :top_k], next_TK)
    keep_TS[:, :top_k] = True
    return Assignment(index_TS[:, :top_k], keep_TS[:, :top_k])


def _served_twice(assignment: Assignment, _: Call) -> Assignment:
    index_TS = assignment.index_TS.clone()
    token = int((assignment.keep_TS.sum(dim=1) > 1).nonzero()[0])
    first, second = assignment.keep_TS[token].nonzero()[:2, 0].tolist()
    index_TS[token, second] = index_TS[token, first]
    return _sent(assignment, index_TS)


def _two_tokens_swapped(assignment: Assignment, call: Call) -> Assignment:
    """Swap the experts of two tokens of a group; every expert has as many tokens as before."""
    index_TS, keep_TS = assignment.index_TS.clone(), assignment.keep_TS.clone()
    group_T = call["groups"].group_T.tolist()
    experts = [{int(e) for e in index[keep]} for index, keep in zip(index_TS, keep_TS, strict=True)]
    one, two = next(
        (one, two)
        for one in range(len(experts))
        for two in range(one)
        if group_T[one] == group_T[two] and experts[one] != experts[two]
    )
    for tensor in (index_TS, keep_TS):
        tensor[[one, two]] = tensor[[two, one]]
    return Assignment(index_TS, keep_TS)


def _next_experts(step: int, n_experts: int, index_TS: Tensor) -> Tensor:
    return (index_TS + step) % n_experts


def _dropped_to_first(index_NS: Tensor, weight_NS: Tensor, call: Any) -> tuple[Tensor, Tensor]:
    """Send the dropped slots of counted tokens to expert 0, as commit 606dc1d does."""
    is_dropped_NS = (index_NS == call.n_experts) & call.counts_N[:, None]
    return index_NS.masked_fill(is_dropped_NS, 0), weight_NS


def _pads_routed(index_NS: Tensor, weight_NS: Tensor, call: Any) -> tuple[Tensor, Tensor]:
    pads_N1 = ~call.counts_N[:, None]
    return index_NS.masked_fill(pads_N1, 2), weight_NS.masked_fill(pads_N1, 0.1)


def _one_pad_routed(index_NS: Tensor, weight_NS: Tensor, call: Any) -> tuple[Tensor, Tensor]:
    index_NS[int((~call.counts_N).nonzero()[0]), 0] = 1
    return index_NS, weight_NS


def _dropped_have_weight(index_NS: Tensor, weight_NS: Tensor, call: Any) -> tuple[Tensor, Tensor]:
    return index_NS, weight_NS.masked_fill(index_NS == call.n_experts, 0.1)


def _weights_rolled(index_NS: Tensor, weight_NS: Tensor, call: Any) -> tuple[Tensor, Tensor]:
    return index_NS, weight_NS.roll(1, dims=1).where(call.counts_N[:, None], weight_NS)


def _ids_rolled(index_NS: Tensor, weight_NS: Tensor, call: Any) -> tuple[Tensor, Tensor]:
    return index_NS.roll(1, dims=1), weight_NS


def _rows_rolled(index_NS: Tensor, weight_NS: Tensor, call: Any) -> tuple[Tensor, Tensor]:
    rows_T = call.counts_N.nonzero()[:, 0]
    index_NS[rows_T], weight_NS[rows_T] = index_NS[rows_T.roll(1)], weight_NS[rows_T.roll(1)]
    return index_NS, weight_NS


def _weightless(index_NS: Tensor, weight_NS: Tensor, call: Any) -> tuple[Tensor, Tensor]:
    """Call the experts of the first token with no weight."""
    weight_NS[int((index_NS < call.n_experts).any(dim=1).nonzero()[0])] = 0
    return index_NS, weight_NS


_SERE = named("sere")

MUTATIONS: tuple[Mutation, ...] = (
    outcome(
        "every other token is stripped",
        lambda a, _: _kept(a, a.keep_TS & (torch.arange(len(a.keep_TS)) % 2 > 0)[:, None]),
    ),
    outcome("all experts are silenced", lambda a, _: _kept(a, a.keep_TS & False)),
    outcome("no pair is dropped", _stock),
    outcome("the second rank is stock", _second_group_is_stock, with_capacity),
    outcome(
        "kept pairs are sent to expert j+1",
        lambda a, c: _sent(a, _next_experts(1, c["scores"].score_TE.shape[1], a.index_TS)),
    ),
    outcome(
        "kept pairs are sent to the other rank",
        lambda a, c: _sent(a, _next_experts(4, c["scores"].score_TE.shape[1], a.index_TS)),
    ),
    outcome(
        "kept pairs are sent to expert E-1-j",
        lambda a, c: _sent(a, c["scores"].score_TE.shape[1] - 1 - a.index_TS),
    ),
    outcome("a kept pair is dropped", _without_first_kept),
    outcome("a dropped pair is kept", _with_first_dropped),
    outcome("a token keeps all pairs or none", _stripped, neither(_SERE)),
    outcome(
        "a token's two best pairs are always kept",
        _best_kept,
        neither(named("oea", "sere", "xshare")),
    ),
    outcome("the kept pairs are dropped and the others kept", lambda a, _: _kept(a, ~a.keep_TS)),
    outcome(
        "decisions are those of the token before",
        lambda a, _: _kept(a, a.keep_TS.roll(1, dims=0)),
        neither(_SERE),
    ),
    outcome(
        "a token's last choice is dropped",
        lambda a, c: _kept(
            a, a.keep_TS & (torch.arange(a.keep_TS.shape[1]) != c["scores"].topk_TK.shape[1] - 1)
        ),
    ),
    outcome(
        "the busiest expert is silenced",
        lambda a, _: _kept(a, a.keep_TS & (a.index_TS != a.index_TS[a.keep_TS].mode().values)),
    ),
    outcome(
        "a token's last pair is dropped",
        lambda a, _: _kept(
            a, a.keep_TS & (torch.arange(len(a.keep_TS)) < len(a.keep_TS) - 1)[:, None]
        ),
    ),
    outcome("lost pairs go to the token's next expert", _refilled),
    outcome("an expert serves a token twice", _served_twice),
    outcome("two tokens' experts are swapped", _two_tokens_swapped, neither(_SERE)),
    sent("dropped slots are sent to expert 0", _dropped_to_first),
    sent("pads are routed", _pads_routed),
    sent("one pad is routed without a weight", _one_pad_routed),
    sent("dropped slots have a weight", _dropped_have_weight),
    sent("weights are a slot away from their experts", _weights_rolled),
    sent("experts are a slot away from their weights", _ids_rolled),
    sent("rows are sent one too late", _rows_rolled),
    sent("a token's kept pairs have no weight", _weightless),
)
