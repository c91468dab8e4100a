"""Compute the same cases on ranks and, for comparison, in one process."""

import itertools
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method, method_names
from capmoe_eval.wrapper import parallel
from capmoe_eval.wrapper.parallel import distributed_config, shard_experts, split_batches
from capmoe_eval.wrapper.ranks import World, own_rows
from capmoe_eval.wrapper.session import capacity_aware
from capmoe_eval.zoo import tiny
from capmoe_eval.zoo.tiny import TINY_FAMILIES, tiny_model
from tests.wrapper import images
from tests.wrapper.models import similarities

WITH_IMAGES = ("llava", "qwen3_vl_moe")
FAMILIES = (*TINY_FAMILIES, *WITH_IMAGES)
VOCABULARY = 97
ROUNDING = {"rtol": 0.0, "atol": 3e-4}
"""By how much rounding may move a model's logits; a drop moves them 20 times as far."""
_DEVICE = {"granularity": "device"}


def methods(family: str, size: int) -> dict[str, Method]:
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
    if family != "olmoe":  # which has all of them
        some = ("baseline", "score", "score_device", "expanded_local", "token_reroute")
        knobs = {name: knobs[name] for name in some}
    if family in WITH_IMAGES:  # every bound, and one group over all processes
        first = {"modality": "image_first"}
        knobs = {
            "baseline": ("baseline", None, {}),
            "score": ("score", 0.5, first),
            "device": ("score", 0.5, {"modality": "text_first", **_DEVICE}),
            "sequence": ("score", 0.5, {"scope": "sequence", **first}),
            "expanded": ("expanded_drop", 0.5, {"max_k": True, **first}),
            "reroute": ("token_reroute", 0.5, first),
        }
    return {
        key: create_method(name, gamma, ep_size=size, **more)
        for key, (name, gamma, more) in knobs.items()
        if name in method_names()
    }


EDGES = {"one_sequence": [12], "a_rank_without_tokens": [12, 5, 0, 0], "a_token": [1]}
"""Batches that a rank must survive: the real tokens of each sequence."""
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
GENERATING = ("olmoe", *WITH_IMAGES)


def model(family: str, size: int) -> PreTrainedModel:
    """Return a tiny model whose experts can be spread over that many ranks."""
    if family in WITH_IMAGES:
        return images.make(family)
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


Inputs = dict[str, Tensor]


def inputs(family: str, lengths: list[int] | None = None) -> Inputs:
    """Return the batch of a family; with images, some ranks have none."""
    if family in WITH_IMAGES:
        return images.batch(family, (1, 2, 0, 0, 1), width=20)
    tokens_BS, mask_BS = batch(lengths)
    return {"input_ids": tokens_BS, "attention_mask": mask_BS.long()}


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    method: Method,
    inputs: Inputs,
    *,
    out_of_band: bool = False,
    forwards: int = 1,
) -> dict[str, Any]:
    """Return logits, which tokens count, and the report.

    Args:
        model: The model.
        method: The method.
        inputs: The batch.
        out_of_band: Whether the meter is told the mask instead of the model.
        forwards: How many; the last one is returned.
    """
    calibrated = similarities(model) if method.name == "sere" else None
    with capacity_aware(model, method, verify=False, calibrated=calibrated) as meter:
        for _ in range(forwards):
            if out_of_band:
                with meter.real_tokens(inputs["attention_mask"]):
                    logits = model(inputs["input_ids"]).logits
            else:
                logits = model(**inputs).logits
    mask_BS = inputs["attention_mask"].bool()
    return {
        "logits": logits,
        "counted": torch.ones_like(mask_BS) if method.count_padding else mask_BS,
        "report": meter.report(),
    }


@torch.no_grad()
def generate(
    family: str, model: PreTrainedModel, method: Method, num_beams: int = 1
) -> dict[str, Any]:
    """Return what a model writes after a left-padded batch."""
    prompt = inputs(family)
    if family not in WITH_IMAGES:
        prompt = {name: value.flip(1) for name, value in prompt.items()}
    length = {"max_new_tokens": 6, "do_sample": False}
    with capacity_aware(model, method, verify=False) as meter:
        written = model.generate(**prompt, num_beams=num_beams, **length)
    return {"logits": written, "report": meter.report()}


