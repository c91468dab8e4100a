"""Draw calibrations of the methods of other papers, for the random problems of the tests."""

import torch
from capmoe_eval.routing.method import Method
from tests.routing.problems import calibration
from torch import Tensor

from capmoe_methods.macs import MACS
from capmoe_methods.macs.decision import modality_bias
from capmoe_methods.sere import SERE


@calibration("expert_similarity")
def similarity(method: SERE, n_experts: int, generator: torch.Generator) -> Tensor:
    """Return similarities of the experts: few distinct values, of half the layers mostly 0."""
    size, shape = 5, (n_experts, n_experts)
    drawn_EE = torch.randint(size, shape, generator=generator) / (size - 1)
    if int(torch.randint(2, (), generator=generator)):
        drawn_EE *= torch.rand(shape, generator=generator) < 0.3
    return torch.minimum(drawn_EE, drawn_EE.T).fill_diagonal_(1)


@calibration("expert_modalities")
def modalities(method: MACS, n_experts: int, generator: torch.Generator) -> Tensor:
    """Return the experts' modalities, by random frequencies and the method's threshold."""
    visual_E, text_E = torch.randint(5, (2, n_experts), generator=generator) / 4
    return modality_bias(visual_E, text_E, method.modality_threshold)


@calibration("expert_loads")
def placement(method: Method, n_experts: int, generator: torch.Generator) -> Tensor:
    """Return the experts of each rank, rising, drawn at random [R, E/R]."""
    order_E = torch.randperm(n_experts, generator=generator)
    return order_E.view(method.ep_size, -1).sort(dim=1).values
