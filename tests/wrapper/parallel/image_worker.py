"""One rank: computes batches with images under real expert parallelism, or all of it alone."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.parallel import shard_experts, split_batches
from capmoe_eval.wrapper.ranks import World
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper import images
from tests.wrapper.parallel.cases import kept_pairs

FAMILIES = ("llava", "qwen3_vl_moe")
#: Every bound, and one group over all processes.
CASES: dict[str, dict[str, Any]] = {
    "baseline": {"name": "baseline"},
    "score": {},
    "device": {"granularity": "device", "modality": "text_first"},
    "sequence": {"scope": "sequence"},
    "expanded": {"name": "expanded_drop", "max_k": True},
    "reroute": {"name": "token_reroute"},
}
#: Images of each sequence; some ranks have none.
IMAGES_OF = (1, 2, 0, 0, 1)


def batch(family: str) -> images.Inputs:
    return images.batch(family, IMAGES_OF, width=20)


@torch.no_grad()
def results(family: str, model: PreTrainedModel, size: int) -> dict[str, Any]:
    """Return logits, kept pairs and reports of all cases."""
    answers = {}
    for name, knobs in CASES.items():
        chosen = {"name": "score", "gamma": 0.5, "modality": "image_first", **knobs}
        with (
            capacity_aware(model, create_method(ep_size=size, **chosen), verify=False) as meter,
            kept_pairs(model) as seen,
        ):
            logits = model(**batch(family)).logits
        answers[name] = {"logits": logits, "kept": list(seen), "report": meter.report()}
    with capacity_aware(
        model, "score", 0.5, ep_size=size, modality="image_first", verify=False
    ) as meter:
        written = model.generate(**batch(family), max_new_tokens=3, do_sample=False)
    return {**answers, "generate": {"logits": written, "report": meter.report()}}


def refusal(family: str, model: PreTrainedModel, **change: torch.Tensor) -> str:
    try:
        model(**batch(family) | change)
    except UsageError as error:
        return str(error)
    return "not refused"


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    world = World.join(torch.device("cpu"), timeout=timedelta(seconds=90))
    answers: dict[str, Any] = {}
    for family in FAMILIES:
        model = images.make(family)
        shard_experts(model)
        split_batches(model)
        answers[family] = results(family, model, world.size)
        if family == "llava":
            pixels = batch(family)["pixel_values"]
            answers["refused"] = {
                "tokens": refusal(family, model, pixel_values=pixels[:3]),
                "sound": refusal(family, model, input_features=pixels),
            }
    torch.save(answers, directory / f"{world.rank}.pt")
    dist.barrier()
