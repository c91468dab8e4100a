"""Assign tokens to experts from router scores, under any method.

All methods take one path: list the candidate pairs, give each an integer *key* (smaller is kept
first), keep the C smallest of every bucket. A bucket is (capacity group, expert) or (capacity
group, device). The highest bit of a key is set for the modality that is dropped first, the next for
added candidates where the top-k are protected. Nothing loops over tokens or experts, and ties are
always broken the same way: the lower token index first, then the lower expert index.
:mod:`capmoe_eval.routing.reference` defines the same with loops.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from capmoe_eval.routing.activation import (
    assign_within,
    batch_demand,
    expert_set,
    reroute,
    substitutes,
)
from capmoe_eval.routing.capacity import capacity, experts_per_rank
from capmoe_eval.routing.groups import TokenGroups, moved
from capmoe_eval.routing.homes import by_rank, rank_of
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.scores import (
    HIGHEST,
    Assignment,
    Scores,
    addable,
    assignment,
    ranked_experts,
    score_bits,
    usable,
)
from capmoe_eval.routing.weighted import Weighted, assign_weighted, weigh

# Shape suffixes: T counted tokens, E routed experts, K = top-k, A slots added to the top-k,
# S = K + A slots per token, G capacity groups, D devices (ranks), P pairs.

_ADDED = 1 << 31  # above every score
_DROPPED_FIRST = 1 << 32  # above the bit of added candidates
_KEY_BITS = 33  # a key is below 2^33, so bucket·2^33 + key orders buckets first


def bucket_limits(
    method: Method,
    groups: TokenGroups,
    *,
    top_k: int,
    n_experts: int,
    gamma: float | None = None,
) -> list[int]:
    """Return the capacity of an expert (or of a device) in each capacity group [G].

    It is computed at the method's own γ, which it must have, unless ``gamma`` says another.
    """
    gamma = method.gamma if gamma is None else gamma
    assert gamma is not None
    sharing = experts_per_rank(n_experts, method.ep_size) if method.granularity == "device" else 1
    return [
        capacity(gamma, tokens, top_k, n_experts, rounding=method.rounding, experts=sharing)
        for tokens in groups.tokens
    ]


def assign(
    scores: Scores,
    method: Method,
    groups: TokenGroups,
    *,
    image_T: Tensor | None = None,
    stream: tuple[int, int] = (0, 0),
    counts: Tensor | None = None,
    calibrated: Tensor | None = None,
    weighted: Weighted | None = None,
) -> Assignment:
    """Decide which (token, expert) pairs of the T counted tokens are kept.

    Sources: Token Drop and its metrics, paper §4 and Equations 7-10; Expanded Drop, Algorithm 2;
    device-level capacity, §5.2; modalities, §5.3; Expert Drop, Table 2; Token Reroute, v1
    Algorithm 1; OEA, XShare and SERE, :mod:`capmoe_eval.routing.activation`; MACS,
    :mod:`capmoe_eval.routing.weighted`. Unlike Equation 9, whose threshold keeps all ties, no bound
    is ever exceeded.

    Args:
        scores: The router's scores, and its own top-k.
        method: The method, with a γ where it has a capacity.
        groups: The capacity groups.
        image_T: True for the tokens of an image; None where there are none.
        stream: Layer and forward number, which with the method's seed determine ``random``.
        counts: The :func:`batch_counts` of all processes, where ``scores`` are of one of several.
        calibrated: Of a calibration: for SERE the experts' similarity [E, E], from 0 to 1; with
            another placement than blocks the experts of each rank [R, E/R], rising.
        weighted: For MACS. Without them every token weighs 1, and no expert is of a modality.

    Raises:
        UsageError: If E cannot be spread evenly over ``method.ep_size`` ranks.
    """
    experts_per_rank(scores.score_TE.shape[1], method.ep_size)
    placed_RN = calibrated if method.is_placed else None
    assert method.is_placed == (placed_RN is not None)
    if method.is_stock:
        return Assignment(scores.topk_TK, torch.ones_like(scores.topk_TK, dtype=torch.bool))
    if method.decides_by_batch:
        counts = batch_counts(scores, method) if counts is None else counts
        if method.name == "expert_drop":
            silent_E = torch.zeros_like(counts, dtype=torch.bool)
            silent_E[idle_experts(counts)] = True
            return Assignment(scores.topk_TK, ~silent_E[scores.topk_TK])
        if method.name == "sere":
            assert calibrated is not None
            return reroute(scores, substitutes(counts[0] > 0, calibrated, method.min_similarity))
        return assign_within(scores, expert_set(counts, method, placed_RN))
    if method.weighs_tokens:
        if weighted is None:
            weighted = weigh(
                method,
                groups,
                bias_E=groups.group_T.new_zeros(scores.score_TE.shape[1]),
                top_k=scores.topk_TK.shape[1],
            )
        return assign_weighted(scores, method, groups, weighted)
    keeper = _Keeper(scores, method, groups, stream, image_T, placed_RN)
    if method.name == "token_reroute":
        return _reroute(scores, method, keeper)
    index_TS, valid_TS = _candidates(scores, method, groups, placed_RN)
    keep_TS = keeper.keep(index_TS, valid_TS)
    if method.max_k:
        keep_TS = _at_most_k(scores, method, index_TS, keep_TS)
    return Assignment(index_TS, keep_TS)


def batch_counts(scores: Scores, method: Method) -> Tensor:
    """Return what a method that decides by the batch must know of it, as whole numbers […, E].

    Processes that share a batch add theirs.
    """
    if method.name == "expert_drop":
        return expert_load(scores.topk_TK, scores.score_TE.shape[1])
    return batch_demand(scores, method.k0)


# The candidates of a token.


def _candidates(
    scores: Scores, method: Method, groups: TokenGroups, placed_RN: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the experts [T, S] of every token's candidate slots, and a mask of the valid slots."""
    topk_TK = scores.topk_TK
    chosen_TK = torch.ones_like(topk_TK, dtype=torch.bool)
    rule = method.candidate_rule
    if rule == "topk":
        return topk_TK, chosen_TK
    n_tokens, n_experts = scores.score_TE.shape
    if rule == "ranked":
        last = min(topk_TK.shape[1] + method.m, n_experts)
        added_TA = ranked_experts(scores)[:, topk_TK.shape[1] : last]
    elif rule == "global":
        added_TA = torch.arange(n_experts, device=topk_TK.device).expand(n_tokens, -1)
    else:
        expert_E = torch.arange(n_experts, device=topk_TK.device)
        added_TA = by_rank(expert_E, method.ep_size, placed_RN)[groups.rank_T]
    valid_TA = addable(scores).gather(1, added_TA)
    return torch.cat([topk_TK, added_TA], dim=1), torch.cat([chosen_TK, valid_TA], dim=1)


