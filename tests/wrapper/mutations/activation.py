"""Wrong experts for a whole batch: Expert Drop, OEA, XShare and SERE."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.routing.scores import Assignment, Scores, assignment, ranked_experts, usable
from tests.wrapper.mutations.concerns import both, chooses_a_set, grouped, named, tied
from tests.wrapper.mutations.mutation import (
    Call,
    Decide,
    Mutation,
    argument,
    decision,
    knobs,
    of_first_call,
    outcome,
    result,
)
from tests.wrapper.mutations.settings import Setting

_EXPERT_DROP = named("expert_drop")
_OEA = named("oea")
_XSHARE = named("xshare")
_SERE = named("sere")
_IDLE = "routing.methods.expert_drop:disabled_experts"
_WITHIN = "extensions.batch_demand:assign_within"
_DEMAND = "extensions.batch_demand:batch_demand"


# Expert Drop.


def _idle(name: str, choose: Callable[[Tensor], Tensor], *more: Any) -> Mutation:
    """Return a mutation of the silenced experts, chosen by the loads [E]."""

    def mutated(load_E: Tensor) -> Tensor:
        return torch.zeros_like(load_E, dtype=torch.bool).index_fill(0, choose(load_E), True)

    return Mutation(name, _IDLE, lambda _: mutated, *more or (_EXPERT_DROP,))


def _by_load(name: str, load: Callable[[Call], Tensor], *more: Any) -> Mutation:
    """Return a mutation by which the expert with the lowest of other loads is silenced."""

    def change(_decide: Decide, call: Call) -> Assignment:
        topk_TK = call["scores"].topk_TK
        silent = load(call).argsort(stable=True)[0]
        return Assignment(topk_TK, topk_TK != silent)

    return decision(name, change, *more or (_EXPERT_DROP,))


def _loads(call: Call, of: slice = slice(None)) -> Tensor:
    scores = call["scores"]
    return torch.bincount(scores.topk_TK[of].flatten(), minlength=scores.score_TE.shape[1])


def _weighed(call: Call) -> Tensor:
    scores = call["scores"]
    return scores.score_TE.new_zeros(scores.score_TE.shape[1]).scatter_add(
        0, scores.topk_TK.flatten(), scores.score_TE.gather(1, scores.topk_TK).flatten()
    )


def _of_tied_loads(setting: Setting) -> Setting:
    """Return a setting in which the lowest load is that of two experts."""
    return dataclasses.replace(setting, lengths=((2, 2, 3),))


def _by_half(decide: Decide, call: Call) -> Assignment:
    """Silence an expert in each half of the batch, the one that is idle there."""
    topk_TK = call["scores"].topk_TK
    half = len(topk_TK) // 2
    silent = [
        _loads(call, part).argsort(stable=True)[0] for part in (slice(half), slice(half, None))
    ]
    keep_TK = torch.cat([topk_TK[:half] != silent[0], topk_TK[half:] != silent[1]])
    return Assignment(topk_TK, keep_TK)


def _silent_rerouted(decided: Assignment, call: Call) -> Assignment:
    """Send what the silenced expert loses to each token's next expert."""
    scores, top_k = call["scores"], call["scores"].topk_TK.shape[1]
    keep_TE = torch.zeros_like(scores.score_TE, dtype=torch.bool)
    silent = decided.index_TS[~decided.keep_TS][0]
    ranked_TE = ranked_experts(scores)
    usable_TE = ranked_TE != silent
    best_TE = usable_TE & (usable_TE.cumsum(dim=1) <= top_k)
    return assignment(scores, keep_TE.scatter(1, ranked_TE, best_TE))


