"""Write the files of an advice that servers take, and say how each is used.

The tests have the servers' schemas, from their public sources:

- SGLang, ``--init-expert-location``: the counts that its own EPLB places experts by. A path that
  ends in ``.json`` holds an object with ``logical_count`` [layers, experts], a row for every layer
  of the model, dense ones too (sgl-project/sglang, commit 01fec5c,
  ``compute_initial_expert_location_metadata`` in ``python/sglang/srt/eplb/expert_location.py``).
  LPLB is
  pull request 24515, which takes few models, on GPUs of compute capability 9.0 and more.
- TensorRT-LLM, ``moe_load_balancer.yaml``: the expert in every slot. NVIDIA/TensorRT-LLM,
  ``examples/wide_ep/ep_load_balancer/README.md``, commit 2a595f8, and ``MoeLoadBalancerConfig`` in
  ``tensorrt_llm/llmapi/llm_args.py``.
- vLLM, ``--eplb-config JSON``: vllm-project/vllm, ``vllm/config/parallel.py``, commit 00193b8,
  ``EPLBConfig``. vLLM plans by what it counts itself; no file gives it a placement to start with:
  pull requests 41141, 49572 and 53022 would, and none is merged.
- vllm-ascend, ``expert_map_path``: the experts of every device and MoE layer, numbered from 0
  (vllm-project/vllm-ascend, ``_export_tensor_to_file`` in ``vllm_ascend/eplb/adaptor/
  vllm_adaptor.py``, commit 39835cbd, writes the same object). It takes no expert twice on a device
  (``check_expert_placement`` in ``vllm_ascend/eplb/core/eplb_worker.py``, commit 0011ce33).
- Megatron-LM, the arguments of a capacity: NVIDIA/Megatron-LM, commit d98e8a64. The capacity is of
  one rank's tokens, pads too: ``ceil(num_tokens · topk / num_experts · capacity_factor)``
  (``moe_utils.py`` of ``megatron/core/transformer/moe``, ``apply_router_token_dropping``).
  ``probs`` keeps the highest of what the router multiplies with: the softmax over all experts with
  ``--moe-router-pre-softmax``, else that over the token's own top-k. ``position`` is no export of
  Order: it is ``torch.topk`` of zeros and ones, which leaves open whom of equals it takes.
  Inference keeps the factor only as :data:`_MEGATRON_USAGE` says (``transformer_config.py``,
  ``__post_init__``; ``megatron/core/inference/utils.py``, ``set_decode_expert_padding``).

A field that the server's public source or documentation does not show is left out.
"""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

import numpy as np
import yaml

from capmoe_serve.planners import plan_eplb
from capmoe_serve.settings import ServingSetting
from capmoe_serve.slots import SlotPlan
from capmoe_serve.trace import Trace

SGLANG: Final = "sglang_expert_location.json"
TENSORRT_LLM: Final = "moe_load_balancer.yaml"
VLLM: Final = "vllm_eplb_config.json"
MEGATRON: Final = "megatron_arguments.txt"
VLLM_ASCEND: Final = "vllm_ascend_expert_map.json"
SERVER_FILES: Final = (SGLANG, TENSORRT_LLM, VLLM, VLLM_ASCEND, MEGATRON)

_POLICIES: Final = {"score": "probs"}
"""Megatron-LM's names of the methods that it has, by ours."""
_MEGATRON_USAGE: Final = (
    f"pretrain_gpt.py, or a server of Megatron-LM, with: … $(cat {MEGATRON}); --transformer-impl "
    "inference_optimized refuses every capacity, and with --moe-pad-experts-for-cuda-graph-"
    "inference a server replaces the factor in every step. Add --moe-router-pre-softmax if the "
    "model has it: the kept probabilities are then the scores of this advice."
)


class ServerFile(NamedTuple):
    """A file for a server."""

    text: str
    usage: str


