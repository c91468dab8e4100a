"""Lay out the counted tokens of a layer's forward as the definitions take them."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from capmoe_eval.routing import definition
from capmoe_eval.routing.definition import Array, RoutedTokens
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.observers.invariants.masks import as_array

# Shape suffixes: N rows of the batch, T counted tokens, E experts, R ranks, G capacity groups.


def routed_tokens(
    event: LayerForward,
    method: Method,
    calibrated: Tensor | None,
    is_counted_N: Array,
    is_image_N: Array | None,
) -> RoutedTokens:
    """Return this process's tokens of a layer, with groups by their sequences.

    Args:
        event: What happened in the layer.
        method: The method, with the layer's own γ.
        calibrated: What a calibration measured of the layer.
        is_counted_N: True for a row that counts.
        is_image_N: True for a row of an image.
    """
    assert event.plan.start is not None
    layer, router, start = event.layer, event.router, event.plan.start
    row_T = np.flatnonzero(is_counted_N)
    rows = torch.from_numpy(row_T).to(router.topk_NK.device)
    scores = layer.gate.scores(router.logits_NE[rows], router.topk_NK[rows])
    eligible_TE = np.ones(scores.score_TE.shape, dtype=bool)
    precision = torch.finfo(router.weight_NK.dtype)
    group_T, rank_T = definition.capacity_groups(
        row_T // max(start.n_new, 1),
        start.n_sequences,
        ep_size=method.ep_size,
        scope=method.scope,
        # The number of this process among those that share the model, and theirs.
        process=getattr(layer.ranks, "rank", 0),
        processes=layer.ranks.size,
    )
    array = None if calibrated is None else as_array(calibrated)
    placed_RN = array if method.is_placed else None
    rank_E = definition.expert_ranks(layer.n_experts, method.ep_size, placed_RN)
    by_device = method.granularity == "device"
    hidden_TH = None
    if method.reads_hidden:
        assert router.hidden_NH is not None
        hidden_TH = as_array(router.hidden_NH[rows].float())
    return RoutedTokens(
        event.number,
        start.number,
        score_TE=as_array(scores.score_TE),
        ranking_TE=as_array(scores.ranking_TE),
        eligible_TE=eligible_TE if scores.eligible_TE is None else as_array(scores.eligible_TE),
        topk_TK=as_array(router.topk_NK[rows]),
        weight_TK=as_array(router.weight_NK[rows].double()),
        weight_eps=float(precision.eps),
        weight_smallest=float(precision.smallest_normal),
        group_T=group_T,
        rank_T=rank_T,
        rank_E=rank_E,
        unit_E=rank_E if by_device else np.arange(layer.n_experts),
        image_T=None if is_image_N is None else is_image_N[row_T],
        hidden_TH=hidden_TH,
        calibrated=array,
        details=None if event.assignment is None else event.assignment.details,
    )


def with_limits(tokens: RoutedTokens, method: Method) -> RoutedTokens:
    """Return the tokens of the whole batch with the capacity of each group, if there is one."""
    if not method.bounds_pairs:
        return tokens
    factor = method.factor
    assert factor is not None
    assert factor.uniform is not None
    by_device = method.granularity == "device"
    limit_G = definition.capacities(
        factor.uniform,
        tokens.tokens_G,
        top_k=tokens.top_k,
        n_experts=tokens.n_experts,
        rounding=method.rounding,
        sharing=tokens.n_experts // method.ep_size if by_device else 1,
    )
    return dataclasses.replace(tokens, limit_G=limit_G)
