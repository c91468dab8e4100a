"""Draw placements of experts; which rank holds an expert is a part of every method's definition."""

from __future__ import annotations

import torch
from capmoe_eval.routing.method import Method
from tests.routing.problems import calibration
from torch import Tensor


@calibration("expert_loads")
def placement(method: Method, n_experts: int, generator: torch.Generator) -> Tensor:
    """Return the experts of each rank, rising, drawn at random [R, E/R]."""
    order_E = torch.randperm(n_experts, generator=generator)
    return order_E.view(method.ep_size, -1).sort(dim=1).values
