"""Wrong candidates: of Expanded Drop, and of every method that adds pairs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.routing.decision import keep_within_capacity, score_keys
from capmoe_eval.routing.scores import Assignment, Scores, assignment, ranked_experts, usable
from tests.wrapper.mutations.concerns import (
    adds,
    both,
    candidates,
    expands,
    grouped,
    named,
    neither,
    text_alone,
)
from tests.wrapper.mutations.mutation import (
    Call,
    Decide,
    Mutation,
    argument,
    decision,
    knobs,
    outcome,
    result,
)
from tests.wrapper.mutations.settings import with_knobs

_LOCAL = candidates("local")
_RANKED = candidates("ranked")
_REROUTE = named("token_reroute")


def _ranks(name: str, change: Callable[[Tensor], Tensor]) -> Mutation:
    """Return a mutation of the rank whose experts are a token's candidates."""

    def other(call: Call) -> Any:
        groups = call["groups"]
        return dataclasses.replace(groups, rank_T=change(groups.rank_T))

    return argument(name, "groups", other, _LOCAL)


def _by_rank(name: str, change: Callable[..., Tensor]) -> Mutation:
    """Return a mutation of the experts of each rank […, R, N], from amounts of experts […, E]."""

    def wrap(by_rank: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda amount_E, ranks, placed_RN: change(by_rank, amount_E, ranks, placed_RN)

    return Mutation(name, "routing.placement:by_rank", wrap, _LOCAL)


def _reordered(name: str, change: Callable[[Tensor, int], Tensor], *more: Any) -> Mutation:
    """Return a mutation of the order [T, E] of the experts behind a token's top-k."""

    def other(ranked_TE: Tensor, scores: Scores) -> Tensor:
        top_k = scores.topk_TK.shape[1]
        others_TA = change(ranked_TE[:, top_k:], top_k)
        return torch.cat([ranked_TE[:, :top_k], others_TA], dim=1)

    return result(name, "routing.scores:ranked_experts", other, *more)


def _added_of(keep: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Assignment, Call], Assignment]:
    """Make a change of the added pairs, from those of the top-k that are kept and the added."""

    def change(decided: Assignment, call: Call) -> Assignment:
        top_k = call["scores"].topk_TK.shape[1]
        chosen_TK, added_TA = decided.keep_TS.split(
            [top_k, decided.keep_TS.shape[1] - top_k], dim=1
        )
        keep_TS = torch.cat([chosen_TK, keep(chosen_TK, added_TA)], dim=1)
        return dataclasses.replace(decided, keep_TS=keep_TS)

    return change


def _chosen_always(decided: Assignment, call: Call) -> Assignment:
    keep_TS = decided.keep_TS.clone()
    keep_TS[:, : call["scores"].topk_TK.shape[1]] = True
    return dataclasses.replace(decided, keep_TS=keep_TS)


def _beside_the_capacity(decide: Decide, call: Call) -> Assignment:
    """Let added pairs take no slots of the top-k's capacity."""
    decided = decide(**call)
    top_k = call["scores"].topk_TK.shape[1]
    own = decide(**call | {"method": with_knobs(call["method"], name="score")})
    keep_TS = torch.cat([own.keep_TS, decided.keep_TS[:, top_k:]], dim=1)
    return dataclasses.replace(decided, keep_TS=keep_TS)


def _all_addable(addable_TE: Tensor, scores: Scores) -> Tensor:
    return torch.ones_like(addable_TE)


def _least_k(decided: Assignment, call: Call) -> Assignment:
    """Cut a token to its K worst pairs."""
    everything = call["scores"].score_TE.gather(1, decided.index_TS)
    worst_TS = everything.masked_fill(~decided.keep_TS, torch.inf).argsort(dim=1).argsort(dim=1)
    keep_TS = decided.keep_TS & (worst_TS < call["scores"].topk_TK.shape[1])
    return dataclasses.replace(decided, keep_TS=keep_TS)


