"""The files of an advice for servers, by name, and how each is used."""

from __future__ import annotations

import re
from typing import NamedTuple

from capmoe_eval.serving.exports import megatron, sglang, tensorrt_llm, vllm
from capmoe_eval.serving.placement.eplb import plan_eplb
from capmoe_eval.serving.settings import Setting
from capmoe_eval.serving.trace import Trace

SGLANG = "sglang_expert_location.json"
TENSORRT_LLM = "moe_load_balancer.yaml"
VLLM = "vllm_eplb_config.json"
MEGATRON = "megatron_arguments.txt"
SERVER_FILES = (SGLANG, TENSORRT_LLM, VLLM, MEGATRON)


class ServerFile(NamedTuple):
    """A file for a server."""

    text: str
    usage: str


def layer_numbers(names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the numbers of layers in their model: those in their names, else their places."""
    found = [re.search(r"\d+", name) for name in names]
    numbers = tuple(int(match.group()) for match in found if match)
    return numbers if len(set(numbers)) == len(names) else tuple(range(len(names)))


def placement_files(
    trace: Trace, ranks: int, slots: int, *, by_program: bool = False
) -> dict[str, ServerFile]:
    """Return the files that balance without loss; they are planned on all steps of the trace.

    ``by_program`` asks for LPLB, which SGLang alone has; the others split evenly all the same.
    """
    note = "  # EPLB alone; this server has no LPLB" if by_program else ""
    load_LE = sum(part.load_SLE.sum(axis=0) for part in trace.by_steps())
    placement = plan_eplb(load_LE, ranks, slots)
    layers = layer_numbers(trace.layers)
    return {
        SGLANG: ServerFile(
            sglang.expert_location(load_LE, layers),
            sglang.usage(SGLANG, ranks, placement.redundant, by_program=by_program),
        ),
        TENSORRT_LLM: ServerFile(
            tensorrt_llm.load_balancer(placement, layers),
            tensorrt_llm.usage(TENSORRT_LLM, ranks) + note,
        ),
        VLLM: ServerFile(vllm.eplb_config(placement.redundant), vllm.usage(VLLM) + note),
    }


def capacity_files(setting: Setting) -> dict[str, ServerFile]:
    """Return the file of a recommended capacity; SGLang, vLLM and TensorRT-LLM have none."""
    line = megatron.capacity_arguments(setting)
    usage = f"pretrain or serve with Megatron-LM: … $(cat {MEGATRON})"
    return {} if line is None else {MEGATRON: ServerFile(line, usage)}
