"""Register the definitions of the methods of other papers, and draw calibrations for them.

A decision is compared with the definition that every run is checked with (``kept_pairs``): NumPy
and loops that share no function with the decision.
"""

from __future__ import annotations

import torch
from capmoe_eval.routing.decision import TokenGroups
from capmoe_eval.routing.definition import RoutedTokens, expert_ranks
from capmoe_eval.routing.method import Method
from tests.routing.problems import calibration
from tests.routing.reference import Pair, Problem, definition
from torch import Tensor

from capmoe_methods.laser import Laser
from capmoe_methods.macs import MACS
from capmoe_methods.macs.decision import modality_bias, token_weights
from capmoe_methods.oea import OEA
from capmoe_methods.sere import SERE
from capmoe_methods.xshare import XShare


@definition(OEA, XShare, SERE, Laser, MACS)
def kept_by_definition(problem: Problem, method: Method) -> set[Pair]:
    """Return the pairs that the definition of a run's check keeps."""
    calibrated = None if problem.calibrated is None else torch.tensor(problem.calibrated).numpy()
    placed_RN = calibrated if method.is_placed else None
    score_TE, topk_TK = torch.tensor(problem.score), torch.tensor(problem.topk)
    rank_E = expert_ranks(problem.n_experts, method.ep_size, placed_RN)
    tokens = RoutedTokens(
        layer=0,
        forward=0,
        score_TE=score_TE.numpy(),
        ranking_TE=torch.tensor(problem.choice).numpy(),
        eligible_TE=torch.tensor(problem.eligible).numpy(),
        topk_TK=topk_TK.numpy(),
        weight_TK=score_TE.gather(1, topk_TK).double().numpy(),
        group_T=torch.tensor(problem.group).numpy(),
        rank_T=torch.tensor(problem.rank).numpy(),
        rank_E=rank_E,
        unit_E=rank_E,
        image_T=torch.tensor(problem.image).numpy(),
        hidden_TH=torch.tensor(problem.hidden).numpy(),
        calibrated=calibrated,
        details=_weighted(problem, method) if isinstance(method, MACS) else None,
    )
    kept_TE = method.kept_pairs(tokens)
    assert kept_TE is not None
    return {(token, expert) for token, expert in zip(*map(list, kept_TE.nonzero()), strict=True)}


def _weighted(problem: Problem, method: MACS) -> tuple[Tensor]:
    """Return the weights of the decision, which the definition of pairs takes as they are."""
    group_T = torch.tensor(problem.group)
    tokens = tuple(group_T.bincount().tolist())
    groups = TokenGroups(torch.arange(len(group_T)), group_T, group_T, tokens, len(group_T))
    image_T, hidden_TH = torch.tensor(problem.image), torch.tensor(problem.hidden)
    unit_T = token_weights(hidden_TH, image_T, groups, method.delta)
    return (unit_T,)


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
