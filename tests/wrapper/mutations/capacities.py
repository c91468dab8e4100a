"""Wrong capacities, and wrong groups of tokens that share them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.routing.tokens import TokenGroups
from tests.wrapper.mutations.concerns import (
    both,
    candidates,
    capped,
    in_blocks,
    named,
    neither,
    per_device,
    per_expert,
    placed,
    text_alone,
    under,
    with_capacity,
)
from tests.wrapper.mutations.mutation import Mutation, argument, knobs, of_first_call, result
from tests.wrapper.mutations.settings import Setting

_C = "routing.capacity:capacity"
_LIMITS = "routing.method:Method.limits"
_GROUPS = "routing.tokens:group_tokens"

_BASE = "extensions.macs.decision:base_capacity"
_MACS = named("macs")

Capacity = Callable[..., int]


def _in_c(
    name: str, wrap: Callable[[Capacity], Capacity], concerns: Any, *more: Any
) -> tuple[Mutation, Mutation]:
    """Return a mutation of C, and the same of MACS' C, which may exceed T."""

    def of_base(base_capacity: Capacity) -> Capacity:
        def capacity(gamma: float, tokens: int, top_k: int, n_experts: int, **named: Any) -> int:
            sizes = {"top_k": top_k, "n_experts": n_experts} | {"rounding": named["rounding"]}
            return base_capacity(Fraction(str(gamma)).as_integer_ratio(), tokens, **sizes)

        def mutated(gamma_ratio: tuple[int, int], tokens: int, **sizes: Any) -> int:
            return wrap(capacity)(gamma_ratio[0] / gamma_ratio[1], tokens, **sizes)

        return mutated

    return (
        Mutation(name, _C, wrap, both(concerns, neither(_MACS)), *more),
        Mutation(name, _BASE, of_base, both(concerns, _MACS), *more),
    )


def _changed(name: str, change: Callable[[int], int], concerns: Any) -> tuple[Mutation, Mutation]:
    """Return a mutation of C, from its true value."""

    def wrap(capacity: Capacity) -> Capacity:
        return lambda *sizes, **named: change(capacity(*sizes, **named))

    return _in_c(name, wrap, concerns)


def _of_other(
    name: str, change: Callable[..., dict[str, Any]], *more: Any
) -> tuple[Mutation, Mutation]:
    """Return a mutation of C that computes it from other arguments."""

    def wrap(capacity: Capacity) -> Capacity:
        def mutated(gamma: float, tokens: int, top_k: int, n_experts: int, **named: Any) -> int:
            sizes = {"gamma": gamma, "tokens": tokens, "top_k": top_k, "n_experts": n_experts}
            return capacity(**sizes | named | change(**sizes | named))

        return mutated

    return _in_c(name, wrap, *more)


def _in_floats(capacity: Capacity) -> Capacity:
    def mutated(gamma: float, tokens: int, top_k: int, n_experts: int, **more: Any) -> int:
        return math.ceil(gamma * top_k / n_experts * more.get("experts", 1) * tokens)

    return mutated


def _exact(setting: Setting) -> Setting:
    """Return a setting in which γ·T·K/E is whole, and above that in binary fractions."""
    return dataclasses.replace(setting, lengths=((10,) * 5,)).under(gamma=0.8)


def _with_tokens(name: str, tokens: Callable[[TokenGroups], list[int]]) -> Mutation:
    """Return a mutation of the decision that is made with other numbers of tokens."""

    def other(call: dict[str, Any]) -> TokenGroups:
        groups: TokenGroups = call["groups"]
        return dataclasses.replace(groups, tokens=tuple(tokens(groups)))

    return argument(name, "groups", other, capped)


