"""Plan one forward of the model: its counted tokens, capacity groups and capacities."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from capmoe_eval.routing.assign import bucket_limits
from capmoe_eval.routing.capacity import TokenGroups, capacity, experts_per_rank, group_tokens
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.ranks import ALONE, Ranks

GAMMA_GRID: tuple[float, ...] = tuple(step / 4 for step in range(17))
"""γ = 0, 0.25, … 4, for which the meter counts drops beside the run's own γ (Figures 7, 17-20)."""


@dataclass
class ForwardPlan:
    """The tokens, groups and capacities of one forward, shared by its layers.

    Attributes:
        number: Number of forwards before this one.
        constrained: Whether this forward is under the capacity.
        counted_BS: Boolean [B, S], True for the tokens that count and take slots.
        groups: Their capacity groups.
        seen: (layer, ``router`` or ``experts``) of each module that ran so far.
        choices: The top-k of the counted tokens, by layer.
    """

    number: int
    constrained: bool
    counted_BS: Tensor
    groups: TokenGroups
    seen: list[tuple[int, str]] = field(default_factory=list)
    choices: dict[int, Tensor] = field(default_factory=dict)
    _on_device: dict[torch.device, TokenGroups] = field(default_factory=dict)
    _limits: dict[object, Tensor | None] = field(default_factory=dict)

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
            counted_BS: Boolean [B, S], True for the tokens that count; where several processes
                share the batch, this process's part.
            decode: Whether the forward is a decode step.
            ranks: The processes that share the experts.
        """
        constrained = method.decode == "constrained" or not decode
        own_B = counted_BS.sum(dim=1)
        share = ranks.share(own_B[:0] if ranks.idle else own_B)
        groups = group_tokens(counted_BS, ep_size=method.ep_size, scope=method.scope, share=share)
        return cls(number, constrained, counted_BS, groups)

    def groups_on(self, device: torch.device) -> TokenGroups:
        """Return the groups with their tensors on ``device``; they are moved once per forward."""
        if device not in self._on_device:
            self._on_device[device] = self.groups.to(device)
        return self._on_device[device]

    def limits(
        self, method: Method, top_k: int, n_experts: int, device: torch.device
    ) -> Tensor | None:
        """Return the capacity of each group [G], or None if the method bounds nothing."""
        key = ("limit", top_k, n_experts, device)
        if key not in self._limits:
            limits = bucket_limits(method, self.groups, top_k=top_k, n_experts=n_experts)
            self._limits[key] = None if limits is None else torch.tensor(limits, device=device)
        return self._limits[key]

    def grid(self, method: Method, top_k: int, n_experts: int, device: torch.device) -> Tensor:
        """Return the capacity of each group at each γ of :data:`GAMMA_GRID` [Γ, G]."""
        key = ("grid", top_k, n_experts, device)
        if key not in self._limits:
            sharing = (
                experts_per_rank(n_experts, method.ep_size) if method.granularity == "device" else 1
            )
            rows = [
                [
                    capacity(
                        gamma,
                        tokens,
                        top_k,
                        n_experts,
                        rounding=method.rounding,
                        experts=sharing,
                    )
                    for tokens in self.groups.tokens
                ]
                for gamma in GAMMA_GRID
            ]
            self._limits[key] = torch.tensor(rows, device=device)
        grid = self._limits[key]
        assert grid is not None
        return grid