def everything(family: str, model: PreTrainedModel, size: int) -> dict[str, dict[str, Any]]:
    """Return the results of all cases on one model."""
    of_family = methods(family, size)
    results = {
        name: measure(model, method, inputs(family), forwards=1 + (method.name == "random"))
        for name, method in of_family.items()
    }
    for edge, name in itertools.product(EDGES, EDGE_METHODS.get(family, ())):
        at_edge = inputs(family, EDGES[edge])
        results[f"{edge}/{name}"] = measure(model, of_family[name], at_edge, out_of_band=True)
    if family in GENERATING:
        results["generate"] = generate(family, model, of_family["score"])
    if family == "olmoe":
        constrained = create_method("score", 0.5, ep_size=size, decode="constrained")
        results["generate_constrained"] = generate(family, model, constrained)
        # 15 beams: those of the third sequence lie on two ranks.
        results["generate_beams"] = generate(family, model, of_family["score"], num_beams=3)
        results["generate_beams_constrained"] = generate(family, model, constrained, num_beams=3)
    return results


# The work of a rank.


def spread(family: str, world: World) -> PreTrainedModel:
    """Return the tiny model of a family, whose experts are spread over the ranks."""
    spread_model = model(family, world.size)
    shard_experts(spread_model)
    split_batches(spread_model)
    return spread_model


def work(directory: Path) -> None:
    """Compute every case on this rank, and write what came out."""
    torch.set_num_threads(1)
    world = World.join(torch.device("cpu"), timeout=timedelta(seconds=45))
    world.agree("nothing", "same")
    results: dict[str, Any] = {
        family: everything(family, spread(family, world), world.size) for family in FAMILIES
    }
    olmoe, pictured = spread("olmoe", world), spread("llava", world)
    with capacity_aware(olmoe, "score", gamma=1.0, ep_size=world.size) as meter:
        results["proof"] = meter.proofs()
    results["own"], results["native"] = _own_batches(world), _native(directory, world)
    images_of = inputs("llava")
    pixels = images_of["pixel_values"]
    calls: dict[str, Callable[[], Any]] = {
        "images": lambda: pictured(**images_of | {"pixel_values": pixels[:3]}),
        "sound": lambda: pictured(**images_of, input_features=pixels),
        "ranks": lambda: capacity_aware(olmoe, "score", gamma=1.0).__enter__(),
        "twice": lambda: shard_experts(olmoe),
        "disagree": lambda: world.agree("cells", str(world.rank)),
        "gradients": lambda: olmoe(batch()[0]),
        "stock": lambda: capacity_aware(_by_all_to_all(world), "score", gamma=1.0).__enter__(),
    }
    if world.size == 4:
        calls["uneven"] = lambda: shard_experts(tiny_model("qwen2_moe", vocab_size=11))
    results["refused"] = {name: _refusal(call) for name, call in calls.items()}
    torch.save(results, directory / f"{world.rank}.pt")
    dist.barrier()


def _own_batches(world: World) -> dict[str, Any]:
    """Call the model with this rank's sequences alone, in a batch of its own width."""
    alone, whole = model("olmoe", world.size), inputs("olmoe")
    shard_experts(alone)
    rows = own_rows(len(whole["input_ids"]), world.rank, world.size)
    width = int(whole["attention_mask"][rows].sum(dim=1).max())
    part = {name: value[rows, :width] for name, value in whole.items()}
    return measure(alone, methods("olmoe", world.size)["score"], part)


def _native(directory: Path, world: World) -> dict[str, Any]:
    """Load through transformers alone, which also spreads the dense part (FSDP)."""
    if world.rank == 0:
        model("olmoe", world.size).save_pretrained(directory / "model")
    dist.barrier()
    native = AutoModelForCausalLM.from_pretrained(
        directory / "model", distributed_config=distributed_config(world.size)
    ).eval()
    split_batches(native)
    score = methods("olmoe", world.size)["score"]
    return [measure(native, score, inputs("olmoe")) for _ in range(2)][1]


def _by_all_to_all(world: World) -> PreTrainedModel:
    """Return a model whose experts transformers spreads by itself."""
    stock = model("mixtral", world.size)
    with mock.patch.object(parallel, "IMPLEMENTATION", "all_to_all"), suppress(UsageError):
        shard_experts(stock)
    return stock


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    return "not refused"
