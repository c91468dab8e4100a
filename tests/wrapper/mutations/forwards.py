"""Decisions that are right, for another token, layer or forward; and wrong tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.routing.scores import Assignment
from tests.wrapper.mutations.concerns import (
    adds,
    both,
    candidates,
    everywhere,
    grouped,
    has_modalities,
    named,
    neither,
    per_device,
    text_alone,
    under,
)
from tests.wrapper.mutations.mutation import (
    Call,
    Decide,
    Mutation,
    argument,
    decision,
    of_first_call,
    outcome,
    result,
)
from tests.wrapper.mutations.settings import Setting, with_knobs

_GROUPS = "routing.tokens:group_tokens"
_MASK = "wrapper.plan:new_columns"
_SCORES = "wrapper.gates:Gate.scores"
_FIND = "wrapper.modality:ImageFinder.find"


def _stock(call: Call) -> Assignment:
    topk_TK = call["scores"].topk_TK
    return Assignment(topk_TK, torch.ones_like(topk_TK, dtype=torch.bool))


def _stock_where(name: str, holds: Callable[[Call], bool], *more: Any) -> Mutation:
    """Return a mutation that leaves some layers or forwards without the method."""
    return decision(
        name, lambda decide, call: _stock(call) if holds(call) else decide(**call), *more
    )


def _remembered(name: str, key: Callable[[Call], Any], *more: Any) -> Mutation:
    """Return a mutation that decides again as where a key was seen first."""

    def wrap(assign: Decide) -> Decide:
        memory: dict[Any, Call] = {}

        def mutated(scores: Any, method: Any, groups: Any, **more: Any) -> Assignment:
            call = {"scores": scores, "method": method, "groups": groups, **more}
            first = memory.setdefault(key(call), call)
            if len(first["scores"].topk_TK) != len(scores.topk_TK):
                first = call
            return assign(**call | {"scores": first["scores"]})

        return mutated

    return Mutation(name, "wrapper.hook:decide", wrap, *more)


def _large(setting: Setting) -> Setting:
    return dataclasses.replace(setting, lengths=((40, 40, 39, 40, 40),))


def _full(setting: Setting) -> Setting:
    lengths = tuple((max(some),) * len(some) for some in setting.lengths)
    return dataclasses.replace(setting, lengths=lengths)


def _counted(name: str, change: Callable[[Tensor], Tensor], *more: Any) -> Mutation:
    """Return a mutation of the mask [B, S] from which groups are made."""

    def wrap(group_tokens: Callable[..., Any]) -> Callable[..., Any]:
        return lambda counted_BS, **named: group_tokens(change(counted_BS), **named)

    return Mutation(name, _GROUPS, wrap, *more)


def _masked(name: str, change: Callable[[Tensor], Tensor], *more: Any) -> Mutation:
    """Return a mutation of the mask [B, S] of the tokens that count."""
    return result(name, _MASK, lambda mask_BS, *_: change(mask_BS), *more)


def _without(mask_BS: Tensor, place: Any) -> Tensor:
    mask_BS = mask_BS.clone()
    mask_BS[place] = False
    return mask_BS


def _second_decodes(make: Callable[..., None]) -> Callable[..., None]:
    def mutated(plan: Any, method: Any, number: int, **more: Any) -> None:
        make(plan, method, number, **more | {"decode": number == 1})

    return mutated


def _rows_shifted(groups: Any, *_: Any, **__: Any) -> Any:
    return dataclasses.replace(groups, rows_T=(groups.rows_T + 1) % groups.n_rows)


_IN_FORWARDS = (
    _stock_where("the first layer is stock", lambda call: call["stream"][0] == 0),
    _stock_where("the last layer is stock", lambda call: call["stream"][0] > 0),
    _stock_where("the second forward is stock", lambda call: call["stream"][1] == 1),
    _stock_where(
        "a large batch is stock",
        lambda call: len(call["scores"].topk_TK) > 100,
        both(text_alone, neither(named("oea", "sere"))),
        _large,
    ),
    _stock_where(
        "a batch without pads is stock",
        lambda call: call["groups"].every_row_counts,
        text_alone,
        _full,
    ),
    _remembered("decided by the scores of the first forward", lambda call: call["stream"][0]),
    _remembered("decided by the scores of the first layer", lambda call: call["stream"][1]),
    of_first_call("the rows are those of the first forward", _GROUPS, lambda first, _: first),
    Mutation(
        "the second forward is not under the method",
        "wrapper.plan:ForwardPlan.constrained",
        lambda constrained: lambda plan: constrained(plan) and plan.number == 0,
    ),
    Mutation(
        "the second forward counts as a decode step",
        "wrapper.plan:ForwardPlan.__init__",
        _second_decodes,
    ),
)

_IN_TOKENS = (
    _counted("pads count", torch.ones_like),
    _counted(
        "pads do not count where they must",
        lambda mask: mask & (torch.arange(mask.shape[1]) < mask.shape[1] - 2),
        everywhere,
        under(count_padding=True),
    ),
    _masked("the mask is ignored", torch.ones_like),
    _masked("the mask is read from the other side", lambda mask: mask.flip(1)),
    _masked("the mask is that of the sequence before", lambda mask: mask.roll(1, dims=0)),
    _masked("the mask begins a token late", lambda mask: mask.roll(1, dims=1), text_alone),
    _masked(
        "a sequence's first token does not count", lambda mask: _without(mask, (slice(None), 0))
    ),
    _masked("the last sequence does not count", lambda mask: _without(mask, -1)),
    _counted("a sequence's first token is no token", lambda mask: _without(mask, (slice(None), 0))),
    _counted("the last sequence has no tokens", lambda mask: _without(mask, -1)),
    result("rows are shifted by one", _GROUPS, _rows_shifted),
)


# Modalities.


def _images(name: str, change: Callable[[Tensor], Tensor], *more: Any) -> Mutation:
    return argument(
        name, "image_T", lambda call: change(call["image_T"]), *more or (has_modalities,)
    )


def _found(name: str, change: Callable[..., Tensor]) -> Mutation:
    return result(name, _FIND, lambda image_BS, *_, **__: change(image_BS), _of_images)


def _of_images(setting: Setting) -> bool:
    return has_modalities(setting) or setting.method.needs_images


def _is_first(call: Call) -> Tensor:
    """Return a mask [T, 1] of the tokens that are dropped first."""
    image_T1 = call["image_T"][:, None]
    return image_T1 if call["method"].modality == "image_first" else ~image_T1


def _rescored(name: str, change: Callable[[Tensor, Tensor], Tensor]) -> Mutation:
    """Return a mutation of the scores of the modality that is dropped first."""

    def other(call: Call) -> Any:
        score_TE = call["scores"].score_TE
        changed_TE = change(score_TE, _is_first(call))
        return dataclasses.replace(
            call["scores"], score_TE=changed_TE, choice_TE=call["scores"].ranking_TE
        )

    return argument(name, "scores", other, has_modalities)


def _none(decide: Decide, call: Call) -> Assignment:
    uniform = with_knobs(call["method"], modality="uniform")
    return decide(**call | {"method": uniform})


def _softly(decide: Decide, call: Call) -> Assignment:
    scores = call["scores"]
    halved = scores.score_TE * (1 - 0.5 * _is_first(call).float())
    other = dataclasses.replace(scores, score_TE=halved, choice_TE=scores.ranking_TE)
    return _none(decide, call | {"scores": other})


_IN_MODALITIES = (
    _images("the other modality is dropped first", lambda image: ~image),
    _images("the images are shifted by a token", lambda image: image.roll(1)),
    _images("the images begin two tokens late", lambda image: image.roll(2)),
    _images("all tokens are of images", torch.ones_like),
    _images("no token is of an image", torch.zeros_like),
    _images(
        "the second half has no images",
        lambda image: image & (torch.arange(len(image)) < len(image) // 2),
    ),
    decision("no modality is dropped first", _none, has_modalities),
    decision("the modality's scores are halved", _softly, has_modalities),
    _rescored(
        "the modality's highest scores are dropped first", lambda s, first: (1 - s).where(first, s)
    ),
    _rescored(
        "the other modality's highest scores are dropped first",
        lambda s, first: s.where(first, 1 - s),
    ),
    outcome(
        "the modality is dropped whole",
        lambda a, call: dataclasses.replace(a, keep_TS=a.keep_TS & ~_is_first(call)),
        has_modalities,
    ),
    outcome(
        "the other modality is never dropped",
        lambda a, call: dataclasses.replace(a, keep_TS=a.keep_TS | ~_is_first(call)),
        has_modalities,
    ),
    _found("the token before an image is of it", lambda image: image | image.roll(-1, dims=1)),
    _found("an image's last token is of text", lambda image: image & image.roll(-1, dims=1)),
    _found("images are those of the sequence before", lambda image: image.roll(1, dims=0)),
    _found("images are text and text is images", lambda image: ~image),
    _found(
        "a token's parity tells its modality",
        lambda image: (torch.arange(image.numel()) % 2 > 0).view_as(image),
    ),
)

_IN_GATES = (
    result(
        "a gate has no groups",
        _SCORES,
        lambda scores, *_: dataclasses.replace(scores, eligible_TE=None),
        both(adds, text_alone, neither(per_device)),
        grouped,
    ),
    result(
        "a gate has a bias too many",
        _SCORES,
        lambda scores, *_: dataclasses.replace(
            scores, choice_TE=scores.ranking_TE + torch.arange(8) / 8
        ),
        both(adds, text_alone, neither(candidates("local", "global"))),
    ),
    result(
        "a gate has the scores of the next expert",
        _SCORES,
        lambda scores, *_: dataclasses.replace(scores, score_TE=scores.score_TE.roll(1, dims=1)),
        neither(named("expert_drop", "oea", "sere", "order", "reverse_order", "random")),
    ),
)

MUTATIONS: tuple[Mutation, ...] = (*_IN_FORWARDS, *_IN_GATES, *_IN_TOKENS, *_IN_MODALITIES)
