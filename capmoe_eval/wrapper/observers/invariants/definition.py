"""Define the capacity groups, the capacities and the kept pairs of the paper's methods.

Written from the definitions alone: capacities in whole numbers, tokens by their sequence, pairs by
expert. Ties go to the lower token, then to the lower expert.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.invariants.event import ForwardEvent

# Shape suffixes: B sequences, S positions, M columns of a mask over cache and new positions,
# T counted tokens, E experts, K = top-k, G groups, P pairs.

Array = npt.NDArray[Any]
_KINDS = ("image", "video", "audio")  # whose placeholders a configuration may name


def capacity_groups(
    sequence_T: Array, n_sequences: int, method: Method, process: int, processes: int
) -> tuple[Array, Array]:
    """Return the capacity group and the emulated rank of each token [T].

    Sequence b of B is on rank floor(b·R/B). Where several processes share a batch, each has the
    sequences of one rank; of a scope of one sequence the groups are those of this process.
    """
    if processes > 1:
        rank_T = np.full_like(sequence_T, process * method.ep_size // processes)
    else:
        rank_T = sequence_T * method.ep_size // n_sequences
    return (rank_T if method.scope == "batch" else sequence_T), rank_T


def is_under_method(method: Method, event: ForwardEvent) -> bool:
    """Return whether a forward is under the method: a prompt, a decode step, or both.

    In a generation every forward after the prompt's is a decode step, elsewhere one of one new
    token per sequence behind a filled cache.
    """
    is_decode_step = event.n_new == 1 and event.n_cached > 0
    if event.is_prompt is not None:
        is_decode_step = not event.is_prompt
    if method.decode == "constrained":
        return True
    return is_decode_step if method.decode == "only" else not is_decode_step


def image_tokens(event: ForwardEvent) -> Array | None:
    """Return a mask of the tokens of images in the flattened batch [N]; None if nothing tells.

    They are told by the types of tokens, else by the ids that the configuration names. Generated
    tokens are text.
    """
    types_BS, ids_BS = event.token_types_BS, event.input_ids_BS
    shape = (event.n_sequences, event.n_new)
    if types_BS is not None and types_BS.shape == shape:
        is_image_BS = types_BS.cpu().numpy() != 0
    elif ids_BS is not None:
        names = (f"{kind}_token_{end}" for kind in _KINDS for end in ("id", "index"))
        ids = {getattr(event.config, name, None) for name in names}
        is_image_BS = np.isin(ids_BS.cpu().numpy(), [i for i in ids if isinstance(i, int)])
    else:
        return None
    is_image_BS[:, event.prompt_length :] = False
    return np.ravel(is_image_BS)


def counted_tokens(
    mask_BM: Array | None, shape: tuple[int, int], first_column: int, *, count_padding: bool
) -> Array:
    """Return a mask [B, S] of the tokens that count in T and take slots.

    ``mask_BM`` is non-zero where a token is real; None if all are.
    """
    if mask_BM is None or count_padding:
        return np.ones(shape, dtype=bool)
    is_real_BS: Array = mask_BM[:, first_column : first_column + shape[1]] != 0
    return is_real_BS


def capacities(method: Method, tokens_G: Array, top_k: int, n_experts: int) -> Array:
    """Return the capacity of an expert, or of a device, in each group [G]: γ·T·K/E per expert.

    γ is the decimal that was written (paper §4; of a device, §5.2).
    """
    assert method.gamma is not None
    sharing = n_experts // method.ep_size if method.granularity == "device" else 1
    limits = []
    for tokens in tokens_G.tolist():
        limit = sharing * tokens
        if method.gamma != math.inf:
            numerator, denominator = Decimal(repr(method.gamma)).as_integer_ratio()
            pairs, rest = divmod(sharing * numerator * tokens * top_k, denominator * n_experts)
            limit = min(limit, pairs + (rest > 0 and method.rounding == "ceil"))
        limits.append(limit)
    return np.array(limits, dtype=np.int64)


@dataclass(frozen=True)
class RoutedTokens:
    """The counted tokens of a whole batch in one layer, with all that a decision depends on."""

    method: Method  # with the layer's own γ
    layer: int  # its number
    forward: int  # forwards of the model before this one
    score_TE: Array  # gate scores
    ranking_TE: Array  # the scores that the router ranks experts by
    eligible_TE: Array  # False where the family's group masking rules the expert out
    topk_TK: Array  # the router's own choice
    weight_TK: Array  # its combine weights, in float64
    weight_eps: float  # of the precision that the router gives them in: the relative spacing,
    weight_smallest: float  # and the smallest normal number
    group_T: Array  # capacity group of each token
    rank_T: Array  # emulated rank of each token
    image_T: Array | None = None  # True for a token of an image
    hidden_TH: Array | None = None  # what the router is called with, for methods that weigh tokens
    calibrated: Array | None = None  # what a calibration measured of the layer

    @property
    def n_experts(self) -> int:
        """Number of routed experts E."""
        return int(self.score_TE.shape[1])

    @property
    def top_k(self) -> int:
        """Experts K per token."""
        return int(self.topk_TK.shape[1])

    @property
    def rank_E(self) -> Array:
        """The rank that holds each expert: contiguous blocks, or a calibrated placement."""
        if not self.method.is_placed:
            return np.arange(self.n_experts) // (self.n_experts // self.method.ep_size)
        assert self.calibrated is not None
        rank_E = np.empty(self.n_experts, dtype=np.int64)
        for rank, experts in enumerate(self.calibrated):
            rank_E[experts] = rank
        return rank_E

    @property
    def tokens_G(self) -> Array:
        """Number of tokens of each group [G]."""
        return np.bincount(self.group_T)

    @property
    def unit_E(self) -> Array:
        """The unit of each expert that has a capacity: the expert itself, or its device."""
        is_device = self.method.granularity == "device"
        return self.rank_E if is_device else np.arange(self.n_experts)

    @property
    def chosen_TE(self) -> Array:
        """True for the pairs of the router's own choice."""
        chosen_TE = np.zeros(self.score_TE.shape, dtype=bool)
        np.put_along_axis(chosen_TE, self.topk_TK, True, axis=1)
        return chosen_TE

    def best_of(self, pair_TE: Array, most: int) -> Array:
        """Return each token's ``most`` best of the pairs [T, E].

        The top-k come before other experts, eligible experts before ineligible ones, and then the
        ranking decides.
        """
        order_TE = np.argsort(-self.ranking_TE, axis=1, kind="stable")
        tier_TE = 2 * ~self.chosen_TE + ~self.eligible_TE + 4 * ~pair_TE
        by_tier_TE = np.argsort(
            np.take_along_axis(tier_TE, order_TE, axis=1), axis=1, kind="stable"
        )
        best_TE = np.zeros_like(pair_TE)
        best = np.take_along_axis(order_TE, by_tier_TE[:, :most], axis=1)
        np.put_along_axis(best_TE, best, True, axis=1)
        return best_TE & pair_TE


