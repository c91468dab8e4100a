"""Wrong decisions that no single wrong value makes: other rules, other orders, stale results."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.routing.decision import (
    Assignment,
    Scores,
    TokenGroups,
    assignment,
    keep_within_capacity,
    ranked_experts,
    score_keys,
    usable,
)
from tests.wrapper.mutations.mutation import Mutation, Setting, of, of_first_call, with_knobs

Call = Any  # the arguments of a call by name
_KEPT, _SLOTS, _SCORE = "hook.decide->keep_TS", "hook.decide->", "hook.decide(scores.score_TE)"
_GATE, _WEIGHT, _GROUPED = "Gate.scores->", "hook.combine->", of("deepseek_v3")


def _with(**fields: Any) -> Callable[[Setting], Setting]:
    return lambda setting: dataclasses.replace(setting, **fields)


_TIED = _with(tied=True)  # the last router gives all pairs the same score


def _top_k(call: Call) -> int:
    return int(call.scores.topk_TK.shape[1])


def _keeping(decided: Assignment, index_TK: Tensor) -> Assignment:
    """Return the decision that keeps every pair with these experts."""
    keep_TK = torch.ones_like(index_TK, dtype=torch.bool)
    return Assignment(index_TK, keep_TK, details=decided.details)


# Pairs, whatever the method.


def _own(keep_TS: Tensor, call: Call) -> Tensor:
    """Return a mask of the slots of the top-k."""
    return (torch.arange(keep_TS.shape[1]) < _top_k(call)).expand_as(keep_TS)


def _refilled(decided: Assignment, call: Call) -> Assignment:
    """Give every lost pair to the token's next expert, full or not."""
    top_k = _top_k(call)
    next_TK = ranked_experts(call.scores)[:, top_k : 2 * top_k]
    index_TK, keep_TK = decided.index_TS[:, :top_k], decided.keep_TS[:, :top_k]
    return _keeping(decided, index_TK.where(keep_TK, next_TK))


def _served_twice(decided: Assignment, _call: Call) -> Assignment:
    index_TS = decided.index_TS.clone()
    token = int((decided.keep_TS.sum(dim=1) > 1).nonzero()[0])
    first, second = decided.keep_TS[token].nonzero()[:2, 0].tolist()
    index_TS[token, second] = index_TS[token, first]
    return dataclasses.replace(decided, index_TS=index_TS)


def _swapped(decided: Assignment, call: Call) -> Assignment:
    """Keep one pair of an expert in the place of another of the same group."""
    keep_TS = decided.keep_TS.clone()
    first: dict[tuple[int, int, bool], tuple[int, int]] = {}
    for token, group in enumerate(call.groups.group_T.tolist()):
        for slot in range(_top_k(call)):
            expert, is_kept = int(decided.index_TS[token, slot]), bool(keep_TS[token, slot])
            first.setdefault((group, expert, is_kept), (token, slot))
            if (group, expert, not is_kept) in first:
                other = first[group, expert, not is_kept]
                keep_TS[token, slot], keep_TS[other] = not is_kept, is_kept
                return dataclasses.replace(decided, keep_TS=keep_TS)
    return decided


def _second_group_is_stock(keep_TS: Tensor, call: Call) -> Tensor:
    return _own(keep_TS, call).where(call.groups.group_T[:, None] == 1, keep_TS)


def _all_or_none(keep_TS: Tensor, call: Call) -> Tensor:
    return keep_TS & keep_TS[:, : _top_k(call)].all(dim=1)[:, None]


PAIRS = [
    Mutation("no pair is dropped", _KEPT, _own),
    Mutation("lost pairs go to the token's next expert", _SLOTS, _refilled),
    Mutation("an expert serves a token twice", _SLOTS, _served_twice),
    Mutation("a kept pair and a dropped one are swapped", _SLOTS, _swapped),
    Mutation("the second rank is stock", _KEPT, _second_group_is_stock),
    Mutation("a token keeps all pairs or none", _KEPT, _all_or_none),
]

# What the experts are called with.


def _weightless(index: Tensor, weight: Tensor, _counts_N: Tensor, n: int) -> Any:
    weight[int((index < n).any(dim=1).nonzero()[0])] = 0
    return index, weight


