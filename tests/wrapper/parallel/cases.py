"""Compute the same cases on ranks and, for comparison, in one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method, method_names
from capmoe_eval.wrapper.session import capacity_aware
from capmoe_eval.zoo import tiny
from capmoe_eval.zoo.tiny import TINY_FAMILIES, tiny_model
from tests.wrapper.models import similarities

FAMILIES = TINY_FAMILIES
VOCABULARY = 97
ROUNDING = {"rtol": 0.0, "atol": 3e-4}
"""By how much two computations of a model's logits may differ (``test_rounding.py``)."""
_DEVICE = {"granularity": "device"}


def methods(size: int) -> dict[str, Method]:
    """Return every method and variant by a name, for that many ranks."""
    knobs: dict[str, tuple[str, float | None, dict[str, Any]]] = {
        "baseline": ("baseline", None, {}),
        "infinity": ("score", float("inf"), {}),
        "order": ("order", 1.0, {}),
        "reverse_order": ("reverse_order", 1.0, {}),
        "random": ("random", 1.0, {"seed": 3}),
        "score": ("score", 1.0, {}),
        "score_nothing": ("score", 0.0, {}),
        "score_sequence": ("score", 1.0, {"scope": "sequence"}),
        "score_pads_count": ("score", 1.0, {"count_padding": True}),
        "score_device": ("score", 0.8, _DEVICE),
        "expert_drop": ("expert_drop", None, {}),
        "expanded_local": ("expanded_drop", 1.0, {"renormalize": "after"}),
        "expanded_ranked": ("expanded_drop", 1.0, {"candidates": "ranked", "m": 3}),
        "expanded_global": ("expanded_drop", 1.0, {"candidates": "global", "protect_topk": True}),
        "expanded_max_k": ("expanded_drop", 1.5, {"max_k": True}),
        "expanded_device": ("expanded_drop", 1.0, _DEVICE),
        "token_reroute": ("token_reroute", 1.0, {}),
        "oea": ("oea", None, {"k0": 1}),
        "xshare_device": ("xshare", None, {"expert_budget": 0.5, **_DEVICE}),
        "sere": ("sere", None, {"min_similarity": 0.4}),
        "laser": ("laser", None, {"peak_mass": 1.0, "viable_score": 0.1}),
        "by_layer": ("score", None, {"layer_gammas": (0.5, float("inf"), 1.5)}),
    }
    return {
        key: create_method(name, gamma, ep_size=size, **more)
        for key, (name, gamma, more) in knobs.items()
        if name in method_names()
    }


CASES = tuple(methods(1))
#: Batches that a rank must survive: the real tokens of each sequence.
EDGES = {
    "one_sequence": [12],
    "a_rank_without_tokens": [12, 5, 0, 0],
    "a_token": [1],
}
EDGE_METHODS = {
    "olmoe": (
        "baseline",
        "random",
        "score",
        "score_sequence",
        "score_pads_count",
        "expert_drop",
        "expanded_local",
        "expanded_device",
        "token_reroute",
    ),
    "deepseek_v2": ("score",),
}
"""The methods that meet :data:`EDGES`, by family."""


def model(family: str, size: int) -> PreTrainedModel:
    """Return a tiny model whose experts can be spread over that many ranks."""
    changes: dict[str, Any] = {}
    if family == "qwen2_moe" and 30 % size:
        changes = {"num_experts": 28}
    if family == "deepseek_v2":
        changes = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    with mock.patch.dict(tiny._FAMILIES[family], changes):
        return tiny_model(family, vocab_size=VOCABULARY, seed=1)


def batch(lengths: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Return a right-padded batch and its mask; odd, so that ranks get unequal shares."""
    lengths = [40, 31, 40, 14, 23] if lengths is None else lengths
    generator = torch.Generator().manual_seed(5)
    tokens_BS = torch.randint(2, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    mask_BS = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return tokens_BS.masked_fill(~mask_BS, 1), mask_BS


def edge_batch(name: str) -> tuple[Tensor, Tensor]:
    return batch(EDGES[name])


@contextmanager
def kept_pairs(model: nn.Module) -> Iterator[list[Tensor]]:
    """Note the indices [N, S] that each layer's experts are called with."""
    seen: list[Tensor] = []
    handles = [
        module.register_forward_pre_hook(lambda _m, args: seen.append(args[1].clone()))
        for module in model.modules()
        if hasattr(module, "_is_expert_parallel")
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    method: Method,
    tokens_BS: Tensor,
    mask_BS: Tensor,
    *,
    out_of_band: bool = False,
    forwards: int = 1,
) -> dict[str, Any]:
    """Return logits, kept pairs and the meter's report of forwards of a batch.

    Args:
        model: The model.
        method: The method.
        tokens_BS: The batch.
        mask_BS: Which tokens are real.
        out_of_band: Whether the mask is said to the meter instead of the model.
        forwards: How many; the last one is returned.
    """
    calibrated = similarities(model) if method.name == "sere" else None
    with (
        capacity_aware(model, method, verify=False, calibrated=calibrated) as meter,
        kept_pairs(model) as seen,
    ):
        for _ in range(forwards):
            seen.clear()
            if out_of_band:
                with meter.real_tokens(mask_BS):
                    logits = model(tokens_BS).logits
            else:
                logits = model(tokens_BS, attention_mask=mask_BS.long()).logits
    return {"logits": logits, "kept": list(seen), "report": meter.report()}


@torch.no_grad()
def generate(model: PreTrainedModel, method: Method, num_beams: int = 1) -> dict[str, Any]:
    """Return what a model writes after a left-padded batch."""
    tokens_BS, mask_BS = batch()
    with capacity_aware(model, method, verify=False) as meter:
        written = model.generate(
            tokens_BS.flip(1),
            attention_mask=mask_BS.flip(1).long(),
            max_new_tokens=6,
            do_sample=False,
            num_beams=num_beams,
        )
    return {"logits": written, "report": meter.report()}


def everything(family: str, model: PreTrainedModel, size: int) -> dict[str, dict[str, Any]]:
    """Return the results of all cases on one model."""
    tokens_BS, mask_BS = batch()
    results = {
        name: measure(model, method, tokens_BS, mask_BS, forwards=1 + (method.name == "random"))
        for name, method in methods(size).items()
    }
    for edge, name in itertools.product(EDGES, EDGE_METHODS.get(family, ())):
        results[f"{edge}/{name}"] = measure(
            model, methods(size)[name], *edge_batch(edge), out_of_band=True
        )
    if family == "olmoe":
        score = methods(size)["score"]
        constrained = create_method("score", 0.5, ep_size=size, decode="constrained")
        results["generate"] = generate(model, score)
        results["generate_constrained"] = generate(model, constrained)
        # 15 beams: those of the third sequence lie on two ranks.
        results["generate_beams"] = generate(model, score, num_beams=3)
        results["generate_beams_constrained"] = generate(model, constrained, num_beams=3)
    return results
