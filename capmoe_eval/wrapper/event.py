"""Describe what happened in one MoE layer, in one forward of the model.

A layer's forward is one :class:`LayerForward`. It is all that the wrapper tells of the layer, and
everyone who wants to know something of it reads it (:mod:`capmoe_eval.wrapper.observers`).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.routing.decision import Assignment, Scores, TokenGroups, bucket_loads, by_rank
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.plan import ForwardPlan
from capmoe_eval.wrapper.ranks import ALONE

# Shape suffixes: N rows of the batch, T counted tokens, K = top-k, A slots that the experts are
# called with, E experts, G capacity groups, M modalities (one where a model has no images), C
# counts, U units that have a capacity, R ranks, H hidden size.

COUNTS = ("tokens", "dropped", "added", "lost_all")
"""The counts of a layer's tokens: all, pairs lost, pairs added, and tokens without any pair."""


class Totals(NamedTuple):
    """Sums over the processes that share a batch."""

    demand_GME: Tensor  # the loads by the router's own choice, by modality
    kept_GME: Tensor  # the loads that the experts were called with, by modality
    count_CM: Tensor  # the COUNTS by modality
    pad_slots: Tensor  # the number of slots that tokens take which do not count []


@dataclass(eq=False)
class LayerForward:
    """All that happened in one layer, in one forward of the model.

    It begins when the router has answered, and observers see it when the experts have run. Masks
    and indices of tokens are of this process; loads and counts are of all processes. Each number is
    computed when it is first asked for.
    """

    plan: ForwardPlan
    number: int  # of the layer among the MoE layers, from 0
    layer: MoeLayer
    method: Method  # with the layer's own γ
    _: KW_ONLY
    # What the router returned, for every row of the batch.
    logits_NE: Tensor
    weight_NK: Tensor  # its combine weights
    topk_NK: Tensor  # its choice
    hidden_NH: Tensor | None = None  # what it was called with; None if by the names of arguments
    # The relative error of the weights by the router's own rounding []; None where that is the
    # rounding to the weights' precision alone.
    slack: Tensor | None = None
    calibrated: Tensor | None = None  # what a calibration measured of the layer, if it is needed
    # What was decided for the counted tokens; None where nothing was.
    assignment: Assignment | None = None

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

    def experts_ran(
        self,
        hidden_NH: Tensor,
        index_NA: Tensor,
        weight_NA: Tensor,
        *,
        computed: tuple[Tensor, ...] | None = None,
        output_NH: Tensor | None = None,
    ) -> None:
        """Note the call of the experts, for every row of the batch.

        Args:
            hidden_NH: The hidden states.
            index_NA: The experts of the slots; E for a slot without an expert.
            weight_NA: The combine weights.
            computed: The experts of the rows that the stock kernel computed, call by call; None
                where the kernel of kept pairs is not installed.
            output_NH: The output; None where a server's kernel computed it.
        """
        self.experts_hidden_NH, self.index_NA, self.weight_NA = hidden_NH, index_NA, weight_NA
        self.computed, self.output_NH = computed, output_NH

    @cached_property
    def groups(self) -> TokenGroups:
        """The capacity groups of the counted tokens."""
        return self.plan.on(self.topk_NK.device).groups

    @property
    def n_tokens(self) -> int:
        """The number of counted tokens, of all processes."""
        return self.groups.n_tokens

    @cached_property
    def topk_TK(self) -> Tensor:
        """The router's own choice for the counted tokens."""
        return self.groups.counted(self.topk_NK)

    @cached_property
    def scores(self) -> Scores:
        """The gate scores of the counted tokens."""
        return self.layer.gate.scores(self.groups.counted(self.logits_NE), self.topk_TK)

    @cached_property
    def router_input_TH(self) -> Tensor | None:
        """The router's input of the counted tokens; None where no decision reads it."""
        if not self.method.reads_hidden:
            return None
        assert self.hidden_NH is not None
        return self.groups.counted(self.hidden_NH.detach())

    @cached_property
    def image_T(self) -> Tensor | None:
        """True for a token of an image; None where there can be none."""
        return self.plan.on(self.topk_NK.device).image_T

    @cached_property
    def index_TA(self) -> Tensor:
        """The experts that were called for the counted tokens."""
        return self.groups.counted(self.index_NA)

    @cached_property
    def limit_G(self) -> Tensor:
        """The capacity of an expert, or of a device, in each group [G]."""
        gamma = self.method.uniform_gamma
        assert gamma is not None
        return self.plan.capacities((gamma,), self.layer, self.index_NA.device)[0]

    # Pairs and loads.

    @cached_property
    def called_TE(self) -> Tensor:
        """True for the pairs that the experts were called with, in whatever slots."""
        n_experts = self.layer.n_experts
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
        shape = len(self.groups.tokens), n_modalities, self.layer.n_experts
        return bucket_loads(cell_T, index_TS, amount_TS, shape)

    @cached_property
    def totals(self) -> Totals:
        """The sums over all processes, in one exchange between them."""
        n_experts = self.layer.n_experts
        called_TA = self.index_TA.clamp(0, n_experts - 1)
        parts = Totals(
            self.loads_GME(self.topk_TK, torch.ones_like(self.topk_TK)),
            self.loads_GME(called_TA, (self.index_TA < n_experts).long()),
            by_modality(self.count_CT, self.image_T),
            self._slots_of_pads(),
        )
        return Totals(*self.layer.ranks.totals(*parts))

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

    def by_unit(self, load_E: Tensor) -> Tensor:
        """Return the loads of experts […, E] as those of the units that have a capacity […, U]."""
        return load_E if self.method.granularity == "expert" else self.by_device(load_E)

    def by_device(self, load_E: Tensor) -> Tensor:
        """Return the loads of experts […, E] as loads of the emulated ranks […, R]."""
        placed_RN = self.calibrated if self.method.is_placed else None
        return by_rank(load_E, self.method.ep_size, placed_RN).sum(dim=-1)

    def _slots_of_pads(self) -> Tensor:
        """Return the number of slots of this process's pads []."""
        pads_N1 = self.plan.on(self.topk_NK.device).pads_N1 & (not self.method.is_stock)
        taken_NA = pads_N1 & (self.index_NA < self.layer.n_experts)
        # A forward that drops and adds nothing is the model's own, pads included, where a capacity
        # decides and one process has all experts.
        may_be_stock = self.layer.ranks is ALONE and self.method.unit is not None
        if may_be_stock and self.topk_NK.shape == self.index_NA.shape:
            taken_NA = taken_NA & (self.lost_TK.any() | (self.index_NA != self.topk_NK))
        return taken_NA.sum()


def by_modality(count_CT: Tensor, image_T: Tensor | None) -> Tensor:
    """Return the counts of tokens by modality [C, M]."""
    total_C = count_CT.sum(dim=1)
    if image_T is None:
        return total_C[:, None]
    of_images_C = (count_CT * image_T).sum(dim=1)
    return torch.stack([total_C - of_images_C, of_images_C], dim=1)
