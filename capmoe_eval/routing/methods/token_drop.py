"""Token Drop: an overloaded expert keeps C of its tokens (paper §4).

The four classes differ in whom an expert keeps: its first tokens, its last, some at random, or
those with the highest gate scores. The last is the paper's Token Drop. Unlike Equation 9, whose
threshold keeps all ties, no bound is ever exceeded.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from capmoe_eval.routing.knobs import Seed
from capmoe_eval.routing.method import LabelPart, Method
from capmoe_eval.routing.mixins import Bounded
from capmoe_eval.routing.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from capmoe_eval.routing.context import LayerContext
    from capmoe_eval.routing.definition import Array, RoutedTokens
    from capmoe_eval.routing.scores import Assignment, Scores
    from capmoe_eval.routing.tokens import TokenGroups

# Shape suffixes: T counted tokens, E routed experts, K = top-k.


def drop_beyond_capacity(
    method: Bounded, scores: Scores, tokens: TokenGroups, layer: LayerContext, key_TK: Tensor
) -> Assignment:
    """Return the router's own choice without the pairs beyond a unit's capacity, by their keys."""
    from capmoe_eval.routing.decision import keep_within_capacity
    from capmoe_eval.routing.scores import Assignment

    keep_TK = keep_within_capacity(
        method,
        tokens,
        layer,
        index_TS=scores.topk_TK,
        key_TS=key_TK,
        n_experts=scores.score_TE.shape[1],
    )
    return Assignment(scores.topk_TK, keep_TK)


def kept_by_number(method: Bounded, tokens: RoutedTokens, number_TE: Array) -> Array:
    """Return the C pairs of every unit with the smallest numbers, by the definition [T, E]."""
    from capmoe_eval.routing import definition

    keys = definition.priority(tokens, number_TE, modality=method.modality)
    return definition.best_in_buckets(tokens, tokens.chosen_TE, keys)


@register
@dataclass(frozen=True, kw_only=True)
class OrderDrop(Bounded):
    """An overloaded expert keeps its first C tokens, in the order of the batch."""

    name: ClassVar[str] = "order"
    title: ClassVar[str] = "Order"
    source: ClassVar[str] = "paper §4 (Switch Transformer)"
    row: ClassVar[int] = 1

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return the first C pairs of every unit."""
        import torch

        topk_TK = scores.topk_TK
        key_T1 = torch.arange(len(topk_TK), device=topk_TK.device)[:, None]
        return drop_beyond_capacity(self, scores, tokens, layer, key_T1.expand_as(topk_TK))

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return the first C pairs of every unit, by the definition."""
        from capmoe_eval.routing.definition import by_position

        return kept_by_number(self, tokens, by_position(tokens))


@register
@dataclass(frozen=True, kw_only=True)
class ReverseOrderDrop(Bounded):
    """An overloaded expert keeps its last C tokens, in the order of the batch."""

    name: ClassVar[str] = "reverse_order"
    title: ClassVar[str] = "Reverse Order"
    source: ClassVar[str] = "paper §4"
    row: ClassVar[int] = 2

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return the last C pairs of every unit."""
        import torch

        topk_TK = scores.topk_TK
        key_T1 = torch.arange(len(topk_TK) - 1, -1, -1, device=topk_TK.device)[:, None]
        return drop_beyond_capacity(self, scores, tokens, layer, key_T1.expand_as(topk_TK))

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return the last C pairs of every unit, by the definition."""
        from capmoe_eval.routing.definition import by_position

        return kept_by_number(self, tokens, by_position(tokens, last_first=True))


@register
@dataclass(frozen=True, kw_only=True)
class RandomDrop(Bounded):
    """An overloaded expert keeps C of its tokens at random."""

    name: ClassVar[str] = "random"
    title: ClassVar[str] = "Random"
    source: ClassVar[str] = "paper §4"
    row: ClassVar[int] = 3

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
        drawn_TE = torch.randint(0x7FFFFFFF, shape, generator=generator)
        return drawn_TE[tokens.first : tokens.first + len(tokens.rows_T)]

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return the C pairs of every unit with the smallest random numbers."""
        assert layer.random_TE is not None
        key_TK = layer.random_TE.gather(1, scores.topk_TK)
        return drop_beyond_capacity(self, scores, tokens, layer, key_TK)

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return the C pairs of every unit that are drawn, by the definition."""
        from capmoe_eval.routing.definition import by_chance

        return kept_by_number(self, tokens, by_chance(tokens, self.seed))


@register
@dataclass(frozen=True, kw_only=True)
class TokenDrop(Bounded):
    """An overloaded expert keeps the C tokens with the highest gate scores."""

    name: ClassVar[str] = "score"
    title: ClassVar[str] = "Token Drop"
    source: ClassVar[str] = "paper §4, Equations 7 to 10 (*Score* in Table 1)"
    row: ClassVar[int] = 4

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return the C best-scoring pairs of every unit; ties keep the lower token."""
        from capmoe_eval.routing.decision import score_keys

        key_TK = score_keys(scores, scores.topk_TK)
        return drop_beyond_capacity(self, scores, tokens, layer, key_TK)

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return the C best-scoring pairs of every unit, by the definition."""
        from capmoe_eval.routing.definition import by_score

        return kept_by_number(self, tokens, by_score(tokens))


@register
@dataclass(frozen=True, kw_only=True)
class DeviceDrop(TokenDrop):
    """Token Drop where the experts of a device share one capacity: another name for it."""

    name: ClassVar[str] = "device_drop"
    title: ClassVar[str] = "device-level Token Drop"
    source: ClassVar[str] = "paper §5.2"
    row: ClassVar[int] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("granularity", "device")

    def simplest(self) -> Method:
        """Return Token Drop with ``granularity="device"``."""
        return self.converted(TokenDrop)