_IN_C = (
    *_changed("C is one too low", lambda c: max(c - 1, 0), with_capacity),
    *_changed("C is one too high", lambda c: c + 1, with_capacity),
    *_changed("C is three too high", lambda c: c + 3, with_capacity),
    *_changed("C is at least sixteen", lambda c: max(c, 16), per_expert),
    *_changed("C is a multiple of eight", lambda c: -(-c // 8) * 8, capped),
    *_of_other("C is rounded down", lambda **_: {"rounding": "floor"}, with_capacity),
    *_of_other(
        "C is rounded up where down is asked for",
        lambda **_: {"rounding": "ceil"},
        with_capacity,
        under(rounding="floor"),
    ),
    *_of_other("C of K + 1", lambda top_k, **_: {"top_k": top_k + 1}, with_capacity),
    *_of_other("C of K - 1", lambda top_k, **_: {"top_k": top_k - 1}, with_capacity),
    *_of_other("C of E - 1", lambda n_experts, **_: {"n_experts": n_experts - 1}, with_capacity),
    *_of_other("C of T + 3", lambda tokens, **_: {"tokens": tokens + 3}, with_capacity),
    *_of_other("C of twice γ", lambda gamma, **_: {"gamma": 2 * gamma}, with_capacity),
    *_of_other("γ is a whole number", lambda gamma, **_: {"gamma": round(gamma)}, with_capacity),
    Mutation("γ is a binary fraction", _C, _in_floats, both(per_expert, text_alone), _exact),
    *_of_other("a device has the C of one expert", lambda **_: {"experts": 1}, per_device),
    result(
        "a device has the rounded C of each expert",
        _C,
        lambda c, *_, experts=1, **__: experts * -(-c // experts),
        per_device,
    ),
    *_of_other(
        "a device has another expert", lambda experts, **_: {"experts": experts + 1}, per_device
    ),
    result("a group has the C of the first", _LIMITS, lambda c, *_, **__: [c[0]] * len(c), capped),
    result("the C of the groups is swapped", _LIMITS, lambda c, *_, **__: c[::-1], capped),
    result("the last group has no C", _LIMITS, lambda c, *_, **__: [*c[:-1], 9999], capped),
    of_first_call("C is that of the first forward", _LIMITS, lambda first, _: first, capped),
    Mutation(
        "a layer has the γ of another",
        "routing.method:Method.of_layer",
        lambda of_layer: lambda method, number: of_layer(method, 1 - number),
        both(with_capacity, lambda setting: not setting.has_images),
        lambda setting: setting.under(gamma=(0.5, 1.0)),
    ),
    _with_tokens("T of all ranks", lambda of: [of.n_tokens] * len(of.tokens)),
    _with_tokens("T of the mean rank", lambda of: [of.n_tokens // len(of.tokens)] * len(of.tokens)),
    _with_tokens("T of another group", lambda of: list(of.tokens[::-1])),
    _with_tokens(
        "T of the padded batch", lambda of: [of.n_rows // len(of.tokens)] * len(of.tokens)
    ),
    knobs("the bound is a device's", lambda _: {"granularity": "device"}, per_expert),
    knobs(
        "the bound is an expert's",
        lambda _: {"granularity": "expert", "placement": "contiguous"},
        in_blocks,
    ),
)


# Groups.


def _regrouped(group_T: Tensor, groups: TokenGroups, n_groups: int) -> TokenGroups:
    tokens = torch.bincount(group_T, minlength=n_groups).tolist()
    return dataclasses.replace(groups, group_T=group_T, tokens=tuple(tokens))


def _grouped(
    name: str, group_of: Callable[..., Tensor], *more: Any, n_groups: Any = None, ranks: bool = True
) -> Mutation:
    """Return a mutation by which tokens have other groups, and ranks unless told otherwise.

    ``group_of`` gets the sequence of each token, its position, the number of sequences, the number
    of ranks, and the true groups.
    """

    def change(true: TokenGroups, counted_BS: Tensor, *, ep_size: int = 1, **_: Any) -> TokenGroups:
        sequence_T = true.rows_T // counted_BS.shape[1]
        place_T = true.rows_T % counted_BS.shape[1]
        group_T = group_of(sequence_T, place_T, len(counted_BS), ep_size, true)
        count = n_groups(len(counted_BS)) if n_groups else len(true.tokens)
        other = _regrouped(group_T, true, count)
        if ranks and count == ep_size:
            other = dataclasses.replace(other, rank_T=group_T)
        return other

    return result(name, _GROUPS, change, *more)


_IN_GROUPS = (
    _grouped("groups by sequence", lambda b, *_: b, with_capacity, n_groups=lambda b: b),
    _grouped(
        "groups by rank where sequences are asked for",
        lambda _b, _s, _n, _r, true: true.rank_T,
        with_capacity,
        under(scope="sequence"),
        n_groups=lambda _: 2,
    ),
    _grouped("one group", lambda b, *_: 0 * b, with_capacity, n_groups=lambda _: 1),
    _grouped("every other sequence", lambda b, _s, _n, r, _: b % r, with_capacity),
    _grouped(
        "the ranks begin a sequence early",
        lambda b, _s, n, r, _: ((b + 1) * r // n).clamp_max(r - 1),
        with_capacity,
    ),
    _grouped(
        "the ranks have ⌊B/R⌋ sequences",
        lambda b, _s, n, r, _: (b // (n // r)).clamp_max(r - 1),
        both(with_capacity, lambda setting: not setting.has_images),
    ),
    _grouped(
        "the ranks divide tokens",
        lambda b, _s, _n, r, _: torch.arange(len(b)) * r // len(b),
        with_capacity,
    ),
    _grouped("the ranks divide positions", lambda _b, s, _n, r, _: s * r // 16, with_capacity),
    _grouped(
        "a group's last token is in the next",
        lambda b, _s, _n, _r, true: torch.cat([true.group_T[1:], true.group_T[-1:]]),
        with_capacity,
    ),
    _grouped(
        "the ranks are swapped",
        lambda _b, _s, _n, r, true: r - 1 - true.group_T,
        candidates("local"),
    ),
    of_first_call(
        "the groups are those of the first forward", _GROUPS, lambda first, _: first, with_capacity
    ),
)


# Devices.


def _rank_of(change: Callable[[Tensor, int], Tensor], name: str) -> Mutation:
    return Mutation(
        name,
        "routing.placement:rank_of",
        lambda _: lambda expert, local, _placed=None: change(expert, local),
        in_blocks,
    )


_ON_DEVICES = (
    _rank_of(lambda expert, local: expert % (8 // local), "experts alternate between devices"),
    _rank_of(
        lambda expert, local: ((expert + 1) // local) % (8 // local), "blocks begin an expert early"
    ),
    _rank_of(
        lambda expert, local: (expert // (local - 1)).clamp_max(8 // local - 1),
        "blocks are an expert too small",
    ),
    Mutation(
        "a placement is read in its own order",
        "routing.placement:rank_of",
        lambda _: lambda expert, local, placed_RN: placed_RN.flatten()[expert] // local,
        both(placed, per_device),
    ),
    knobs("the placement is ignored", lambda _: {"placement": "contiguous"}, placed),
    argument(
        "two experts of a placement are swapped",
        "calibrated",
        lambda call: call["calibrated"].flatten()[[4, *range(1, 4), 0, *range(5, 8)]].view(2, 4),
        placed,
    ),
)

MUTATIONS = (*_IN_C, *_IN_GROUPS, *_ON_DEVICES)
