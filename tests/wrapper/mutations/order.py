"""Wrong orders in which an overloaded expert keeps pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.routing.scores import Assignment, Scores
from tests.wrapper.mutations.concerns import (
    both,
    by_place,
    by_score,
    candidates,
    capped,
    expands,
    grouped,
    has_modalities,
    named,
    neither,
    per_device,
    tied,
)
from tests.wrapper.mutations.mutation import (
    Call,
    Mutation,
    argument,
    decision,
    knobs,
    outcome,
    result,
)
from tests.wrapper.mutations.settings import with_knobs

_KEY = "routing.methods.token_drop:RandomDrop.random_numbers"


def _scored(name: str, change: Callable[[Scores], Tensor], *more: Any) -> Mutation:
    """Return a mutation of the decision that is made by other scores; weights stay true."""

    def other(call: Call) -> Scores:
        scores = call["scores"]
        return dataclasses.replace(scores, score_TE=change(scores), choice_TE=scores.ranking_TE)

    return argument(name, "scores", other, *more or (by_score,))


def _place_in_own_order(scores: Scores) -> Tensor:
    order_TE = scores.ranking_TE.argsort(dim=1, descending=True).argsort(dim=1)
    return 1 - order_TE / order_TE.shape[1]


def _first_choices_first(decide: Any, call: Call) -> Assignment:
    """Order pairs as GShard does: those of all tokens' first choices before the second ones."""
    topk_TK = call["scores"].topk_TK
    slot_TK = torch.arange(topk_TK.numel()).view(topk_TK.T.shape).T
    if call["method"].name == "reverse_order":
        slot_TK = topk_TK.numel() - 1 - slot_TK
    key_TE = torch.zeros_like(call["scores"].score_TE).scatter(
        1, topk_TK, 1 - slot_TK / topk_TK.numel()
    )
    scores = Scores(key_TE, topk_TK)
    method = with_knobs(call["method"], name="score")
    return decide(**call | {"scores": scores, "method": method})


def _swapped(assignment: Assignment, call: Call) -> Assignment:
    """Keep one pair of an expert in the place of another of the same group."""
    top_k = call["scores"].topk_TK.shape[1]
    keep_TS = assignment.keep_TS.clone()
    first: dict[tuple[int, int, bool], tuple[int, int]] = {}
    for token, group in enumerate(call["groups"].group_T.tolist()):
        for slot in range(top_k):
            expert, kept = int(assignment.index_TS[token, slot]), bool(keep_TS[token, slot])
            first.setdefault((group, expert, kept), (token, slot))
            if (group, expert, not kept) in first:
                other = first[group, expert, not kept]
                keep_TS[token, slot], keep_TS[other] = not kept, kept
                return dataclasses.replace(assignment, keep_TS=keep_TS)
    return assignment


def _rows_by_position(groups: Any, counted_BS: Tensor, **_: Any) -> Any:
    width = counted_BS.shape[1]
    order_T = (groups.rows_T % width * len(counted_BS) + groups.rows_T // width).argsort()
    tensors = {name: getattr(groups, name)[order_T] for name in ("rows_T", "group_T", "rank_T")}
    return dataclasses.replace(groups, **tensors)


_TOKENS = "tokens' ties are broken the other way"
_EXPERTS = "experts' ties are broken the other way"

_BY_SCORE = (
    _scored("the lowest scores are kept", lambda scores: 1 - scores.score_TE),
    _scored("scores have two decimals", lambda s: (s.score_TE * 20).round() / 20),
    _scored("scores are a rank in the token's own order", _place_in_own_order),
    _scored(
        "scores are relative to a token's best",
        lambda s: s.score_TE / s.score_TE.amax(dim=1, keepdim=True),
    ),
    _scored("scores are those of the next token", lambda s: s.score_TE.roll(1, dims=0)),
    _scored("scores are those of the next expert", lambda s: s.score_TE.roll(1, dims=1)),
    _scored(
        "odd experts have half their scores",
        lambda s: s.score_TE * 2.0 ** -(torch.arange(s.score_TE.shape[1]) % 2),
        both(by_score, per_device),
    ),
    _scored(
        "scores have the router's bias",
        lambda s: s.ranking_TE - s.ranking_TE.min(),
        both(by_score, per_device),
        grouped,
    ),
    _scored(
        _TOKENS,
        lambda s: s.score_TE + 1e-6 * torch.arange(len(s.score_TE))[:, None],
        by_score,
        tied,
    ),
    _scored(
        _EXPERTS,
        lambda s: s.score_TE + 1e-6 * torch.arange(s.score_TE.shape[1]),
        both(by_score, per_device),
        tied,
    ),
    knobs(
        "first tokens are kept",
        lambda _: {"name": "order"},
        both(named("score"), neither(has_modalities)),
    ),
    knobs(
        "random tokens are kept",
        lambda _: {"name": "random"},
        both(named("score"), neither(has_modalities)),
    ),
)

_BY_PLACE = (
    knobs("last tokens are kept", lambda _: {"name": "reverse_order"}, named("order", "random")),
    knobs("first tokens are kept", lambda _: {"name": "order"}, named("reverse_order", "random")),
    knobs(
        "best tokens are kept",
        lambda _: {"name": "score"},
        named("order", "reverse_order", "random"),
    ),
    knobs("random tokens are kept", lambda _: {"name": "random"}, by_place),
    decision("first choices come before second ones", _first_choices_first, by_place),
    result("order by position", "routing.tokens:group_tokens", _rows_by_position, by_place),
)

_RANDOM = (
    argument(
        "random without the layer", "stream", lambda call: (0, call["stream"][1]), named("random")
    ),
    argument(
        "random without the forward", "stream", lambda call: (call["stream"][0], 0), named("random")
    ),
    argument(
        "random of the next forward",
        "stream",
        lambda call: (call["stream"][0], call["stream"][1] + 1),
        named("random"),
    ),
    argument(
        "random of layer and forward swapped",
        "stream",
        lambda call: call["stream"][::-1],
        named("random"),
    ),
    knobs("random without the seed", lambda _: {"seed": 0}, named("random")),
    result(
        "random of tokens",
        _KEY,
        lambda key, *_: key[:, :1].expand_as(key).contiguous(),
        named("random"),
    ),
    result(
        "random of experts",
        _KEY,
        lambda key, *_: key[:1].expand_as(key).contiguous(),
        named("random"),
    ),
    result("random the other way", _KEY, lambda key, *_: 0x7FFFFFFE - key, named("random")),
    result("random of the next token", _KEY, lambda key, *_: key.roll(1, dims=0), named("random")),
    result("random in eight steps", _KEY, lambda key, *_: key >> 28 << 28, named("random")),
)

_IN_EXPANSION = (
    knobs(
        "a token's own top-k are protected",
        lambda _: {"protect_topk": True},
        both(expands, lambda setting: not setting.method.setting("protect_topk")),
    ),
    knobs(
        "a token's own top-k are not protected",
        lambda _: {"protect_topk": False},
        lambda setting: setting.method.setting("protect_topk"),
    ),
    knobs(
        "a token has at most K pairs",
        lambda _: {"max_k": True},
        both(candidates("global", "ranked", "local"), lambda setting: not setting.method.max_k),
    ),
    knobs(
        "a token has more than K pairs",
        lambda _: {"max_k": False},
        lambda setting: setting.method.max_k,
    ),
)

MUTATIONS = (
    *_BY_SCORE,
    *_BY_PLACE,
    *_RANDOM,
    *_IN_EXPANSION,
    outcome("a kept pair and a dropped one are swapped", _swapped, capped),
)
