"""Describe what happened in one MoE layer, in one forward of the model.

A layer's forward ends in one :class:`LayerForward`. It is all that the wrapper tells of the layer,
and everyone who wants to know something of it reads it (:mod:`capmoe_eval.wrapper.observers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.routing.decision import by_rank
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.scores import Assignment, Scores, bucket_loads
from capmoe_eval.routing.tokens import TokenGroups
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.plan import ForwardPlan
from capmoe_eval.wrapper.ranks import ALONE

# Shape suffixes: N rows of the batch, T counted tokens, K = top-k, A slots that the experts are
# called with, E experts, G capacity groups, M modalities (one where a model has no images), C
# counts, U units that have a capacity, R ranks, H hidden size.

COUNTS = ("tokens", "dropped", "added", "lost_all")
"""The counts of a layer's tokens: all, pairs lost, pairs added, and tokens without any pair."""


class Totals(NamedTuple):
    """Sums of a layer's forward over all processes."""

    demand_GME: Tensor  # loads by the router's own choice
    kept_GME: Tensor  # loads that the experts were called with
    count_CM: Tensor  # :data:`COUNTS` by modality
    pad_slots: Tensor  # slots that tokens take which do not count []


class PairCounts:
    """The pairs of a layer's forward; each number is computed when it is first asked for.

    Masks and indices are of this process's tokens; loads and counts are of all processes.
    """

    def __init__(
        self, plan: ForwardPlan, layer: MoeLayer, method: Method, topk_NK: Tensor, index_NA: Tensor
    ) -> None:
        self._layer, self._method = layer, method
        self._topk_NK, self._index_NA = topk_NK, index_NA
        self.groups, self._pads_N1, self.image_T, self.band_T = plan.on(index_NA.device)
        self.n_tokens = self.groups.n_tokens  # of all processes
        self.topk_TK = self.groups.counted(topk_NK)  # the router's own choice
        self.index_TA = self.groups.counted(index_NA)  # what the experts were called with

    @cached_property
    def called_TE(self) -> Tensor:
        """True for the pairs that the experts were called with, in whatever slots."""
        n_experts = self._layer.n_experts
        shape = (len(self.index_TA), n_experts + 1)
        called_TE = self.index_TA.new_zeros(shape, dtype=torch.bool)
        return called_TE.scatter_(1, self.index_TA.clamp(0, n_experts), True)[:, :n_experts]

    @cached_property
    def lost_TK(self) -> Tensor:
        """True for the pairs of the router's own choice that the experts were not called with."""
        return ~self.called_TE.gather(1, self.topk_TK)

    @cached_property
    def count_CT(self) -> Tensor:
        """The :data:`COUNTS` of each token [C, T]."""
        lost_TK, called_TE = self.lost_TK, self.called_TE
        return torch.stack(
            [
                torch.ones_like(self.groups.group_T),
                lost_TK.sum(dim=1),
                called_TE.sum(dim=1) - (~lost_TK).sum(dim=1),
                (~called_TE.any(dim=1)).long(),
            ]
        )

    def loads_GME(self, index_TS: Tensor, amount_TS: Tensor) -> Tensor:
        """Return the sum of some slots' amounts by group, modality and expert, in this process."""
        cell_T = self.groups.group_T
        if self.image_T is not None:
            cell_T = 2 * cell_T + self.image_T
        n_modalities = 1 if self.image_T is None else 2
        shape = len(self.groups.tokens), n_modalities, self._layer.n_experts
        return bucket_loads(cell_T, index_TS, amount_TS, shape)

    @cached_property
    def totals(self) -> Totals:
        """The sums over all processes, in one exchange between them."""
        n_experts = self._layer.n_experts
        called_TA = self.index_TA.clamp(0, n_experts - 1)
        sums = self._layer.ranks.totals(
            self.loads_GME(self.topk_TK, torch.ones_like(self.topk_TK)),
            self.loads_GME(called_TA, (self.index_TA < n_experts).long()),
            by_modality(self.count_CT, self.image_T),
            self._slots_of_pads(),
        )
        return Totals(*sums)

    @cached_property
    def demand_GE(self) -> Tensor:
        """The loads by the router's own choice [G, E]."""
        return self.totals.demand_GME.sum(dim=1)

    @cached_property
    def kept_GE(self) -> Tensor:
        """The loads that the experts were called with [G, E]."""
        return self.totals.kept_GME.sum(dim=1)

    @cached_property
    def demand_E(self) -> Tensor:
        """The loads by the router's own choice [E]."""
        return self.demand_GE.sum(dim=0)

    @cached_property
    def kept_E(self) -> Tensor:
        """The loads that the experts were called with [E]."""
        return self.kept_GE.sum(dim=0)

    @cached_property
    def count_C(self) -> Tensor:
        """The :data:`COUNTS` of the whole batch [C]."""
        return self.totals.count_CM.sum(dim=1)

    @property
    def dropped(self) -> Tensor:
        """The number of lost pairs []."""
        return self.count_C[COUNTS.index("dropped")]

    def _slots_of_pads(self) -> Tensor:
        """Return the number of slots of this process's pads []."""
        pads_N1 = self._pads_N1 & (not self._method.is_stock)
        taken_NA = pads_N1 & (self._index_NA < self._layer.n_experts)
        # A forward that drops and adds nothing is the model's own, pads included, where a capacity
        # decides and one process has all experts.
        may_be_stock = self._layer.ranks is ALONE and self._method.unit is not None
        if may_be_stock and self._topk_NK.shape == self._index_NA.shape:
            taken_NA = taken_NA & (self.lost_TK.any() | (self._index_NA != self._topk_NK))
        return taken_NA.sum()


