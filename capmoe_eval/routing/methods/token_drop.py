"""Token Drop: an overloaded expert keeps C of its tokens (paper §4).

The four classes differ in whom an expert keeps: its first tokens, its last, some at random, or
those with the highest gate scores. The last is the paper's Token Drop. Unlike Equation 9, whose
threshold keeps all ties, no bound is ever exceeded.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from capmoe_eval.routing.knobs import Seed
from capmoe_eval.routing.method import Bounded, LabelPart, Method
from capmoe_eval.routing.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from capmoe_eval.routing.decision import Assignment, LayerContext, Scores, TokenGroups
    from capmoe_eval.routing.definition import Array, RoutedTokens

# Shape suffixes: T counted tokens, E routed experts, K = top-k.


def drop_beyond_capacity(
    method: Bounded, scores: Scores, tokens: TokenGroups, layer: LayerContext, key_TK: Tensor
) -> Assignment:
    """Return the router's choice without the pairs that exceed a unit's capacity."""
    from capmoe_eval.routing.decision import Assignment, keep_within_capacity

    n_experts, slots = scores.score_TE.shape[1], {"index_TS": scores.topk_TK, "key_TS": key_TK}
    keep_TK = keep_within_capacity(method, tokens, layer, n_experts=n_experts, **slots)
    return Assignment(scores.topk_TK, keep_TK)


class DropMetric(Bounded):
    """An overloaded expert keeps the C of its tokens that a metric puts first (Table 1)."""

    fills_slots = True

    def keys(self, scores: Scores, layer: LayerContext) -> Tensor:
        """Return the place of every pair of the tokens' top-k [T, K]; the smallest are kept."""
        raise NotImplementedError

    def numbers(self, tokens: RoutedTokens) -> Array:
        """Return the place of every pair by the definition [T, E]; the smallest are kept."""
        raise NotImplementedError

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return the first C pairs of every unit; ties keep the lower token."""
        return drop_beyond_capacity(self, scores, tokens, layer, self.keys(scores, layer))

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return the first C pairs of every unit, by the definition."""
        from capmoe_eval.routing import definition

        keys = definition.priority(tokens, self.numbers(tokens), modality=self.modality)
        return definition.best_in_buckets(tokens, tokens.chosen_TE, keys)


@register
class OrderDrop(DropMetric):
    """An overloaded expert keeps its first C tokens, in the order of the batch."""

    name = "order"
    title = "Order"
    source = "paper §4 (Switch Transformer)"
    row = 1
    last_first: ClassVar[bool] = False

    def keys(self, scores: Scores, layer: LayerContext) -> Tensor:
        """Return each token's place in the batch."""
        import torch

        key_T1 = torch.arange(len(scores.topk_TK), device=scores.topk_TK.device)[:, None]
        return (key_T1.flip(0) if self.last_first else key_T1).expand_as(scores.topk_TK)

    def numbers(self, tokens: RoutedTokens) -> Array:
        """Return each token's place in the batch."""
        import numpy as np

        token_T1 = np.arange(len(tokens.score_TE))[:, None]
        return np.broadcast_to(-token_T1 if self.last_first else token_T1, tokens.score_TE.shape)


@register
class ReverseOrderDrop(OrderDrop):
    """An overloaded expert keeps its last C tokens, in the order of the batch."""

    name = "reverse_order"
    title = "Reverse Order"
    source = "paper §4"
    row = 2
    last_first = True


@register
class RandomDrop(DropMetric):
    """An overloaded expert keeps C of its tokens at random."""

    name = "random"
    title = "Random"
    source = "paper §4"
    row = 3

    seed: Annotated[
        Seed,
        Field(description="of the random numbers; the paper averages several"),
        LabelPart("s"),
    ] = 0

    def random_numbers(
        self, tokens: TokenGroups, n_experts: int, layer: int, forward: int
    ) -> Tensor:
        """Return integers [T, E] in [0, 2³¹), equal on every device.

        They are drawn for the whole batch, so that processes which share it draw the same.
        """
        import torch

        digest = hashlib.blake2b(f"{self.seed}/{layer}/{forward}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        shape = (tokens.n_tokens, n_experts)
        drawn_TE = torch.randint(0x7FFFFFFF, shape, generator=generator, device="cpu")
        return drawn_TE[tokens.first : tokens.first + len(tokens.rows_T)]

    def keys(self, scores: Scores, layer: LayerContext) -> Tensor:
        """Return the pairs' random numbers."""
        assert layer.random_TE is not None
        return layer.random_TE.gather(1, scores.topk_TK)

    def numbers(self, tokens: RoutedTokens) -> Array:
        """Return random numbers: a generator for each seed, layer and forward."""
        from capmoe_eval.routing.definition import by_chance

        return by_chance(tokens, self.seed)


@register
class TokenDrop(DropMetric):
    """An overloaded expert keeps the C tokens with the highest gate scores."""

    name = "score"
    title = "Token Drop"
    source = "paper §4, Equations 7 to 10 (*Score* in Table 1)"
    row = 4

    def keys(self, scores: Scores, layer: LayerContext) -> Tensor:
        """Return keys that rise as the pairs' scores fall."""
        from capmoe_eval.routing.decision import score_keys

        return score_keys(scores, scores.topk_TK)

    def numbers(self, tokens: RoutedTokens) -> Array:
        """Return the scores, the highest as the smallest number."""
        return -tokens.score_TE


@register
class DeviceDrop(TokenDrop):
    """Token Drop where the experts of a device share one capacity: another name for it."""

    name = "device_drop"
    title = "device-level Token Drop"
    source = "paper §5.2"
    row = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("granularity", "device")

    def simplest(self) -> Method:
        """Return Token Drop with ``granularity="device"``."""
        return self.converted(TokenDrop)