def _cut(more: int) -> Callable[[Decide, Call], Assignment]:
    """Cut a token to K pairs and so many more."""

    def change(decide: Decide, call: Call) -> Assignment:
        decided = decide(**call | {"method": with_knobs(call["method"], max_k=False)})
        score_TS = call["scores"].score_TE.gather(1, decided.index_TS)
        place_TS = score_TS.masked_fill(~decided.keep_TS, -1).argsort(dim=1, descending=True)
        keep_TS = decided.keep_TS & (
            place_TS.argsort(dim=1) < call["scores"].topk_TK.shape[1] + more
        )
        return dataclasses.replace(decided, keep_TS=keep_TS)

    return change


def _worst_kept(decide: Decide, call: Call) -> Assignment:
    decided = decide(**call | {"method": with_knobs(call["method"], max_k=False)})
    return _least_k(decided, call)


# Token Reroute.


def _rounds(
    name: str,
    rejected: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda selected, kept, _: (
        selected & ~kept
    ),
    kept_of: Callable[[Tensor, Tensor], Tensor] = lambda _before, kept: kept,
    last: Callable[[Tensor, Tensor], Tensor] = lambda kept, _selected: kept,
    most: Callable[[int], int] = lambda top_k: top_k,
) -> Mutation:
    """Return a mutation of Token Reroute's rounds."""

    def mutated(method: Any, scores: Scores, tokens: Any, layer: Any) -> Assignment:
        ranked_TE = ranked_experts(scores)
        slots = {"index_TS": ranked_TE, "key_TS": score_keys(scores, ranked_TE)}
        keep = functools.partial(keep_within_capacity, method, tokens, layer, n_experts=8, **slots)
        remains_TE = usable(scores).gather(1, ranked_TE)
        before_TE = kept_TE = remains_TE & False
        for _ in range(method.rounds):
            count_TE = remains_TE.cumsum(dim=1)
            selected_TE = remains_TE & (count_TE <= most(scores.topk_TK.shape[1]))
            kept_TE = kept_of(before_TE, keep(valid_TS=selected_TE))
            remains_TE = remains_TE & ~rejected(selected_TE, kept_TE, count_TE)
            before_TE = kept_TE
        kept_TE = last(kept_TE, selected_TE)
        return assignment(scores, torch.empty_like(kept_TE).scatter_(1, ranked_TE, kept_TE))

    target = "routing.methods.token_reroute:TokenReroute.decide"
    return Mutation(name, target, lambda _: mutated, _REROUTE)


def _outside(setting: Any) -> bool:
    return both(adds, text_alone, neither(_LOCAL))(setting)


