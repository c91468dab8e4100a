"""Wrong values at every stage of a decision: each stage with every change of values like its own.

Not every change has an effect at every stage; some change of every stage has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.wrapper.mutations import mutation as kinds
from tests.wrapper.mutations.mutation import Kind, Mutation, argument, decided_by_part, result
from tests.wrapper.mutations.settings import Setting

Concerns = Callable[[Setting], bool]


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


def first(kind: Kind) -> Kind:
    """Take a change of one value for one that gets other things, too."""
    return lambda name, change, *more: kind(name, lambda value, *_, **__: change(value), *more)


def _moved(name: str, change: Callable[[Tensor], Tensor], *more: Any) -> Mutation:
    def other(decided: Any, _call: Any) -> Any:
        return kinds.dataclasses.replace(decided, index_TS=change(decided.index_TS))

    return kinds.outcome(name, other, *more)


def in_argument(name: str) -> Kind:
    return lambda title, change, *more: kinds.decided_by(name)(
        title, lambda call: change(call[name]), *more
    )


def _of_others(name: str, change: Callable[[Tensor], Tensor], *more: Any) -> Mutation:
    """Change the gate's scores of the experts outside a token's top-k; the order stays."""

    def other(scores: Any, *_: Any) -> Any:
        score_TE, topk_TK = scores.score_TE, scores.topk_TK
        changed_TE = change(score_TE).scatter(1, topk_TK, score_TE.gather(1, topk_TK))
        return kinds.dataclasses.replace(scores, score_TE=changed_TE, choice_TE=scores.ranking_TE)

    return result("Gate.scores")(name, other, *more)


def _of_caller(name: str, change: Callable[[Tensor], Tensor], *more: Any) -> Mutation:
    """Change the mask as it is read of the call, for the decision and the definition alike."""

    def other(read: tuple[Tensor, int], *_: Any) -> tuple[Tensor, int]:
        return change(read[0].bool()), read[1]

    return result("_ForwardHooks._mask")(name, other, *more)


@contextmanager
def _in_place(weights: list[Tensor], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Have weights other values, of which no version tells; restore them on exit."""
    true = [weight.data.clone() for weight in weights]
    for weight, value in zip(weights, true, strict=True):
        weight.data.copy_(change(value))
    try:
        yield
    finally:
        for weight, value in zip(weights, true, strict=True):
            weight.data.copy_(value)


def _of_kernel(name: str, change: Callable[[Tensor], Tensor], *more: Any) -> Mutation:
    """The kernel computes with weights that it kept, and the model's were changed in place."""

    def stale(kernel: Callable[..., Tensor], experts: Any, _: str) -> Callable[..., Tensor]:
        def mutated(*call: Any) -> Tensor:
            with _in_place(list(experts.parameters()), change):
                return kernel(*call)

        return mutated

    return result("kernel.stock_experts")(name, stale, *more)


def _of_rows(name: str, change: Callable[[Tensor], Tensor], *more: Any) -> Mutation:
    """The kernel multiplies the outputs of pairs by other weights than it is called with."""

    def reweighed(kernel: Callable[..., Tensor], *_: Any) -> Callable[..., Tensor]:
        return lambda experts, hidden, index, weight: kernel(experts, hidden, index, change(weight))

    return result("kernel.stock_experts")(name, reweighed, *more)


def named(*names: str) -> Concerns:
    return lambda setting: setting.name in names


def has_capacity(setting: Setting) -> bool:
    return setting.has_capacity


def has_modalities(setting: Setting) -> bool:
    return setting.method.modality != "uniform"


def _has_images(setting: Setting) -> bool:
    return setting.method.modality_setting is not None


def _capped(setting: Setting) -> bool:
    return setting.is_capped


def everywhere(_setting: Setting) -> bool:
    return True


_LOCAL: Concerns = lambda s: s.rule == "local"  # noqa: E731
_BY_SCORE: Concerns = lambda s: s.by_score  # noqa: E731

Stage = tuple[str, Kind, Mapping[str, Any], Concerns]
"""A stage, the kind of its mutations, their changes, and whom they concern."""

STAGES: list[Stage] = [
    # what a decision is made from
    ("the mask of real tokens is", first(result("new_columns")), MASKS, everywhere),
    ("the mask that the caller gave is", _of_caller, MASKS, everywhere),
    ("the tokens that count are", argument("group_tokens", 0), MASKS, everywhere),
    ("a token's group is", first(result("group_tokens", "group_T")), NUMBERS, has_capacity),
    ("a token's rank is", decided_by_part("groups", "rank_T"), NUMBERS, _LOCAL),
    ("T is", decided_by_part("groups", "tokens"), GROUPS, _capped),
    ("the scores are", decided_by_part("scores", "score_TE"), SCORES, _BY_SCORE),
    ("the gate's scores are", first(result("Gate.scores", "score_TE")), SCORES, _BY_SCORE),
    ("images are", in_argument("image_T"), MASKS, _has_images),
    ("images are found to be", first(result("ImageFinder.find")), MASKS, _has_images),
    ("scores of other experts are", _of_others, SCORES, lambda s: s.adds and s.by_score),
    ("a random number is", first(result("RandomDrop.random_numbers")), NUMBERS, named("random")),
    # capacities, devices, candidates
    ("C is", first(result("capacity")), WHOLE, lambda s: s.has_capacity and s.name != "macs"),
    ("the Cs are", first(result("Method.limits")), GROUPS, _capped),
    ("amounts by rank are", argument("by_rank", 0), NUMBERS, _LOCAL),
    ("what may be added is", first(result("addable")), MASKS, lambda s: s.rule in "local global"),
    # experts of a whole batch
    ("the silent experts are", first(result("disabled_experts")), MASKS, named("expert_drop")),
    # what comes of it
    ("kept pairs are", first(kinds.kept), MASKS, everywhere),
    ("the expert of a pair is", _moved, EXPERTS, everywhere),
    ("weights are", first(kinds.weights), WEIGHTS, everywhere),
    ("the kernel's sums are", first(result("kernel.combine")), WEIGHTS, everywhere),
    ("the kernel's own copy of the experts is", _of_kernel, COPIES, everywhere),
    ("the kernel weighs a pair by", _of_rows, FACTORS, everywhere),
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


def _with(knob: str, value: Any) -> Mutation:
    def concerns(setting: Setting) -> bool:
        method = setting.method
        if knob == "name":
            return setting.is_capped and setting.name not in (value, "macs")
        if (setting.rule, value) == ("global", "ranked"):  # with as many candidates
            return False
        return getattr(method, knob, value) != value

    return kinds.knobs(f"other knobs: {knob}={value}", lambda _: {knob: value}, concerns)


def mutations(stages: Sequence[Stage], knobs: Mapping[str, list[Any]]) -> list[Mutation]:
    """Return each stage with each of its changes, and each knob with each of its other values."""
    return [
        *(
            kind(f"{stage}: {name}", change, concerns)
            for stage, kind, changes, concerns in stages
            for name, change in changes.items()
        ),
        *(_with(knob, value) for knob, values in knobs.items() for value in values),
    ]


MUTATIONS = mutations(STAGES, KNOBS)
