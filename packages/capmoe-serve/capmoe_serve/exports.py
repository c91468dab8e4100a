"""Write the files of an advice that servers take, and say how each is used.

The fields are those of the servers' public sources:

- SGLang, ``--init-expert-location``: the counts that its own EPLB places experts by. A path that
  ends in ``.json`` holds an object with ``logical_count`` [layers, experts], a row for every layer
  of the model, dense ones too (sgl-project/sglang, commit 01fec5c,
  ``compute_initial_expert_location_metadata`` in ``python/sglang/srt/eplb/expert_location.py``).
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

A field that the server's public source or documentation does not show is left out.
"""

import json
import re
from typing import Final

import numpy as np
import yaml

from capmoe_serve.placements import plan_eplb
from capmoe_serve.trace import Trace

SGLANG: Final = "sglang_expert_location.json"
TENSORRT_LLM: Final = "moe_load_balancer.yaml"
VLLM: Final = "vllm_eplb_config.json"
VLLM_ASCEND: Final = "vllm_ascend_expert_map.json"
SERVER_FILES: Final = (SGLANG, TENSORRT_LLM, VLLM, VLLM_ASCEND)


def layer_numbers(names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the numbers of layers in their model: those in their names, else their places.

    A number of five digits is none of a layer.
    """
    numbers = {name: re.search(r"(?<!\d)\d{1,4}(?!\d)", name) for name in names}
    places = tuple(int(match.group()) for match in numbers.values() if match)
    return places if len(set(places)) == len(names) else tuple(range(len(names)))


def placement_files(
    trace: Trace, ranks: int, slots: int, groups: int = 1, nodes: int = 1
) -> dict[str, tuple[str, str]]:
    """Return text and usage of the files of EPLB's placement, planned on all steps of a trace."""
    load_LE = np.stack([trace.load(layer).sum(axis=0) for layer in range(trace.n_layers)])
    placement = plan_eplb(load_LE, ranks, slots, groups, nodes)
    layers = layer_numbers(trace.layers)
    count_LE = np.ones((max(layers) + 1, trace.n_experts), dtype=np.int64)  # dense layers have ones
    count_LE[list(layers)] = load_LE
    balancer = {
        "num_slots": placement.expert_LP.shape[1],
        "initial_global_assignments": dict(zip(layers, placement.expert_LP.tolist(), strict=True)),
        "layer_updates_per_iter": 0,  # the placement stays
    }
    files = {
        SGLANG: (
            _json({"logical_count": count_LE.tolist()}),
            f"python -m sglang.launch_server … --ep-size {ranks} --ep-num-redundant-experts "
            f"{placement.redundant} --init-expert-location {SGLANG}",
        ),
        TENSORRT_LLM: (
            yaml.safe_dump(balancer, default_flow_style=None, sort_keys=False, width=2**31),
            f"moe_config: {{backend: WideEP, load_balancer: {TENSORRT_LLM}}} in the LLM API's "
            f"options, and --ep {ranks}",
        ),
        VLLM: (
            _json({"num_redundant_experts": placement.redundant}),
            "vllm serve … --enable-expert-parallel --enable-eplb --eplb-config "
            f'"$(cat {VLLM})"  # copies alone: vLLM takes no map from a file',
        ),
    }
    if np.diff(np.sort(placement.expert_LRN, axis=2), axis=2).all():  # no device has one twice
        ascend = [
            {
                "layer_id": layer,
                "device_count": ranks,
                "device_list": [
                    {"device_id": rank, "device_expert": experts}
                    for rank, experts in enumerate(expert_RN.tolist())
                ],
            }
            for layer, expert_RN in enumerate(placement.expert_LRN)
        ]
        files[VLLM_ASCEND] = (
            _json({"moe_layer_count": len(layers), "layer_list": ascend}),
            "vllm serve … --enable-expert-parallel --additional-config "
            f'\'{{"eplb_config": {{"expert_map_path": "{VLLM_ASCEND}"}}}}\'  # on vllm-ascend',
        )
    return files


def _json(content: dict[str, object]) -> str:
    return json.dumps(content, separators=(",", ":")) + "\n"
