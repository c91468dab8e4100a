"""Turn a layer's forward into the definitions' input, and define scores, weights and outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from capmoe_eval.routing import definition
from capmoe_eval.routing.definition import Array, RoutedTokens
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.gates import Gate
from capmoe_eval.wrapper.kernel import KERNEL_TOLERANCE, single_pairs
from capmoe_eval.wrapper.plan import ForwardPlan

# Shape suffixes: B sequences, S positions, N = B·S rows, T counted tokens, E experts, R ranks, G
# capacity groups.

_KINDS = ("image", "video", "audio")  # whose placeholders a configuration may name


def as_array(tensor: Tensor) -> Array:
    """Return a tensor in host memory."""
    array: Array = tensor.detach().cpu().numpy()
    return array


def is_under_method(decode: str, plan: ForwardPlan) -> bool:
    """Return whether a forward is under the method, by its knob ``decode``.

    In a generation every forward after the prompt's is a decode step, elsewhere one of one new
    token per sequence behind a filled cache.
    """
    is_decode_step = plan.n_new == 1 and plan.n_cached > 0
    if plan.is_prompt is not None:
        is_decode_step = not plan.is_prompt
    if decode == "constrained":
        return True
    return is_decode_step if decode == "only" else not is_decode_step


def counted_tokens(plan: ForwardPlan, *, count_padding: bool) -> Array:
    """Return a mask of the tokens of the flattened batch that count in T and take slots [N]."""
    shape = (plan.n_sequences, plan.n_new)
    if plan.mask_BM is None or count_padding:
        is_counted_BS = np.ones(shape, dtype=bool)
    else:
        last = plan.first_column + plan.n_new
        is_counted_BS = as_array(plan.mask_BM != 0)[:, plan.first_column : last]
    is_counted_N: Array = is_counted_BS.reshape(-1) & (not plan.is_idle)
    return is_counted_N


def _groups(plan: ForwardPlan, method: Method, row_T: Array) -> tuple[Array, Array]:
    """Return the capacity group and the emulated rank of each counted token of this process."""
    return definition.capacity_groups(
        row_T // max(plan.n_new, 1),
        plan.n_sequences,
        ep_size=method.ep_size,
        scope=method.scope,
        # The number of this process among those that share the model, and theirs.
        process=getattr(plan.ranks, "rank", 0),
        processes=plan.ranks.size,
    )


def _is_misread(plan: ForwardPlan, is_counted_N: Array) -> bool:
    """Return whether the counted tokens differ from the last columns of the caller's mask.

    It needs neither the length of the cache nor what was read of the mask before. A mask that is
    longer than the cached and new tokens, of a static cache, is not read again.
    """
    mask, n_new = plan.call_mask, plan.n_new
    if plan.is_idle or not isinstance(mask, Tensor) or mask.ndim != 2:
        return False
    if mask.shape[1] not in (n_new, plan.n_cached + n_new):
        return False
    is_real_BS = as_array(mask[:, mask.shape[1] - n_new :] != 0)
    is_counted_BS = is_counted_N.reshape(plan.n_sequences, n_new)
    is_off_B = (is_real_BS != is_counted_BS).any(axis=1)
    if plan.is_prompt is False:  # a sequence that has finished does not count
        is_off_B &= is_counted_BS.any(axis=1)
    return bool(is_off_B.any())


def are_misgrouped(plan: ForwardPlan, method: Method, is_counted_N: Array) -> bool:
    """Return whether a plan's groups are not the definition's, in any process.

    Processes that share the model ask together.
    """
    groups, row_T = plan.groups, np.flatnonzero(is_counted_N)
    group_T, rank_T = _groups(plan, method, row_T)
    planned = [as_array(of) for of in (groups.rows_T, groups.group_T, groups.rank_T)]
    tokens_G = np.bincount(planned[1], minlength=len(groups.tokens))
    if plan.ranks.size > 1 and method.scope == "sequence":  # whose numbers are of the whole batch
        group_T = group_T - group_T[:1] + planned[1][:1]
    is_off = not all(map(np.array_equal, planned, (row_T, group_T, rank_T)))
    is_off |= not method.count_padding and _is_misread(plan, is_counted_N)
    device = plan.counted_BS.device  # where processes exchange tensors
    counts = torch.from_numpy(np.append(tokens_G, is_off)).to(device)
    *tokens, n_off = plan.ranks.total(counts).tolist()
    return bool(n_off) or tokens != list(groups.tokens)


def image_tokens(plan: ForwardPlan) -> Array | None:
    """Return a mask of the image tokens of the flattened batch [N]; None if they cannot be told.

    They are told by the types of tokens, else by the ids that the configuration names. Generated
    tokens are text.
    """
    types_BS, ids_BS = plan.token_types_BS, plan.input_ids_BS
    shape = (plan.n_sequences, plan.n_new)
    if types_BS is not None and types_BS.shape == shape:
        is_image_BS = as_array(types_BS != 0)
    elif ids_BS is not None:
        names = (f"{kind}_token_{end}" for kind in _KINDS for end in ("id", "index"))
        ids = {getattr(plan.config, name, None) for name in names}
        is_image_BS = np.isin(as_array(ids_BS), [i for i in ids if isinstance(i, int)])
    else:
        return None
    is_image_BS[:, plan.prompt_length :] = False
    return np.ravel(is_image_BS)


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
    layer = event.layer
    row_T = np.flatnonzero(is_counted_N)
    rows = torch.from_numpy(row_T).to(event.topk_NK.device)
    scores = layer.gate.scores(event.logits_NE[rows], event.topk_NK[rows])
    eligible_TE = np.ones(scores.score_TE.shape, dtype=bool)
    precision = torch.finfo(event.weight_NK.dtype)
    group_T, rank_T = _groups(event.plan, method, row_T)
    array = None if calibrated is None else as_array(calibrated)
    placed_RN = array if method.is_placed else None
    rank_E = definition.expert_ranks(layer.n_experts, method.ep_size, placed_RN)
    by_device = method.granularity == "device"
    hidden_TH = None
    if method.reads_hidden:
        assert event.hidden_NH is not None
        hidden_TH = as_array(event.hidden_NH[rows].float())
    return RoutedTokens(
        event.number,
        event.plan.number,
        score_TE=as_array(scores.score_TE),
        ranking_TE=as_array(scores.ranking_TE),
        eligible_TE=eligible_TE if scores.eligible_TE is None else as_array(scores.eligible_TE),
        topk_TK=as_array(event.topk_NK[rows]),
        weight_TK=as_array(event.weight_NK[rows].double()),
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
    sizes = {"top_k": tokens.top_k, "n_experts": tokens.n_experts}
    limit_G = definition.limits(method, factor.uniform, tokens.tokens_G, **sizes)
    return dataclasses.replace(tokens, limit_G=limit_G)


_FLOAT32 = float(np.finfo(np.float32).eps)
_SMALLEST = float(np.finfo(np.float32).smallest_normal)
_TIE = 2e-6
"""Relative difference of two groups' worths within which the router's own choice decides."""


def _softmax(logit_TE: Array) -> Array:
    power_TE = np.exp(logit_TE - logit_TE.max(axis=1, keepdims=True))
    share_TE: Array = power_TE / power_TE.sum(axis=1, keepdims=True)
    return share_TE


_SCORES: dict[str, Callable[[Array], Array]] = {
    "softmax": _softmax,
    "sigmoid": lambda logit_TE: np.exp(-np.logaddexp(0, -logit_TE)),
    "sqrtsoftplus": lambda logit_TE: np.sqrt(np.logaddexp(0, logit_TE)),
    "none": lambda logit_TE: logit_TE,
}


def scores_off(tokens: RoutedTokens, gate: Gate, logit_TE: Array) -> int:
    """Return how many gate scores and ranking scores differ from the recipe's.

    Scores are computed anew in float64, of all experts. Those in float32 round the argument of an
    exponential, by at most twice the largest logit, the sum of E, and a few operations. A token
    whose eligible groups are not the best ones counts with all of its experts.
    """
    if not logit_TE.size:
        return 0
    recipe, n_experts = gate.recipe, tokens.n_experts
    with np.errstate(all="ignore"):  # NaN is NaN in both
        score_TE = _SCORES[recipe.activation](logit_TE)
        most_T1 = np.where(np.isfinite(logit_TE), abs(logit_TE), 0).max(axis=1, keepdims=True)
        rounding_T1 = (2 * most_T1 + n_experts + 8) * _FLOAT32
        ranking_TE, base_TE, bias_E = score_TE, score_TE, np.zeros(n_experts)
        if gate.bias is not None:
            base_TE = score_TE if recipe.biased == "scores" else logit_TE
            bias_E = gate.bias.value_E.double().cpu().numpy()
            ranking_TE = base_TE + bias_E
        is_ineligible_TE = ~tokens.eligible_TE
        is_off_T: Array = np.asarray(is_ineligible_TE.any(axis=1))
        if recipe.groups != "none":
            is_off_T = _groups_off(tokens, gate, ranking_TE, rounding_T1)
            score_TE = np.where(is_ineligible_TE, 0.0, score_TE)
            ranking_TE = score_TE if gate.bias is None else ranking_TE
        is_off_TE = is_off_T[:, None] | _differs(tokens.score_TE, score_TE, rounding_T1 * score_TE)
        error_TE = rounding_T1 * (abs(base_TE) + abs(bias_E))
        return int((is_off_TE | _differs(tokens.ranking_TE, ranking_TE, error_TE)).sum())


def _differs(number: Array, expected: Array, error: Array) -> Array:
    is_close = abs(number - expected) <= error + _SMALLEST
    is_off: Array = ~(is_close | (number == expected) | (np.isnan(number) & np.isnan(expected)))
    return is_off


def _groups_off(tokens: RoutedTokens, gate: Gate, ranking_TE: Array, rounding_T1: Array) -> Array:
    """Return a mask of the tokens whose eligible experts are not those of the best groups [T]."""
    router: Any = gate.router
    by_group = (len(ranking_TE), int(router.num_group), -1)
    grouped = np.sort(ranking_TE.reshape(by_group), axis=2)
    n_best = 1 if gate.recipe.groups == "max" else 2
    worth_TG = grouped[:, :, -n_best:].sum(axis=2)
    is_in_TGN = tokens.eligible_TE.reshape(by_group)
    is_in_TG = is_in_TGN.any(axis=2)
    error_T = (_TIE + rounding_T1[:, 0]) * abs(ranking_TE).max(axis=1) * n_best
    worst_T = np.where(is_in_TG, worth_TG, np.inf).min(axis=1)
    other_T = np.where(is_in_TG, -np.inf, worth_TG).max(axis=1)
    is_whole_T = (is_in_TGN.all(axis=2) == is_in_TG).all(axis=1)
    is_off_T: Array = ~is_whole_T | (is_in_TG.sum(axis=1) != int(router.topk_group))
    is_off_T |= other_T > worst_T + error_T
    return is_off_T


def outputs_off(event: LayerForward, row_P: Array) -> int:
    """Return how many rows have another output than the sum of their pairs, computed one by one.

    Every pair is computed by the loop in the class of the experts, and the sum in float64. Of the
    kernels' rounding the same is allowed as on entry, relative to the largest sum of amounts.
    """
    experts = event.layer.experts
    assert event.output_NH is not None
    rows_P = torch.from_numpy(row_P).to(event.index_NA.device)
    index_PA, weight_PA = event.index_NA[rows_P], event.weight_NA[rows_P]
    row_S, slot_S = (index_PA < event.layer.n_experts).nonzero().unbind(dim=1)
    output_PH = event.output_NH.flatten(0, -2)[rows_P].double()
    sums = torch.zeros_like(output_PH)
    amounts = torch.zeros_like(output_PH)
    if len(row_S):
        hidden_SH = event.experts_hidden_NH.flatten(0, -2)[rows_P[row_S]]
        pair = index_PA[row_S, slot_S], weight_PA[row_S, slot_S]
        pairs_SH = single_pairs(experts, hidden_SH, *pair).double()
        sums.index_add_(0, row_S, pairs_SH)
        amounts.index_add_(0, row_S, pairs_SH.abs())
    kind, dtypes = output_PH.device.type, [event.output_NH.dtype]
    if torch.is_autocast_enabled(kind):
        dtypes.append(torch.get_autocast_dtype(kind))
    allowed = max(KERNEL_TOLERANCE[dtype] for dtype in dtypes) * amounts.amax()
    is_off_PH = ~((output_PH - sums).abs() <= allowed) & sums.isfinite()
    return int(is_off_PH.any(dim=1).sum())


def weights_off(
    tokens: RoutedTokens, method: Method, gate: Gate, kept_TE: Array, weight_TE: Array
) -> Array:
    """Return a mask of the pairs whose weights at the experts are not those of the definition.

    A pair of the router's own choice has the router's own weight, bit for bit. A weight that the
    suite computes is a sum of at most E scores in float32, a quotient and two products, rounded to
    the precision of the router's weights. Its error is at most (E + 4) roundings in float32 and one
    in that precision.
    """
    moved = method.combine_weights(tokens)
    if moved is None:
        moved = _combine_weights(tokens, gate, kept_TE, method.renormalize)
    expected_TE, is_computed_TE = moved
    rounding = (tokens.n_experts + 4) * _FLOAT32 + tokens.weight_eps
    error_TE = rounding * np.maximum(abs(expected_TE), tokens.weight_smallest) * is_computed_TE
    is_equal_TE = (weight_TE == expected_TE) | (np.isnan(weight_TE) & np.isnan(expected_TE))
    is_close_TE = abs(weight_TE - expected_TE) <= error_TE
    is_off_TE: Array = ~(is_equal_TE | is_close_TE)
    return is_off_TE


def _combine_weights(
    tokens: RoutedTokens, gate: Gate, kept_TE: Array, renormalize: str
) -> tuple[Array, Array]:
    """Return the weight of every pair [T, E], and a mask of those that the suite computes."""
    chosen_TE, router_TE = tokens.chosen_TE, tokens.router_weight_TE
    score_TE = tokens.score_TE.astype(np.float64)
    scale_E = np.full(tokens.n_experts, gate.scale)
    if gate.expert_scale is not None:
        scale_E = scale_E * gate.expert_scale.value_E.cpu().numpy()
    is_computed_TE = ~chosen_TE
    total_T1 = np.ones((len(score_TE), 1))
    if gate.recipe.normalises or renormalize == "always":
        summed_TE = chosen_TE  # the dropless model's own denominator
        if renormalize != "before":
            is_anew_T = (kept_TE != chosen_TE).any(axis=1) | (not gate.recipe.normalises)
            summed_TE = np.where(is_anew_T[:, None], kept_TE, chosen_TE)
            is_computed_TE = is_computed_TE | is_anew_T[:, None]
        total_T1 = (score_TE * summed_TE).sum(axis=1, keepdims=True) + gate.recipe.epsilon
        total_T1 = np.maximum(total_T1, getattr(gate.router, "norm_min", 1e-20))
    return np.where(is_computed_TE, score_TE / total_T1 * scale_E, router_TE), is_computed_TE