_OF_EXPERT_DROP = (
    _idle("the busiest expert is silent", lambda load: load.argsort(descending=True)[:1]),
    _idle("two experts are silent", lambda load: load.argsort(stable=True)[:2]),
    _idle("no expert is silent", lambda load: load.argsort()[:0]),
    _idle("the second idlest expert is silent", lambda load: load.argsort(stable=True)[1:2]),
    _idle(
        "an expert of median load is silent",
        lambda load: load.argsort(stable=True)[len(load) // 2][None],
    ),
    _idle("the first expert is silent", lambda load: 0 * load[:1]),
    _idle("the last expert is silent", lambda load: 0 * load[:1] + len(load) - 1),
    _idle(
        "the expert behind the idlest is silent",
        lambda load: (load.argsort(stable=True)[:1] + 1) % len(load),
    ),
    _idle(
        "ties of load go to the last expert",
        lambda load: (len(load) - 1 - load.flip(0).argsort(stable=True))[:1],
        _EXPERT_DROP,
        _of_tied_loads,
    ),
    _idle(
        "a fifth of the experts is silent",
        lambda load: load.argsort(stable=True)[: -(-len(load) // 5)],
    ),
    _by_load("the idlest expert of the first half is silent", lambda call: _loads(call, slice(23))),
    _by_load(
        "the idlest expert of the last tokens is silent",
        lambda call: _loads(call, slice(-12, None)),
    ),
    _by_load(
        "the idlest expert of first choices is silent",
        lambda call: torch.bincount(call["scores"].topk_TK[:, 0], minlength=8),
    ),
    _by_load("the expert with the lowest weights is silent", _weighed),
    _by_load(
        "the expert with the lowest scores is silent",
        lambda call: call["scores"].score_TE.sum(dim=0),
    ),
    _by_load(
        "the expert with the lowest best score is silent",
        lambda call: call["scores"].score_TE.amax(dim=0),
    ),
    decision("an expert of each half is silent", _by_half, _EXPERT_DROP),
    of_first_call(
        "the expert of the first forward is silent", _IDLE, lambda first, _: first, _EXPERT_DROP
    ),
    outcome("what a silent expert loses is rerouted", _silent_rerouted, _EXPERT_DROP),
)


# Sets of experts.


def _set(name: str, change: Callable[[Tensor], Tensor], *more: Any) -> Mutation:
    """Return a mutation of the set [E] that the batch may use."""

    def wrap(assign_within: Decide) -> Decide:
        return lambda scores, set_E: assign_within(scores, change(set_E))

    return Mutation(name, _WITHIN, wrap, *more or (chooses_a_set,))


def _of_first_layer(assign_within: Decide) -> Decide:
    sets: list[Tensor] = []

    def mutated(scores: Scores, set_E: Tensor) -> Assignment:
        sets.append(set_E)
        return assign_within(scores, sets[0])

    return mutated


def _demand(name: str, change: Callable[[Tensor, Scores, int], Tensor], *more: Any) -> Mutation:
    """Return a mutation of the demand [2, E] that the set is chosen by."""
    return result(name, _DEMAND, change, *more or (chooses_a_set,))


def _without_one(set_E: Tensor, place: int) -> Tensor:
    set_E = set_E.clone()
    set_E[set_E.nonzero()[place]] = False
    return set_E


def _with_one(set_E: Tensor) -> Tensor:
    set_E = set_E.clone()
    set_E[(~set_E).nonzero()[0]] = True
    return set_E


def _of_tokens(name: str, tokens: slice, *more: Any) -> Mutation:
    """Return a mutation of the demand that is of some tokens alone."""

    def wrap(batch_demand: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def mutated(scores: Scores, k0: int) -> Tensor:
            some = {
                field.name: None if value is None else value[tokens]
                for field in dataclasses.fields(scores)
                for value in [getattr(scores, field.name)]
            }
            return batch_demand(Scores(**some), k0)

        return mutated

    return Mutation(name, _DEMAND, wrap, *more or (chooses_a_set,))


def _worth(name: str, worth: Callable[[Scores], Tensor], *more: Any) -> Mutation:
    """Return a mutation of what XShare's experts are worth."""

    def change(demand_2E: Tensor, scores: Scores, _: int) -> Tensor:
        worth_E = (worth(scores).double() * 2**20).long()
        return torch.stack([demand_2E[0], worth_E])

    return _demand(name, change, *more or (_XSHARE,))


def _within(name: str, choose: Callable[[Tensor, Tensor, Scores], Tensor], *more: Any) -> Mutation:
    """Return a mutation of a token's experts [T, E] within the set.

    ``choose`` gets the usable experts in the token's order, these experts, and the scores.
    """

    def mutated(scores: Scores, set_E: Tensor) -> Assignment:
        ranked_TE = ranked_experts(scores)
        usable_TE = (usable(scores) & set_E).gather(1, ranked_TE)
        keep_TE = choose(usable_TE, ranked_TE, scores)
        return assignment(scores, torch.empty_like(keep_TE).scatter_(1, ranked_TE, keep_TE))

    return Mutation(name, _WITHIN, lambda _: mutated, *more or (chooses_a_set,))


def _first(usable_TE: Tensor, count: int) -> Tensor:
    return usable_TE & (usable_TE.cumsum(dim=1) <= count)


def _by_number(usable_TE: Tensor, ranked_TE: Tensor, scores: Scores) -> Tensor:
    """Take a token's experts by their number."""
    by_number_TE = usable_TE.gather(1, ranked_TE.argsort(dim=1))
    return _first(by_number_TE, scores.topk_TK.shape[1]).gather(1, ranked_TE)


def _half_budget(method: Any) -> dict[str, Any]:
    return {"expert_budget": method.expert_budget - 0.125}


_OF_SETS = (
    _set("the set lacks its first expert", lambda set_E: _without_one(set_E, 0)),
    _set("the set lacks its last expert", lambda set_E: _without_one(set_E, -1)),
    _set("the set has an expert more", _with_one),
    _set("the set is what it is not", lambda set_E: ~set_E),
    _set("the set has all experts", torch.ones_like),
    _set("the set has no experts", torch.zeros_like),
    _set("the set is shifted by an expert", lambda set_E: set_E.roll(1)),
    _set("the set is mirrored", lambda set_E: set_E.flip(0)),
    Mutation("the set is that of the first layer", _WITHIN, _of_first_layer, chooses_a_set),
    of_first_call(
        "the demand is that of the first layer", _DEMAND, lambda first, _: first, chooses_a_set
    ),
    of_first_call(
        "the demand is added up over layers",
        _DEMAND,
        lambda first, present: first + present if first is not present else present,
        _OEA,
    ),
    _of_tokens("the demand is of the first token", slice(1)),
    _of_tokens("the demand is of the first tokens", slice(4)),
    _of_tokens("the demand is of all tokens but the last", slice(-1), _OEA),
    _of_tokens("the demand is of the last tokens", slice(-4, None)),
    _demand(
        "the demand is a majority's",
        lambda d, s, _: torch.stack(
            [(torch.bincount(s.topk_TK[:, 0], minlength=d.shape[1]) > 1).long(), d[1]]
        ),
        _OEA,
    ),
    _demand(
        "the demand is for the worst experts",
        lambda d, s, _: torch.stack(
            [torch.bincount(s.score_TE.argmin(dim=1), minlength=d.shape[1]), d[1]]
        ),
        _OEA,
    ),
    _demand(
        "the demand is for a token's last choice",
        lambda d, s, _: torch.stack([torch.bincount(s.topk_TK[:, -1], minlength=d.shape[1]), d[1]]),
        _OEA,
    ),
    knobs(
        "k0 is one too many",
        lambda method: {"k0": method.k0 + 1},
        both(chooses_a_set, lambda s: s.method.name == "oea" or s.method.granularity == "device"),
    ),
    knobs("k0 is two too many", lambda method: {"k0": method.k0 + 2}, _OEA),
    _within(
        "no expert is added",
        lambda usable, ranked, s: _first(usable, 8) & (torch.arange(8) < s.topk_TK.shape[1]),
    ),
    _within(
        "a token has K + 1 experts", lambda usable, _, s: _first(usable, s.topk_TK.shape[1] + 1)
    ),
    _within(
        "a token has K - 1 experts", lambda usable, _, s: _first(usable, s.topk_TK.shape[1] - 1)
    ),
    _within("a token has all experts of the set", lambda usable, *_: usable),
    _within("a token has one expert", lambda usable, *_: _first(usable, 1)),
    _within("a token has the set's experts by number", _by_number),
    _within(
        "a token has its worst experts of the set",
        lambda usable, _, s: _first(usable.flip(1), s.topk_TK.shape[1]).flip(1),
    ),
    _within(
        "a token's own are all kept",
        lambda usable, _, s: (
            _first(usable, s.topk_TK.shape[1]) | (torch.arange(8) < s.topk_TK.shape[1])
        ),
    ),
)

_OF_XSHARE = (
    result(
        "the budget is an expert too large",
        "extensions.xshare.decision:activation_budget",
        lambda n, *_: n + 1,
        _XSHARE,
    ),
    result(
        "the budget is an expert too small",
        "extensions.xshare.decision:activation_budget",
        lambda n, *_: n - 1,
        _XSHARE,
    ),
    knobs("the budget is read an expert too small", _half_budget, _XSHARE),
    Mutation(
        "the budget is rounded down",
        "extensions.xshare.decision:activation_budget",
        lambda _: lambda method, n: int(method.expert_budget * n / method.ep_size),
        _XSHARE,
    ),
    _worth(
        "an expert is worth its tokens", lambda s: torch.bincount(s.topk_TK.flatten(), minlength=8)
    ),
    _worth("an expert is worth its best score", lambda s: s.score_TE.amax(dim=0)),
    _worth(
        "an expert is worth its first choices",
        lambda s: torch.bincount(s.topk_TK[:, 0], minlength=8),
    ),
    _worth("the worst experts come first", lambda s: 10 - s.score_TE.sum(dim=0)),
    _worth("an expert is worth the first token's score", lambda s: s.score_TE[0]),
    _worth(
        "an expert is worth its choice with the bias",
        lambda s: s.ranking_TE.sum(dim=0),
        _XSHARE,
        grouped,
    ),
    _worth(
        "ties of worth go to the last expert",
        lambda s: s.score_TE.sum(dim=0) + 1e-4 * torch.arange(8),
        _XSHARE,
        tied,
    ),
    knobs(
        "the budget is each rank's",
        lambda _: {"granularity": "device", "ep_size": 2},
        both(_XSHARE, lambda s: s.method.granularity == "expert"),
    ),
    knobs(
        "the budget is the whole batch's",
        lambda _: {"granularity": "expert"},
        both(_XSHARE, lambda s: s.method.granularity == "device"),
    ),
    Mutation(
        "a budget's experts alternate",
        "routing.placement:by_rank",
        lambda by_rank: (
            lambda amount, ranks, _: by_rank(
                amount.unflatten(-1, (-1, ranks)).transpose(-1, -2).flatten(-2), ranks, None
            )
        ),
        both(_XSHARE, lambda s: s.method.granularity == "device"),
    ),
)


# SERE.


def _similarity(name: str, change: Callable[[Tensor, Call], Tensor], *more: Any) -> Mutation:
    return argument(
        name, "calibrated", lambda call: change(call["calibrated"], call), *more or (_SERE,)
    )


def _served(name: str, change: Callable[..., Tensor], *more: Any) -> Mutation:
    """Return a mutation of the experts [E] that serve the tokens of each."""
    return result(name, "extensions.sere.decision:substitutes", change, *more or (_SERE,))


def _threshold(name: str, min_similarity: float) -> Mutation:
    def wrap(substitutes: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda primary_E, similarity_EE, _: substitutes(
            primary_E, similarity_EE, min_similarity
        )

    return Mutation(name, "extensions.sere.decision:substitutes", wrap, _SERE)


def _primary(name: str, change: Callable[[Tensor], Tensor]) -> Mutation:
    def wrap(substitutes: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda primary_E, *more: substitutes(change(primary_E), *more)

    return Mutation(name, "extensions.sere.decision:substitutes", wrap, _SERE)


def _to_any(_served_E: Tensor, primary_E: Tensor, similarity_EE: Tensor, least: float) -> Tensor:
    """Serve by the most similar expert, primary or not."""
    others_EE = similarity_EE.clone().fill_diagonal_(-1)
    same_E = torch.arange(len(primary_E))
    return others_EE.argmax(dim=1).where(~primary_E & (others_EE.amax(dim=1) >= least), same_E)


def _all_moved(_served_E: Tensor, primary_E: Tensor, similarity_EE: Tensor, _: float) -> Tensor:
    """Move the tokens of primary experts, too."""
    others_EE = similarity_EE.clone().fill_diagonal_(-1).masked_fill(~primary_E, -1)
    return others_EE.argmax(dim=1)


def _last_of_ties(
    _served_E: Tensor, primary_E: Tensor, similarity_EE: Tensor, least: float
) -> Tensor:
    to_primary_EE = similarity_EE.masked_fill(~primary_E, -1)
    last_E = len(primary_E) - 1 - to_primary_EE.flip(1).argmax(dim=1)
    moved_E = ~primary_E & (to_primary_EE.amax(dim=1) >= least)
    return last_E.where(moved_E, torch.arange(len(primary_E)))


def _moved_dropped(decided: Assignment, call: Call) -> Assignment:
    top_k = call["scores"].topk_TK.shape[1]
    keep_TS = decided.keep_TS & (torch.arange(2 * top_k) < top_k)
    return dataclasses.replace(decided, keep_TS=keep_TS)


def _moved_to_first(served_E: Tensor, primary_E: Tensor, *_: Any) -> Tensor:
    first = primary_E.long().argmax()
    return first.where(served_E != torch.arange(len(served_E)), served_E)


def _coarse(setting: Setting) -> Setting:
    return dataclasses.replace(setting, coarse=True).under(min_similarity=0.6)


def _one_moved(served_E: Tensor, *_: Any) -> Tensor:
    """Move the tokens of the first replaced expert alone."""
    same_E = torch.arange(len(served_E))
    is_moved_E = served_E != same_E
    return served_E.where(is_moved_E & (is_moved_E.cumsum(dim=0) == 1), same_E)


_OF_SERE = (
    _similarity("the least similar expert serves", lambda similarity, _: 1 - similarity),
    _similarity(
        "similarities are those of the next expert",
        lambda similarity, _: similarity.roll(1, dims=1),
    ),
    _similarity("similarities are of experts in reverse", lambda similarity, _: similarity.flip(0)),
    of_first_call(
        "similarities are those of the first layer",
        "wrapper.hook:LayerHook._calibrated_on",
        lambda first, _: first,
        _SERE,
    ),
    _threshold("the threshold is ignored", 0.0),
    _threshold("the threshold is too high", 0.75),
    _threshold("the threshold is never reached", 1.1),
    Mutation(
        "the threshold itself is not enough",
        "extensions.sere.decision:substitutes",
        lambda f: lambda p, s, least: f(p, s, least + 1e-6),
        _SERE,
        _coarse,
    ),
    _primary("all experts are primary", torch.ones_like),
    _primary(
        "the first primary expert is none", lambda primary: primary & (primary.cumsum(dim=0) > 1)
    ),
    _primary("primary experts are shifted", lambda primary: primary.roll(1)),
    _primary("primary experts are the others", lambda primary: ~primary),
    knobs("k0 is one too many", lambda method: {"k0": method.k0 + 1}, _SERE),
    knobs("all own experts are primary", lambda _: {"k0": 3}, _SERE),
    _of_tokens("primary experts are the first token's", slice(1), _SERE),
    _of_tokens("primary experts are the first half's", slice(4), _SERE),
    of_first_call(
        "primary experts are those of the first layer", _DEMAND, lambda first, _: first, _SERE
    ),
    _served("an expert that is not primary serves", _to_any),
    _served("tokens of primary experts move, too", _all_moved),
    _served("the first primary expert serves", _moved_to_first),
    _served("one expert is replaced", _one_moved),
    _served("the server is shifted by an expert", lambda served, *_: (served + 1) % len(served)),
    _served("of equal experts the last serves", _last_of_ties, _SERE, _coarse),
    outcome("moved pairs are dropped", _moved_dropped, _SERE),
)


MUTATIONS: tuple[Mutation, ...] = (*_OF_EXPERT_DROP, *_OF_SETS, *_OF_XSHARE, *_OF_SERE)