# The keys that order the pairs of a bucket.


def _added_bit(scores: Scores, index_TS: Tensor) -> Tensor:
    """Return a key's bit for the added slots, so that they come after the others; 0 for those."""
    return addable(scores).gather(1, index_TS).long() * _ADDED


def _random_key(shape_TE: tuple[int, int], seed: int, stream: tuple[int, int]) -> Tensor:
    """Return random integers [T, E] in [0, 2^31), equal on every device."""
    layer, forward = stream
    digest = hashlib.blake2b(f"{seed}/{layer}/{forward}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.randint(0x7FFFFFFF, shape_TE, generator=generator)


class _Keeper:
    """Keeps the best C pairs of every bucket."""

    def __init__(
        self,
        scores: Scores,
        method: Method,
        groups: TokenGroups,
        stream: tuple[int, int],
        image_T: Tensor | None,
        placed_RN: Tensor | None,
    ) -> None:
        self._scores, self._method, self._placed_RN = scores, method, placed_RN
        n_experts, device = scores.score_TE.shape[1], scores.score_TE.device
        limits = bucket_limits(method, groups, top_k=scores.topk_TK.shape[1], n_experts=n_experts)
        units = n_experts if method.bound == "expert" else method.ep_size
        token_T = torch.arange(len(groups.rows_T), device=device)
        self._place_T = groups.group_T * units << _KEY_BITS  # what all pairs of a token have
        if image_T is not None and method.modality != "uniform":
            first_T = image_T if method.modality == "image_first" else ~image_T
            self._place_T += first_T.long() * _DROPPED_FIRST
        if method.keep in ("order", "reverse_order"):
            self._place_T += token_T if method.keep == "order" else len(token_T) - 1 - token_T
        self._n_buckets = len(groups.tokens) * units
        # One more bucket, which keeps nothing, holds the slots without a pair.
        limit_B = moved(torch.tensor([*limits, 0]), device).repeat_interleave(units)
        self._limit_B = limit_B[: self._n_buckets + 1]
        self._random_TE: Tensor | None = None
        if method.keep == "random":
            # Drawn for the whole batch, so that processes which share it draw the same numbers.
            drawn_TE = _random_key((groups.n_tokens, n_experts), method.seed, stream)
            own = slice(groups.first, groups.first + len(groups.rows_T))
            self._random_TE = moved(drawn_TE[own], device)

    def keep(self, index_TS: Tensor, valid_TS: Tensor) -> Tensor:
        """Return a mask [T, S] of the valid slots that are kept."""
        if self._method.bound == "expert":
            return self._keep(index_TS, valid_TS)
        # A device's bucket holds several experts of one token: in expert order, the stable sort
        # breaks ties by token first and then by expert.
        index_TS, by_expert_TS = index_TS.sort(dim=1)
        kept_TS = self._keep(index_TS, valid_TS.gather(1, by_expert_TS))
        return torch.empty_like(kept_TS).scatter_(1, by_expert_TS, kept_TS)

    def _keep(self, index_TS: Tensor, valid_TS: Tensor) -> Tensor:
        place_TS = self._places(index_TS, valid_TS)
        sorted_P, order_P = place_TS.view(-1).sort(stable=True)
        first_B = torch.arange(self._n_buckets + 2, device=sorted_P.device) << _KEY_BITS
        count_B = torch.searchsorted(sorted_P, first_B).diff()
        del place_TS, sorted_P
        kept_B = torch.minimum(count_B, self._limit_B)
        runs_B2 = torch.stack([kept_B, count_B - kept_B], dim=1)
        yes_no_B2 = (torch.arange(2, device=count_B.device) == 0).expand(len(count_B), 2)
        kept_P = torch.empty_like(order_P, dtype=torch.bool)
        kept_P[order_P] = yes_no_B2.reshape(-1).repeat_interleave(
            runs_B2.reshape(-1), output_size=len(order_P)
        )
        return kept_P.view_as(index_TS)

    def _places(self, index_TS: Tensor, valid_TS: Tensor) -> Tensor:
        """Return bucket·2^33 + key of every slot [T, S], computed in place to save memory."""
        unit_TS = index_TS
        if self._method.bound == "device":
            local = self._scores.score_TE.shape[1] // self._method.ep_size
            unit_TS = rank_of(index_TS, local, self._placed_RN)
        place_TS = unit_TS << _KEY_BITS
        place_TS += self._place_T[:, None]
        place_TS.masked_fill_(~valid_TS, self._n_buckets << _KEY_BITS)
        if self._random_TE is not None:
            place_TS += self._random_TE.gather(1, index_TS)
        if self._method.keep == "score":
            place_TS += HIGHEST
            place_TS -= score_bits(self._scores.score_TE.gather(1, index_TS))
            if self._method.protect_topk:
                place_TS += _added_bit(self._scores, index_TS)
        return place_TS


def _at_most_k(scores: Scores, method: Method, index_TS: Tensor, keep_TS: Tensor) -> Tensor:
    """Return ``keep_TS`` cut to each token's K best pairs (Table 11, "w/ max").

    A token's pairs are of one modality, so that none of them comes after the others for it.
    """
    by_expert_TS = index_TS.argsort(dim=1, stable=True)
    index_TS = index_TS.gather(1, by_expert_TS)
    kept_TS = keep_TS.gather(1, by_expert_TS)
    key_TS = HIGHEST - score_bits(scores.score_TE.gather(1, index_TS)).long()
    if method.protect_topk:
        key_TS = key_TS + _added_bit(scores, index_TS)
    key_TS = key_TS.masked_fill(~kept_TS, 1 << _KEY_BITS)
    place_TS = key_TS.argsort(dim=1, stable=True).argsort(dim=1)
    kept_TS = kept_TS & (place_TS < scores.topk_TK.shape[1])
    return torch.empty_like(kept_TS).scatter_(1, by_expert_TS, kept_TS)


# The two methods that are not one pass of candidates, keys and buckets.


def expert_load(index: Tensor, n_experts: int) -> Tensor:
    """Return the number of pairs of each expert [E], from the experts of pairs in any shape."""
    flat = index.reshape(-1)
    load_E = torch.zeros(n_experts, dtype=torch.long, device=flat.device)
    return load_E.scatter_add_(0, flat, torch.ones_like(flat))


def idle_experts(load_E: Tensor) -> Tensor:
    """Return the max(1, floor(E/10)) experts with the lowest load, which Expert Drop silences."""
    return load_E.argsort(stable=True)[: max(1, len(load_E) // 10)]


def _reroute(scores: Scores, method: Method, keeper: _Keeper) -> Assignment:
    """Repeat: choose the top-k of the remaining pairs, drop overflow, mask it (Token Reroute)."""
    top_k = scores.topk_TK.shape[1]
    ranked_TE = ranked_experts(scores)
    kept_TE = remains_TE = usable(scores).gather(1, ranked_TE)  # in ranked order
    for number in range(1, method.rounds + 1):
        selected_TE = remains_TE & (remains_TE.cumsum(dim=1) <= top_k)
        kept_TE = keeper.keep(ranked_TE, selected_TE)
        rejected_TE = selected_TE & ~kept_TE
        # Another round would choose and keep the same pairs. A GPU computes some sooner than it
        # says whether it need not.
        if (rejected_TE.device.type == "cpu" or number % 64 == 0) and not rejected_TE.any():
            break
        remains_TE = remains_TE & ~rejected_TE
    by_expert_TE = torch.empty_like(kept_TE).scatter_(1, ranked_TE, kept_TE)
    return assignment(scores, by_expert_TE)
