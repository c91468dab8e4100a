"""Wrong values at every stage of a decision: each stage with every change of values like its own.

Not every change has an effect at every stage; some change of every stage has.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.wrapper.mutations.mutation import Change, other_knobs, stage


def _set(mask: Tensor, place: int, value: bool) -> Tensor:
    """Change the first or the last place that has another value."""
    mask, places = mask.clone(), (mask != value).nonzero()
    if len(places):
        mask[tuple(places[place])] = value
    return mask


def _in_rows(values: Tensor, of_rows: Tensor) -> Tensor:
    return values * of_rows.view(-1, *[1] * (values.ndim - 1))


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.zeros_like,
    "all": torch.ones_like,
    "the others": lambda mask: ~mask,
    "those of the row before": lambda mask: mask.roll(1, dims=0),
    "those of the place before": lambda mask: mask.roll(1, dims=-1),
    "mirrored": lambda mask: mask.flip(-1),
    "without the first": lambda mask: _set(mask, 0, False),
    "without the last": lambda mask: _set(mask, -1, False),
    "with one more": lambda mask: _set(mask, 0, True),
    "without every other row": lambda mask: _in_rows(mask, torch.arange(len(mask)) % 2 > 0),
    "of the first half": lambda mask: _in_rows(mask, torch.arange(len(mask)) < len(mask) // 2),
    "without the first place": lambda mask: mask & (torch.arange(mask.shape[-1]) > 0),
    "without the last place": lambda mask: mask & (torch.arange(mask.shape[-1], 0, -1) > 1),
}
NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "those of the row before": lambda x: x.roll(1, dims=0),
    "those of the next row": lambda x: x.roll(-1, dims=0),
    "those of the place before": lambda x: x.roll(1, dims=-1),
    "of the last row first": lambda x: x.flip(0),
    "mirrored": lambda x: x.flip(-1),
    "of the first row": lambda x: x[:1].expand_as(x).contiguous(),
    "of the first place": lambda x: x[..., :1].expand_as(x).contiguous(),
}
SCORES: dict[str, Callable[[Tensor], Tensor]] = NUMBERS | {
    "from the highest to the lowest": lambda x: 1 - x,
    "with two decimals": lambda x: (x * 20).round() / 20,
    "a share of the row's best": lambda x: x / x.amax(dim=-1, keepdim=True),
    "halved at odd places": lambda x: x * 2.0 ** -(torch.arange(x.shape[-1]) % 2),
    "halved in odd rows": lambda x: _in_rows(x, 2.0 ** -(torch.arange(len(x)) % 2)),
    "all alike": torch.ones_like,
}
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = NUMBERS | {
    "halved": lambda w: w / 2,
    "in bfloat16": lambda w: w.bfloat16().to(w.dtype),
    "all alike": lambda w: torch.full_like(w, 1 / 3),
    "squared": lambda w: w**2,
    "negative": lambda w: -w,
    "a thousandth larger": lambda w: w * 1.001,
    "nothing": lambda w: 0 * w,
}
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "that of the expert before": lambda weight: weight.roll(1, dims=0),
    "a tenth smaller": lambda weight: 0.9 * weight,
    "in bfloat16": WEIGHTS["in bfloat16"],
}
FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "its share of the row's sum": lambda w: w / w.sum(dim=1, keepdim=True).clamp_min(1e-9),
    "its square root": lambda w: w.abs().sqrt(),
    "1": torch.ones_like,
}
EXPERTS: dict[str, Callable[[Tensor], Tensor]] = {
    "the next expert": lambda index: (index + 1) % 8,
    "one of the other rank": lambda index: (index + 4) % 8,
    "expert E-1-j": lambda index: 7 - index,
    "that of the token before": lambda index: index.roll(1, dims=0),
    "that of the next slot": lambda index: index.roll(-1, dims=-1),
}
WHOLE: dict[str, Callable[[int], int]] = {
    "one too low": lambda n: max(n - 1, 0),
    "one too high": lambda n: n + 1,
    "three too high": lambda n: n + 3,
    "doubled": lambda n: 2 * n,
    "at least sixteen": lambda n: max(n, 16),
    "a multiple of eight": lambda n: -(-n // 8) * 8,
    "nothing": lambda _: 0,
}
GROUPS: dict[str, Callable[[list[int]], list[int]]] = {
    "that of the first group": lambda of: [of[0]] * len(of),
    "those of the groups in reverse": lambda of: list(of)[::-1],
    "that of all groups": lambda of: [sum(of)] * len(of),
    "the mean of the groups": lambda of: [sum(of) // len(of)] * len(of),
    "for one group without a limit": lambda of: [*list(of)[:-1], 9999],
    "one more for one group": lambda of: [of[0] + 1, *list(of)[1:]],
}


def _of_others(change: Change) -> Callable[..., Any]:
    """Change the gate's scores of the experts outside a token's top-k; the order stays."""

    def other(scores: Any, _call: Any) -> Any:
        score_TE, topk_TK = scores.score_TE, scores.topk_TK
        changed_TE = change(score_TE).scatter(1, topk_TK, score_TE.gather(1, topk_TK))
        return dataclasses.replace(scores, score_TE=changed_TE, choice_TE=scores.ranking_TE)

    return other


def _of_caller(change: Change) -> Callable[..., Any]:
    """Change the mask as it is read of the call, for the decision and the definition alike."""
    return lambda read, _call: (change(read[0].bool()), read[1])


def _of_kernel(change: Change) -> Callable[..., Any]:
    """The kernel computes with weights that it kept, and the model's were changed in place."""

    def stale(kernel: Callable[..., Tensor], call: Any) -> Callable[..., Tensor]:
        def mutated(*tensors: Any) -> Tensor:
            weights = [weight.data for weight in call.experts.parameters()]
            true = [weight.clone() for weight in weights]
            try:
                for weight, value in zip(weights, true, strict=True):
                    weight.copy_(change(value))
                return kernel(*tensors)
            finally:
                for weight, value in zip(weights, true, strict=True):
                    weight.copy_(value)

        return mutated

    return stale