def kept_pairs(tokens: RoutedTokens) -> Array:
    """Return the pairs that the paper's method keeps [T, E]."""
    method, chosen_TE = tokens.method, tokens.chosen_TE
    if method.name == "baseline":
        return chosen_TE
    if method.name == "expert_drop":  # Table 2: a tenth of the experts, those of the lowest load
        load_E = chosen_TE.sum(axis=0)
        disabled = np.argsort(load_E, kind="stable")[: max(1, tokens.n_experts // 10)]
        kept_TE = chosen_TE.copy()
        kept_TE[:, disabled] = False
        return kept_TE
    if method.name == "token_reroute":  # v1, Algorithm 1
        remaining_TE = chosen_TE | tokens.eligible_TE
        for _ in range(method.rounds):
            selected_TE = tokens.best_of(remaining_TE, tokens.top_k)
            kept_TE = _best_in_buckets(tokens, selected_TE)
            rejected_TE = selected_TE & ~kept_TE
            if not rejected_TE.any():  # another round would keep the same pairs
                break
            remaining_TE = remaining_TE & ~rejected_TE
        return kept_TE
    kept_TE = _best_in_buckets(tokens, chosen_TE | _added_candidates(tokens))
    return _at_most_k(tokens, kept_TE) if method.max_k else kept_TE


def _added_candidates(tokens: RoutedTokens) -> Array:
    """Return the candidates beside the tokens' top-k [T, E] (Algorithm 2, Table 11)."""
    others_TE: Array = tokens.eligible_TE & ~tokens.chosen_TE
    if tokens.method.name != "expanded_drop":
        return np.zeros_like(others_TE)
    if tokens.method.candidates == "ranked":
        return tokens.best_of(others_TE, tokens.method.m)
    if tokens.method.candidates == "local":
        others_TE = others_TE & (tokens.rank_E == tokens.rank_T[:, None])
    return others_TE


def _priority(tokens: RoutedTokens, token_P: Array, expert_P: Array) -> tuple[Array, ...]:
    """Return the sort keys of pairs, the first decides; the smallest is kept first."""
    method, image_T = tokens.method, tokens.image_T
    is_last_P = np.zeros(len(token_P), dtype=bool)
    if image_T is not None and method.modality != "uniform":  # §5.3
        is_last_P = image_T[token_P] == (method.modality == "image_first")
    is_added_P = np.zeros_like(is_last_P)
    if method.protect_topk:
        is_added_P = ~tokens.chosen_TE[token_P, expert_P]
    if method.name == "order":
        first_P: Array = token_P
    elif method.name == "reverse_order":
        first_P = -token_P
    elif method.name == "random":
        first_P = _random_numbers(tokens)[token_P, expert_P]
    else:
        first_P = -tokens.score_TE[token_P, expert_P]
    return is_last_P, is_added_P, first_P


def _random_numbers(tokens: RoutedTokens) -> Array:
    """Return the numbers [T, E] of ``random``: a generator for each seed, layer and forward."""
    name = f"{tokens.method.seed}/{tokens.layer}/{tokens.forward}"
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
    generator = torch.Generator().manual_seed(seed)
    number_TE = torch.randint(2**31 - 1, tokens.score_TE.shape, generator=generator)
    return np.asarray(number_TE)


def _best_in_buckets(tokens: RoutedTokens, pair_TE: Array) -> Array:
    """Return the C best of the pairs of every (group, expert) or (group, device) [T, E]."""
    limit_G = capacities(tokens.method, tokens.tokens_G, tokens.top_k, tokens.n_experts)
    token_P, expert_P = np.nonzero(pair_TE)  # by token, then by expert, which breaks ties
    bucket_P = tokens.group_T[token_P] * tokens.n_experts + tokens.unit_E[expert_P]
    keys = _priority(tokens, token_P, expert_P)
    order_P = np.lexsort((*reversed(keys), bucket_P))
    token_P, expert_P, bucket_P = token_P[order_P], expert_P[order_P], bucket_P[order_P]
    place_P = np.arange(len(bucket_P)) - np.searchsorted(bucket_P, bucket_P)
    is_kept_P = place_P < limit_G[tokens.group_T[token_P]]
    kept_TE = np.zeros_like(pair_TE)
    kept_TE[token_P[is_kept_P], expert_P[is_kept_P]] = True
    return kept_TE


def _at_most_k(tokens: RoutedTokens, pair_TE: Array) -> Array:
    """Return each token's K best of the pairs [T, E] (Table 11, "w/ max")."""
    token_P, expert_P = np.nonzero(pair_TE)
    order_P = np.lexsort((*reversed(_priority(tokens, token_P, expert_P)), token_P))
    token_P, expert_P = token_P[order_P], expert_P[order_P]
    is_kept_P = np.arange(len(token_P)) - np.searchsorted(token_P, token_P) < tokens.top_k
    kept_TE = np.zeros_like(pair_TE)
    kept_TE[token_P[is_kept_P], expert_P[is_kept_P]] = True
    return kept_TE


def buckets_beyond(tokens: RoutedTokens, called_TE: Array) -> int:
    """Return the number of experts (or devices) that a group sends more pairs than C."""
    if tokens.method.bound is None:
        return 0
    limit_G = capacities(tokens.method, tokens.tokens_G, tokens.top_k, tokens.n_experts)
    load_GU = np.zeros((len(limit_G), tokens.n_experts), dtype=np.int64)
    token_P, expert_P = np.nonzero(called_TE)
    np.add.at(load_GU, (tokens.group_T[token_P], tokens.unit_E[expert_P]), 1)
    return int((load_GU > limit_G[:, None]).sum())
