"""Describe what happened in one MoE layer, in one forward of the model.

A layer's forward ends in one :class:`LayerForward`. It is all that the wrapper tells of the layer,
and everyone who wants to know something of it reads it (:mod:`capmoe_eval.wrapper.observers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from capmoe_eval.routing.method import Method
from capmoe_eval.routing.scores import Assignment, Scores
from capmoe_eval.wrapper.counts import PairCounts
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.plan import ForwardPlan

# Shape suffixes: N rows of the batch, E experts, K = top-k, A slots that the experts are called
# with, H hidden size, G capacity groups.


@dataclass(frozen=True)
class RouterCall:
    """The call of a layer's router, for every row of the batch."""

    hidden_NH: Tensor | None  # None where the router is called by the names of its arguments
    logits_NE: Tensor
    weight_NK: Tensor  # its combine weights
    topk_NK: Tensor  # its choice


@dataclass(frozen=True)
class ExpertsCall:
    """The call of a layer's experts, for every row of the batch."""

    hidden_NH: Tensor
    index_NA: Tensor  # E for a slot without an expert
    weight_NA: Tensor


@dataclass(frozen=True)
class LayerForward:
    """All that happened in one layer, in one forward of the model."""

    plan: ForwardPlan
    number: int  # of the layer among the MoE layers, from 0
    layer: MoeLayer
    method: Method  # with the layer's own γ
    calibrated: Tensor | None  # what a calibration measured of the layer, if the method needs it
    router: RouterCall
    scores: Scores  # of the counted tokens
    assignment: Assignment | None  # of the counted tokens; None where nothing was decided
    experts: ExpertsCall
    # The experts of the rows that the stock kernel computed, call by call; None where the kernel of
    # kept pairs is not installed.
    computed: tuple[Tensor, ...] | None

    @cached_property
    def counts(self) -> PairCounts:
        """The numbers of pairs before and after the decision, of all processes."""
        router, experts = self.router, self.experts
        return PairCounts(self.plan, self.layer, self.method, router.topk_NK, experts.index_NA)

    @cached_property
    def limit_G(self) -> Tensor:
        """The capacity of an expert, or of a device, in each group [G]."""
        limit_G = self.plan.limit_G(self.method, self.layer, self.experts.index_NA.device)
        assert limit_G is not None
        return limit_G