def _of_rows(change: Change) -> Callable[..., Any]:
    """The kernel multiplies the outputs of pairs by other weights than it is called with."""
    return lambda kernel, _call: (
        lambda experts, hidden, index, weight: kernel(experts, hidden, index, change(weight))
    )


STAGES = [
    # what a decision is made from
    *stage("the mask of real tokens is", "new_columns->", MASKS),
    *stage("the mask that the caller gave is", "_Forward._mask->", MASKS, _of_caller),
    *stage("the tokens that count are", "group_tokens(counted_BS)", MASKS),
    *stage("a token's group is", "group_tokens->group_T", NUMBERS),
    *stage("a token's rank is", "hook.decide(groups.rank_T)", NUMBERS),
    *stage("T is", "hook.decide(groups.tokens)", GROUPS),
    *stage("the scores are", "hook.decide(scores.score_TE)", SCORES),
    *stage("the gate's scores are", "Gate.scores->score_TE", SCORES),
    *stage("images are", "hook.decide(image_T)", MASKS),
    *stage("images are found to be", "find_images->", MASKS),
    *stage("scores of other experts are", "Gate.scores->", SCORES, _of_others),
    *stage("a random number is", "RandomDrop.random_numbers->", NUMBERS),
    # capacities, devices, candidates
    *stage("C is", "capacity->", WHOLE),
    *stage("the Cs are", "Method.limits->", GROUPS),
    *stage("amounts by rank are", "by_rank(amount_E)", NUMBERS),
    *stage("what may be added is", "addable->", MASKS),
    # experts of a whole batch
    *stage("the silent experts are", "disabled_experts->", MASKS),
    # what comes of it
    *stage("kept pairs are", "hook.decide->keep_TS", MASKS),
    *stage("the expert of a pair is", "hook.decide->index_TS", EXPERTS),
    *stage("weights are", "hook.combine->", WEIGHTS),
    *stage("the kernel's sums are", "kernel.combine->", WEIGHTS),
    *stage("the kernel's own copy of the experts is", "kernel.stock_experts->", COPIES, _of_kernel),
    *stage("the kernel weighs a pair by", "kernel.stock_experts->", FACTORS, _of_rows),
]

KNOBS: dict[str, list[Any]] = {
    "name": ["order", "reverse_order", "random", "score", "token_reroute"],
    "gamma": [0.3, 0.75, 1.4, 2.0],
    "ep_size": [1],
    "scope": ["sequence"],
    "rounding": ["floor"],
    "granularity": ["expert", "device"],
    "modality": ["image_first", "text_first", "uniform"],
    "seed": [0, 4],
    "candidates": ["local", "ranked", "global"],
    "m": [1, 2, 4],
    "protect_topk": [False, True],
    "max_k": [False, True],
    "rounds": [1, 2, 4],
}
"""Other values of knobs, under each of which decisions are made."""

MUTATIONS = [*STAGES, *other_knobs(KNOBS)]
