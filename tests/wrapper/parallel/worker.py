"""One rank: computes every case with real expert parallelism and writes what came out."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from capmoe_eval.errors import UsageError
from capmoe_eval.wrapper import parallel
from capmoe_eval.wrapper.dispatch import IMPLEMENTATION
from capmoe_eval.wrapper.parallel import shard_experts, split_batches
from capmoe_eval.wrapper.ranks import World, own_rows
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.parallel import cases


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    world = World.join(torch.device("cpu"), timeout=timedelta(seconds=45))
    world.agree("nothing", "same")
    results = {}
    for family in cases.FAMILIES:
        model = cases.model(family, world.size)
        shard_experts(model)
        split_batches(model)
        results[family] = cases.everything(family, model, world.size)
    olmoe = cases.model("olmoe", world.size)
    shard_experts(olmoe)
    split_batches(olmoe)
    with capacity_aware(olmoe, "score", gamma=1.0, ep_size=world.size) as meter:
        results["proof"] = meter.proofs()
    results["own"] = _own_batches(world)
    results["native"] = _native(directory, world)
    pictured = cases.model("llava", world.size)
    shard_experts(pictured)
    split_batches(pictured)
    pixels = cases.inputs("llava")["pixel_values"]
    results["refused"] = {
        "images": _refusal(
            lambda: pictured(**cases.inputs("llava") | {"pixel_values": pixels[:3]})
        ),
        "sound": _refusal(lambda: pictured(**cases.inputs("llava"), input_features=pixels)),
        "ranks": _refusal(lambda: capacity_aware(olmoe, "score", gamma=1.0).__enter__()),
        "twice": _refusal(lambda: shard_experts(olmoe)),
        "disagree": _refusal(lambda: world.agree("cells", str(world.rank))),
        "stock": _stock("all_to_all"),
        "gradients": _refusal(lambda: olmoe(cases.batch()[0])),
    }
    if world.size == 4:
        uneven = cases.tiny_model("qwen2_moe", vocab_size=11)
        results["refused"]["uneven"] = _refusal(lambda: shard_experts(uneven))
    torch.save(results, directory / f"{world.rank}.pt")
    dist.barrier()


def _own_batches(world: World) -> dict[str, Any]:
    """Call the model with this rank's sequences alone, in a batch of its own width."""
    model = cases.model("olmoe", world.size)
    shard_experts(model)
    inputs = cases.inputs("olmoe")
    rows = own_rows(len(inputs["input_ids"]), world.rank, world.size)
    width = int(inputs["attention_mask"][rows].sum(dim=1).max())
    score = cases.methods("olmoe", world.size)["score"]
    return cases.measure(
        model, score, {name: value[rows, :width] for name, value in inputs.items()}
    )


def _stock(implementation: str) -> str:
    """Return why a model is refused whose experts transformers spreads by itself."""
    model = cases.model("mixtral", dist.get_world_size())
    with mock.patch.object(parallel, "IMPLEMENTATION", implementation), suppress(UsageError):
        shard_experts(model)
    return _refusal(lambda: capacity_aware(model, "score", gamma=1.0).__enter__())


def _native(directory: Path, world: World) -> dict[str, Any]:
    """Load through transformers alone, which also spreads the dense part (FSDP)."""
    if world.rank == 0:
        cases.model("olmoe", world.size).save_pretrained(directory / "model")
    dist.barrier()
    spread = DistributedConfig(
        fsdp_size=world.size, ep_size=world.size, ep_implementation=IMPLEMENTATION
    )
    model = AutoModelForCausalLM.from_pretrained(
        directory / "model", distributed_config=spread
    ).eval()
    split_batches(model)
    score = cases.methods("olmoe", world.size)["score"]
    return [cases.measure(model, score, cases.inputs("olmoe")) for _ in range(2)][1]


def _refusal(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except UsageError as error:
        return str(error)
    return "not refused"