def by_modality(count_CT: Tensor, image_T: Tensor | None) -> Tensor:
    """Return the counts of tokens by modality [C, M]."""
    total_C = count_CT.sum(dim=1)
    if image_T is None:
        return total_C[:, None]
    of_images_C = (count_CT * image_T).sum(dim=1)
    return torch.stack([total_C - of_images_C, of_images_C], dim=1)


def by_device(load_E: Tensor, method: Method, calibrated: Tensor | None) -> Tensor:
    """Return the loads of experts […, E] as loads of the emulated ranks […, R]."""
    placed_RN = calibrated if method.is_placed else None
    return by_rank(load_E, method.ep_size, placed_RN).sum(dim=-1)


def by_unit(load_E: Tensor, method: Method, calibrated: Tensor | None) -> Tensor:
    """Return the loads of experts […, E] as those of the units that have a capacity […, U]."""
    return load_E if method.granularity == "expert" else by_device(load_E, method, calibrated)


@dataclass(frozen=True)
class RouterCall:
    """The call of a layer's router, for every row of the batch."""

    layer: MoeLayer
    groups: TokenGroups  # on the device of the router's choice
    hidden_NH: Tensor | None  # None where the router is called by the names of its arguments
    logits_NE: Tensor
    weight_NK: Tensor  # its combine weights
    topk_NK: Tensor  # its choice
    # The relative error of the weights by the router's own rounding []; None where that is the
    # rounding to the weights' precision alone.
    slack: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.topk_NK) != self.groups.n_rows:
            raise EnforcementError(
                f"{self.layer.name}: {len(self.topk_NK)} rows for {self.groups.n_rows} tokens"
            )
        if self.topk_NK.shape[1] != self.layer.top_k:
            raise UsageError(
                f"top_k={self.topk_NK.shape[1]}: the router of {self.layer.name} chose "
                f"{self.layer.top_k} experts per token when the block began; change it outside of "
                "the block"
            )

    @cached_property
    def topk_TK(self) -> Tensor:
        """The choice for the counted tokens."""
        return self.groups.counted(self.topk_NK)

    @cached_property
    def scores(self) -> Scores:
        """The gate scores of the counted tokens; computed only if they are read."""
        return self.layer.gate.scores(self.groups.counted(self.logits_NE), self.topk_TK)


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
    assignment: Assignment | None  # of the counted tokens; None where nothing was decided
    experts: ExpertsCall
    # The experts of the rows that the stock kernel computed, call by call; None where the kernel of
    # kept pairs is not installed.
    computed: tuple[Tensor, ...] | None
    output_NH: Tensor | None = None  # of the experts; None where a server's kernel computed it

    @property
    def scores(self) -> Scores:
        """The gate scores of the counted tokens."""
        return self.router.scores

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