def layer_numbers(names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the numbers of layers in their model: those in their names, else their places.

    A number of five digits is none of a layer.
    """
    numbers = {name: re.search(r"(?<!\d)\d{1,4}(?!\d)", name) for name in names}
    places = tuple(int(match.group()) for match in numbers.values() if match)
    return places if len(set(places)) == len(names) else tuple(range(len(names)))


def placement_files(
    trace: Trace,
    ranks: int,
    slots: int,
    groups: int = 1,
    nodes: int = 1,
    *,
    by_program: bool = False,
) -> dict[str, ServerFile]:
    """Return the files of lossless load balancing; they are planned on all steps of the trace.

    ``by_program`` asks for LPLB, which SGLang alone has; the others split evenly all the same.
    """
    program, note = "", ""
    if by_program:
        program, note = " --ep-dispatch-algorithm lp", "  # EPLB alone; this server has no LPLB"
    load_LE = sum(part.load_SLE.sum(axis=0) for part in trace.by_steps())
    placement = plan_eplb(load_LE, ranks, slots, groups, nodes)
    layers = layer_numbers(trace.layers)
    count_LE = np.ones((max(layers) + 1, trace.n_experts), dtype=np.int64)  # dense layers have ones
    count_LE[list(layers)] = load_LE
    balancer = {
        "num_slots": placement.expert_LP.shape[1],
        "initial_global_assignments": dict(zip(layers, placement.expert_LP.tolist(), strict=True)),
        "layer_updates_per_iter": 0,  # the placement stays
    }
    return _ascend_file(placement, note) | {
        SGLANG: ServerFile(
            _json({"logical_count": count_LE.tolist()}),
            f"python -m sglang.launch_server … --ep-size {ranks} --ep-num-redundant-experts "
            f"{placement.redundant} --init-expert-location {SGLANG}{program}",
        ),
        TENSORRT_LLM: ServerFile(
            yaml.safe_dump(balancer, default_flow_style=None, sort_keys=False, width=2**31),
            f"moe_config: {{backend: WideEP, load_balancer: {TENSORRT_LLM}}} in the LLM API's "
            f"options, and --ep {ranks}{note}",
        ),
        VLLM: ServerFile(
            _json({"num_redundant_experts": placement.redundant}),
            "vllm serve … --enable-expert-parallel --enable-eplb --eplb-config "
            f'"$(cat {VLLM})"{note}  # copies alone: vLLM takes no map from a file',
        ),
    }


def _ascend_file(placement: SlotPlan, note: str) -> dict[str, ServerFile]:
    """Return the map of vllm-ascend; none where a device holds an expert twice."""
    if placement.held_LRE.sum() < placement.expert_LRN.size:
        return {}
    layers = [
        {
            "layer_id": layer,
            "device_count": placement.ranks,
            "device_list": [
                {"device_id": rank, "device_expert": experts}
                for rank, experts in enumerate(expert_RN.tolist())
            ],
        }
        for layer, expert_RN in enumerate(placement.expert_LRN)
    ]
    content = {"moe_layer_count": placement.layers, "layer_list": layers}
    usage = (
        "vllm serve … --enable-expert-parallel --additional-config "
        f'\'{{"eplb_config": {{"expert_map_path": "{VLLM_ASCEND}"}}}}\'{note}  # on vllm-ascend'
    )
    return {VLLM_ASCEND: ServerFile(_json(content), usage)}


def _json(content: dict[str, object]) -> str:
    return json.dumps(content, separators=(",", ":")) + "\n"


def capacity_files(setting: ServingSetting) -> dict[str, ServerFile]:
    """Return the file of a recommended capacity, if a server has it: Megatron-LM or none.

    It has Token Drop with one γ for all layers, of each expert in contiguous placement.
    """
    of_experts = setting.kind == "capacity" and setting.granularity == "expert"
    is_plain = setting.layer_gammas is None and setting.placement is None
    policy = _POLICIES.get(setting.method)
    if policy is None or not of_experts or not is_plain:
        return {}
    arguments = (
        f"--moe-expert-capacity-factor {setting.gamma} --moe-token-drop-policy {policy} "
        "--moe-token-dispatcher-type alltoall\n"
    )
    return {MEGATRON: ServerFile(arguments, _MEGATRON_USAGE)}
