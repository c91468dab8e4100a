"""Plan one forward of the model: its counted tokens, capacity groups and capacities."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from capmoe_eval.routing.assign import bucket_limits
from capmoe_eval.routing.capacity import TokenGroups, group_tokens
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.ranks import ALONE, Ranks

GAMMA_GRID: tuple[float, ...] = tuple(step / 4 for step in range(17))
"""γ = 0, 0.25, … 4, for which the meter counts drops beside the run's own γ (Figures 7, 17-20)."""


@dataclass
class ForwardPlan:
    """The tokens, groups and capacities of one forward, shared by its layers."""

    method: Method
    number: int  # forwards before this one
    constrained: bool  # whether this forward is under the capacity
    counted_BS: Tensor  # True for the tokens that count and take slots
    groups: TokenGroups  # their capacity groups
    # (layer, "router" or "experts") of each module that ran so far
    seen: list[tuple[int, str]] = field(default_factory=list)
    # the top-k of the counted tokens, by layer
    choices: dict[int, Tensor] = field(default_factory=dict)
    _groups_on: dict[torch.device, TokenGroups] = field(default_factory=dict)
    _capacities: dict[object, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        method: Method,
        number: int,
        *,
        counted_BS: Tensor,
        decode: bool,
        ranks: Ranks = ALONE,
    ) -> ForwardPlan:
        """Return the plan of a forward.

        Args:
            method: The method.
            number: Number of forwards before this one.
            counted_BS: Boolean, True for the tokens that count, of this process's sequences.
            decode: Whether the forward is a decode step.
            ranks: The processes that share the experts.
        """
        constrained = method.decode == "constrained" or not decode
        own_B = counted_BS.sum(dim=1)
        share = ranks.share(own_B[:0] if ranks.idle else own_B)
        groups = group_tokens(counted_BS, ep_size=method.ep_size, scope=method.scope, share=share)
        return cls(method, number, constrained, counted_BS, groups)

    def groups_on(self, device: torch.device) -> TokenGroups:
        """Return the groups with their tensors on ``device``; they are moved once per forward."""
        if device not in self._groups_on:
            self._groups_on[device] = self.groups.to(device)
        return self._groups_on[device]

    def capacities(
        self, gammas: tuple[float, ...], top_k: int, n_experts: int, device: torch.device
    ) -> Tensor:
        """Return the capacity of each group at each γ [Γ, G]; computed once per forward."""
        key = (gammas, top_k, n_experts, device)
        if key not in self._capacities:
            rows = [
                bucket_limits(
                    self.method, self.groups, top_k=top_k, n_experts=n_experts, gamma=gamma
                )
                for gamma in gammas
            ]
            self._capacities[key] = torch.tensor(rows, device=device)
        return self._capacities[key]