MUTATIONS: tuple[Mutation, ...] = (
    argument(
        "candidates are outside the eligible groups",
        "scores",
        lambda call: dataclasses.replace(call["scores"], eligible_TE=None),
        both(_outside, lambda s: not s.method.setting("protect_topk")),
        grouped,
    ),
    knobs(
        "nothing is added",
        lambda _: {"name": "score"},
        both(adds, neither(named("oea", "xshare", "macs"))),
    ),
    knobs(
        "candidates are all experts",
        lambda _: {"candidates": "global"},
        candidates("local", "ranked"),
    ),
    knobs(
        "candidates are the next three",
        lambda _: {"candidates": "ranked", "m": 3},
        candidates("local", "global"),
    ),
    knobs(
        "candidates are those of the rank",
        lambda _: {"candidates": "local"},
        candidates("ranked", "global"),
    ),
    knobs("m is one too many", lambda method: {"m": method.m + 1}, _RANKED),
    knobs("m is one too few", lambda method: {"m": method.m - 1}, _RANKED),
    knobs("m counts the top-k, too", lambda _: {"m": 1}, _RANKED),
    _ranks("candidates of the next rank", lambda rank: 1 - rank),
    _ranks("candidates of the first rank", torch.zeros_like),
    _ranks("candidates of the token before", lambda rank: rank.roll(1)),
    _by_rank(
        "candidates alternate between ranks",
        lambda by_rank, expert, ranks, _: by_rank(
            expert.unflatten(-1, (-1, ranks)).transpose(-1, -2).flatten(-2), ranks, None
        ),
    ),
    _by_rank(
        "candidates begin an expert late",
        lambda by_rank, expert, ranks, _: by_rank(expert.roll(-1, dims=-1), ranks, None),
    ),
    _by_rank("a candidate is left out", lambda by_rank, *arguments: by_rank(*arguments)[..., 1:]),
    _reordered(
        "the worst candidates come first",
        lambda others, _: others.flip(1),
        both(adds, candidates("topk", "ranked"), neither(named("macs"))),
    ),
    _reordered(
        "candidates come by number",
        lambda others, _: others.sort(dim=1).values,
        both(candidates("topk", "ranked"), adds, neither(named("macs"))),
    ),
    _reordered(
        "candidates are those of the token before",
        lambda others, _: others.roll(1, dims=0),
        _RANKED,
    ),
    result(
        "a token's own are candidates again",
        "routing.scores:addable",
        _all_addable,
        candidates("local", "global"),
    ),
    outcome(
        "pairs are added to changed tokens alone",
        _added_of(lambda chosen, added: added & ~chosen.all(dim=1, keepdim=True)),
        both(expands, lambda s: not s.method.max_k),
    ),
    outcome(
        "pairs are added to unchanged tokens alone",
        _added_of(lambda chosen, added: added & chosen.all(dim=1, keepdim=True)),
        expands,
    ),
    outcome(
        "one pair is added to a token",
        _added_of(lambda _, added: added & (added.cumsum(dim=1) == 1)),
        candidates("ranked", "global"),
    ),
    outcome(
        "added pairs take the place of lost ones",
        _added_of(
            lambda chosen, added: (
                added & (added.cumsum(dim=1) <= (~chosen).sum(dim=1, keepdim=True))
            )
        ),
        both(expands, lambda s: not s.method.max_k),
    ),
    outcome("a token's own pairs are always kept", _chosen_always, expands),
    decision(
        "added pairs have slots of their own",
        _beside_the_capacity,
        both(expands, lambda s: not s.method.setting("protect_topk")),
    ),
    decision("a token has K + 1 pairs", _cut(1), lambda setting: setting.method.max_k),
    decision("a token has K - 1 pairs", _cut(-1), lambda setting: setting.method.max_k),
    decision("a token has its K worst pairs", _worst_kept, lambda setting: setting.method.max_k),
    knobs("a round too many", lambda method: {"rounds": method.rounds + 1}, _REROUTE),
    knobs("a round too few", lambda method: {"rounds": method.rounds - 1}, _REROUTE),
    knobs("one round", lambda _: {"rounds": 1}, _REROUTE),
    _rounds(
        "rejected pairs are offered again",
        rejected=lambda selected, _kept, _count: selected & False,
    ),
    _rounds("kept pairs are not offered again", rejected=lambda selected, _kept, _count: selected),
    _rounds(
        "rejected pairs are those that were kept", rejected=lambda _selected, kept, _count: kept
    ),
    _rounds(
        "one rejected pair of a token is masked",
        rejected=lambda selected, kept, _: (
            selected & ~kept & ((selected & ~kept).cumsum(dim=1) == 1)
        ),
    ),
    _rounds("kept pairs stay kept", kept_of=lambda before, kept: before | kept),
    _rounds(
        "kept pairs are kept in every round",
        kept_of=lambda before, kept: kept & before if before.any() else kept,
    ),
    _rounds("the last round has no capacity", last=lambda _, selected: selected),
    _rounds("a round offers K + 1 experts", most=lambda top_k: top_k + 1),
    _rounds("a round offers K - 1 experts", most=lambda top_k: top_k - 1),
)