_CALLS: dict[str, Callable[..., Any]] = {
    # as commit 606dc1d does
    "dropped slots are sent to expert 0": lambda index, weight, counts_N, n: (
        index.masked_fill((index == n) & counts_N[:, None], 0),
        weight,
    ),
    "pads are routed": lambda index, weight, counts_N, _: (
        index.masked_fill(~counts_N[:, None], 2),
        weight.masked_fill(~counts_N[:, None], 0.1),
    ),
    "dropped slots have a weight": lambda index, weight, _, n: (
        index,
        weight.masked_fill(index == n, 0.1),
    ),
    "weights are a slot away from their experts": lambda index, weight, counts_N, _: (
        index,
        weight.roll(1, dims=1).where(counts_N[:, None], weight),
    ),
    "a token's kept pairs have no weight": _weightless,
}
"""Changes of the experts and the weights [N, S] that are sent to the experts of a layer; they also
get who counts among the rows, and the number of experts."""


def _sent(change: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    def other(output: tuple[Tensor, ...], call: Call) -> tuple[Tensor, ...]:
        logits_NE, weight_NS, index_NS = output
        counts_N = torch.zeros(len(index_NS), dtype=torch.bool)
        counts_N[call.event.groups.rows_T] = True
        layer = call.self.layer
        layer.experts.capmoe_counted = None  # the kernel counts by itself
        changed = change(index_NS.clone(), weight_NS.clone(), counts_N, layer.n_experts)
        return logits_NE, *reversed(changed)

    return other


SENT = [Mutation(name, "LayerHook.sent->", _sent(change)) for name, change in _CALLS.items()]

# The order in which an overloaded expert keeps pairs.


def _first_choices_first(_decided: Assignment, call: Call) -> Assignment:
    """Order pairs as GShard does: those of all tokens' first choices before the second ones."""
    topk_TK = call.scores.topk_TK
    slot_TK = torch.arange(topk_TK.numel()).view(topk_TK.T.shape).T
    if call.method.name == "reverse_order":
        slot_TK = topk_TK.numel() - 1 - slot_TK
    key_TE = torch.zeros_like(call.scores.score_TE)
    key_TE = key_TE.scatter(1, topk_TK, 1 - slot_TK / topk_TK.numel())
    method = with_knobs(call.method, name="score")
    return call.again(scores=Scores(key_TE, topk_TK), method=method)


def _with_bias(scores: Scores, _call: Call) -> Scores:
    biased_TE = scores.ranking_TE - scores.ranking_TE.min()
    return dataclasses.replace(scores, score_TE=biased_TE, choice_TE=scores.ranking_TE)


ORDERS = [
    Mutation("scores have the router's bias", "hook.decide(scores)", _with_bias, _GROUPED),
    Mutation("first choices come before second ones", _SLOTS, _first_choices_first),
    Mutation(
        "tokens' ties are broken the other way",
        _SCORE,
        lambda score_TE, _: score_TE + 1e-6 * torch.arange(len(score_TE))[:, None],
        _TIED,
    ),
    Mutation(
        "experts' ties are broken the other way",
        _SCORE,
        lambda score_TE, _: score_TE + 1e-6 * torch.arange(8),
        _TIED,
    ),
    Mutation("random without the layer", "hook.decide(stream)", lambda stream, _: (0, stream[1])),
    Mutation("random without the forward", "hook.decide(stream)", lambda stream, _: (stream[0], 0)),
]

# Capacities, groups and devices.


def _exact(setting: Setting) -> Setting:
    """Return a setting in which γ·T·K/E is whole, and above that in binary fractions."""
    return dataclasses.replace(setting, lengths=((10,) * 5,)).under(gamma=0.8)


def _in_floats(_limit: int, call: Call) -> int:
    return math.ceil(call.gamma * call.top_k / call.n_experts * call.experts * call.tokens)


def regrouped(group_T: Tensor, groups: TokenGroups, n_groups: int) -> TokenGroups:
    tokens = torch.bincount(group_T, minlength=n_groups).tolist()
    return dataclasses.replace(groups, group_T=group_T, tokens=tuple(tokens))


def _grouped(name: str, group_of: Callable[..., Tensor], n_groups: int = 0) -> Mutation:
    """Return a mutation by which tokens have other groups, and ranks where there are as many.

    ``group_of`` gets the sequence of each token and the number of sequences. 0 groups are as many
    as sequences.
    """

    def change(true: TokenGroups, call: Call) -> TokenGroups:
        n_sequences, width = call.counted_BS.shape
        group_T = group_of(true.rows_T // width, n_sequences)
        other = regrouped(group_T, true, n_groups or n_sequences)
        return dataclasses.replace(other, rank_T=group_T) if n_groups == call.ep_size else other

    return Mutation(name, "group_tokens->", change)


CAPACITIES = [
    Mutation("γ is a binary fraction", "capacity->", _in_floats, _exact),
    Mutation(
        "a device has the rounded C of each expert",
        "capacity->",
        lambda limit, call: call.experts * -(-limit // call.experts),
    ),
    of_first_call("Method.limits"),
    Mutation(
        "a layer has the γ of another",
        "Method.of_layer(number)",
        lambda number, _: 1 - number,
        lambda setting: setting.under(gamma=(0.5, 1.0)),
    ),
    _grouped("groups by sequence", lambda b, _: b),
    _grouped("the ranks have ⌊B/R⌋ sequences", lambda b, n: (b // (n // 2)).clamp_max(1), 2),
    of_first_call("group_tokens"),
    Mutation(
        "experts alternate between devices",
        "rank_of->",
        lambda _, call: call.expert % (8 // call.local),
    ),
]

# Forwards and layers.


def _stock_where(name: str, holds: Callable[[Call], bool], **fields: Any) -> Mutation:
    """Leave some layers or forwards without the method."""

    def change(decided: Assignment, call: Call) -> Assignment:
        return _keeping(decided, call.scores.topk_TK) if holds(call) else decided

    return Mutation(name, _SLOTS, change, _with(**fields))


def _remembered(_decided: Assignment, call: Call) -> Assignment:
    """Decide again as in the first forward of a layer."""
    first = call.memory.setdefault(call.stream[0], call.scores)
    alike = len(first.topk_TK) == len(call.scores.topk_TK)
    return call.again(scores=first if alike else call.scores)


FORWARDS = [
    Mutation("decided by the scores of the first forward", _SLOTS, _remembered),
    Mutation(
        "the second forward counts as a decode step",
        "ForwardPlan.__init__(decode)",
        lambda _, call: call.number == 1,
    ),
    _stock_where("the first layer is stock", lambda call: call.stream[0] == 0),
    _stock_where("the second forward is stock", lambda call: call.stream[1] == 1),
    _stock_where(
        "a large batch is stock",
        lambda call: len(call.scores.topk_TK) > 100,
        lengths=((40, 40, 39, 40, 40),),
    ),
    Mutation(
        "pads do not count where they must",
        "group_tokens(counted_BS)",
        lambda mask, _: mask & (torch.arange(mask.shape[1]) < mask.shape[1] - 2),
        lambda setting: setting.under(count_padding=True),
    ),
    Mutation(
        "rows are shifted by one",
        "group_tokens->rows_T",
        lambda rows_T, call: (rows_T + 1) % call.counted_BS.numel(),
    ),
    Mutation("a gate has no groups", "Gate.scores->eligible_TE", lambda *_: None, _GROUPED),
    Mutation(
        "a gate has a bias too many",
        _GATE,
        lambda scores, _: dataclasses.replace(
            scores, choice_TE=scores.ranking_TE + torch.arange(8) / 8
        ),
    ),
]

# Candidates.


def _behind(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Call], Tensor]:
    """Change the order [T, E] of the experts behind a token's top-k."""

    def other(ranked_TE: Tensor, call: Call) -> Tensor:
        top_k = _top_k(call)
        return torch.cat([ranked_TE[:, :top_k], change(ranked_TE[:, top_k:])], dim=1)

    return other


def _to_unchanged(keep_TS: Tensor, call: Call) -> Tensor:
    """Add pairs to the tokens that keep their top-k."""
    chosen_TK, added_TA = keep_TS.tensor_split([_top_k(call)], dim=1)
    return torch.cat([chosen_TK, added_TA & chosen_TK.all(dim=1, keepdim=True)], dim=1)


def _beside_the_capacity(decided: Assignment, call: Call) -> Assignment:
    """Let added pairs take no slots of the top-k's capacity."""
    original = call.again(method=with_knobs(call.method, name="score"))
    keep_TS = torch.cat([original.keep_TS, decided.keep_TS[:, _top_k(call) :]], dim=1)
    return dataclasses.replace(decided, keep_TS=keep_TS)


def _cut(name: str, more: int, *, worst: bool = False) -> Mutation:
    """Cut a token to its K best or worst pairs, and so many more."""

    def change(_decided: Assignment, call: Call) -> Assignment:
        decided = call.again(method=with_knobs(call.method, max_k=False))
        score_TS = call.scores.score_TE.gather(1, decided.index_TS)
        score_TS = (score_TS if worst else -score_TS).masked_fill(~decided.keep_TS, torch.inf)
        is_first_TS = score_TS.argsort(dim=1).argsort(dim=1) < _top_k(call) + more
        return dataclasses.replace(decided, keep_TS=decided.keep_TS & is_first_TS)

    return Mutation(name, _SLOTS, change)


CANDIDATES = [
    Mutation(
        "candidates are outside the eligible groups",
        "hook.decide(scores.eligible_TE)",
        lambda *_: None,
        _GROUPED,
    ),
    Mutation(
        "the worst candidates come first",
        "ranked_experts->",
        _behind(lambda others: others.flip(1)),
    ),
    Mutation("pairs are added to unchanged tokens alone", _KEPT, _to_unchanged),
    Mutation("added pairs have slots of their own", _SLOTS, _beside_the_capacity),
    _cut("a token has K + 1 pairs", 1),
    _cut("a token has its K worst pairs", 0, worst=True),
]


def _rounds(
    name: str,
    rejected: Callable[..., Tensor] = lambda selected, kept: selected & ~kept,
    last: Callable[[Tensor, Tensor], Tensor] = lambda kept, _selected: kept,
) -> Mutation:
    """Return a mutation of Token Reroute's rounds."""

    def change(_decided: Assignment, call: Call) -> Assignment:
        scores, ranked_TE = call.scores, ranked_experts(call.scores)
        slots = {"index_TS": ranked_TE, "key_TS": score_keys(scores, ranked_TE), "n_experts": 8}
        remains_TE = usable(scores).gather(1, ranked_TE)
        for _ in range(call.self.rounds):
            selected_TE = remains_TE & (remains_TE.cumsum(dim=1) <= _top_k(call))
            kept_TE = keep_within_capacity(
                call.self, call.tokens, call.layer, valid_TS=selected_TE, **slots
            )
            remains_TE = remains_TE & ~rejected(selected_TE, kept_TE)
        kept_TE = last(kept_TE, selected_TE)
        return assignment(scores, torch.empty_like(kept_TE).scatter_(1, ranked_TE, kept_TE))

    return Mutation(name, "TokenReroute.decide->", change)


ROUNDS = [
    _rounds("rejected pairs are offered again", rejected=lambda selected, _: selected & False),
    _rounds("kept pairs are not offered again", rejected=lambda selected, _: selected),
    _rounds("the last round has no capacity", last=lambda _, selected: selected),
]

# Weights.


def _over_kept(weight_TS: Tensor, call: Call) -> Tensor:
    """Divide by the sum over the kept pairs."""
    kept_TS = weight_TS * call.assignment.keep_TS
    return weight_TS / kept_TS.sum(dim=1, keepdim=True).clamp_min(1e-9)


def over_topk(_weight_TS: Tensor, call: Call) -> Tensor:
    return call.layer.gate.weights(call.scores, call.assignment.index_TS)


def _of_added(weight_TS: Tensor, call: Call, other_TS: Tensor) -> Tensor:
    """Take other weights for added pairs."""
    top_k = call.weight_TK.shape[1]
    return torch.cat([weight_TS[:, :top_k], other_TS[:, top_k:]], dim=1)


def _one_pair(weight_TS: Tensor, call: Call) -> Tensor:
    weight_TS = weight_TS.clone()
    weight_TS[tuple(call.assignment.keep_TS.nonzero()[-1].tolist())] *= 1.01
    return weight_TS


WEIGHTS = [
    Mutation("weights are normalised over the kept pairs", _WEIGHT, _over_kept),
    Mutation(
        "weights are normalised over the kept pairs where they are over the top-k",
        _WEIGHT,
        _over_kept,
        of("olmoe_normalised"),
    ),
    Mutation(
        "weights are normalised over the top-k where they are over the kept pairs",
        _WEIGHT,
        over_topk,
        of("olmoe_normalised", renormalize="after"),
    ),
    Mutation("one pair has a hundredth too much", _WEIGHT, _one_pair),
    Mutation("added pairs weigh nothing", _WEIGHT, lambda w, c: _of_added(w, c, 0 * w)),
    Mutation(
        "the family's scale is left out of added pairs",
        _WEIGHT,
        lambda w, c: _of_added(w, c, w / c.layer.gate.scale),
        _GROUPED,
    ),
]

# Experts of a whole batch.

DISABLED = [
    Mutation(
        "ties of load go to the last expert",
        "disabled_experts->",
        lambda _, call: torch.arange(8) == 7 - call.load_E.flip(0).argsort(stable=True)[0],
        _with(lengths=((2, 2, 3),)),
    ),
    of_first_call("disabled_experts"),
]

MUTATIONS: list[Mutation] = [
    *(*PAIRS, *SENT, *ORDERS, *CAPACITIES, *FORWARDS),
    *(*CANDIDATES, *ROUNDS, *WEIGHTS, *DISABLED),
]
