"""One rank: computes every case with real expert parallelism and writes what came out."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from capmoe_eval.errors import UsageError
from capmoe_eval.parallel import (
    IMPLEMENTATION,
    World,
    register,
    shard_experts,
    split_batches,
)
from capmoe_eval.reroute import capacity_aware
from tests.parallel import cases


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    world = World.join(torch.device("cpu"), timeout=timedelta(seconds=45))
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
        results["proof"] = meter.proofs()["stock_at_infinity"]
    results["native"] = _native(directory, world)
    results["refused"] = {
        "ranks": _refusal(lambda: capacity_aware(olmoe, "score", gamma=1.0).__enter__()),
        "twice": _refusal(lambda: shard_experts(olmoe)),
        "gradients": _refusal(lambda: olmoe(cases.batch()[0])),
    }
    if world.size == 4:
        uneven = cases.models.tiny_model("qwen2_moe", vocab_size=11)
        results["refused"]["uneven"] = _refusal(lambda: shard_experts(uneven))
    torch.save(results, directory / f"{world.rank}.pt")
    dist.barrier()


def _native(directory: Path, world: World) -> dict[str, Any]:
    """Load through transformers alone, which also spreads the dense part (FSDP)."""
    if world.rank == 0:
        cases.model("olmoe", world.size).save_pretrained(directory / "model")
    dist.barrier()
    spread = DistributedConfig(
        fsdp_size=world.size, ep_size=world.size, ep_implementation=IMPLEMENTATION
    )
    register()
    model = AutoModelForCausalLM.from_pretrained(
        directory / "model", distributed_config=spread
    ).eval()
    split_batches(model)
    score = cases.methods(world.size)["score"]
    return [cases.measure(model, score, *cases.batch()) for _ in range(2)][1]


def _refusal(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except UsageError as error:
        return str(error)
    return "not refused"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
