"""Files for servers say what was planned, in the fields that :mod:`capmoe_serve.exports` cites."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import yaml

from capmoe_serve import exports
from capmoe_serve.advice import advise
from capmoe_serve.placements import plan_eplb
from capmoe_serve.trace import Trace
from serving.test_advice import skewed
from serving.test_placements import PUBLISHED_LOADS, PUBLISHED_MAP


def test_a_placement_is_the_same_in_all_files() -> None:
    trace = replace(skewed(), layers=("model.layers.1.mlp", "model.layers.3.mlp"))
    load_LE = trace.loads().sum(axis=0)
    files = {name: text for name, (text, _) in exports.placement_files(trace, 4, 3).items()}
    assert set(files) >= {exports.SGLANG, exports.TENSORRT_LLM, exports.VLLM}

    ones = [1] * 8  # dense layers
    rows = [ones, load_LE[0].tolist(), ones, load_LE[1].tolist()]
    assert json.loads(files[exports.SGLANG]) == {"logical_count": rows}
    usage = exports.placement_files(trace, 4, 3)[exports.SGLANG][1]
    assert "--ep-num-redundant-experts 4" in usage
    planned = plan_eplb(load_LE, 4, 3).expert_LP.tolist()
    assert yaml.safe_load(files[exports.TENSORRT_LLM]) == {
        "num_slots": 12,
        "initial_global_assignments": {1: planned[0], 3: planned[1]},
        "layer_updates_per_iter": 0,
    }
    assert json.loads(files[exports.VLLM]) == {"num_redundant_experts": 4}


def test_vllm_ascend_has_the_experts_of_each_device_once() -> None:
    """Groups stay on a node: the published example of EPLB, of which no rank has a copy twice."""
    loads = np.array([PUBLISHED_LOADS])
    files = exports.placement_files(Trace(12, load_SLE=loads), 8, 2, groups=4, nodes=2)
    content = json.loads(files[exports.VLLM_ASCEND][0])
    assert content["moe_layer_count"] == len(content["layer_list"]) == 2
    for number, layer in enumerate(content["layer_list"]):
        assert (layer["layer_id"], layer["device_count"]) == (number, 8)
        devices = layer["device_list"]
        assert [device["device_id"] for device in devices] == list(range(8))
        experts = [expert for device in devices for expert in device["device_expert"]]
        assert experts == PUBLISHED_MAP[number]
    # Three copies of one expert do not fit on two ranks once each.
    hot = Trace(2, load_SLE=np.array([[[9, 1]]]))
    assert exports.VLLM_ASCEND not in exports.placement_files(hot, 2, 2)


def test_layers_without_numbers_of_their_own_are_numbered_by_place() -> None:
    assert exports.layer_numbers(("a", "b")) == (0, 1)
    assert exports.layer_numbers(("block1.moe", "block1.other")) == (0, 1)
    assert exports.layer_numbers(("3", "10")) == (3, 10)
    assert exports.layer_numbers(("3", "10000000000")) == (0, 1)  # rows for so many layers


def test_the_files_are_those_of_what_is_recommended() -> None:
    def files(trace: Trace, **budget: float) -> dict[str, str]:
        return advise(trace, (0.5, 1.0), ranks=4, **budget)[1]

    copies = files(skewed(), at_least_speedup=1.3)[exports.VLLM]
    assert json.loads(copies) == {"num_redundant_experts": 4}
    # Contiguous placement needs none: nothing need change, or a capacity is put on it.
    assert files(skewed(), at_least_speedup=1.0) == files(skewed(), at_least_speedup=2.5) == {}
    # Where nothing is recommended they are of the placement that was asked for.
    copies = files(skewed(), at_least_speedup=2.5, at_most_points=1.0)[exports.VLLM]
    assert json.loads(copies) == {"num_redundant_experts": 4}
    even = Trace(8, load_SLE=np.full((4, 1, 8), 5))
    assert files(even, at_most_points=1.0) == {}
