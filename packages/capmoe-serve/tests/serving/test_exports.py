"""Files for servers say what was planned, in the fields that :mod:`capmoe_serve.exports` cites."""

from __future__ import annotations

import json

import numpy as np
import yaml

from capmoe_serve import exports
from capmoe_serve.advice import Budget, ServingDeployment
from capmoe_serve.advising import advise_on_trace
from capmoe_serve.placements import plan_eplb
from capmoe_serve.trace import Trace
from serving.test_advice import skewed
from serving.test_balancing import PUBLISHED_LOADS, PUBLISHED_MAP


def with_layers(trace: Trace, *names: str) -> Trace:
    return Trace(trace.n_experts, load_SLE=trace.load_SLE, layers=names)


def test_a_placement_is_the_same_in_all_files() -> None:
    trace = with_layers(skewed(), "model.layers.1.mlp", "model.layers.3.mlp")
    load_LE = trace.loads().sum(axis=0)
    files = exports.placement_files(trace, 4, 3)
    assert set(files) >= {exports.SGLANG, exports.TENSORRT_LLM, exports.VLLM}

    ones = [1] * 8  # dense layers
    rows = [ones, load_LE[0].tolist(), ones, load_LE[1].tolist()]
    assert json.loads(files[exports.SGLANG].text) == {"logical_count": rows}
    assert "--ep-num-redundant-experts 4" in files[exports.SGLANG].usage
    planned = plan_eplb(load_LE, 4, 3).expert_LP.tolist()
    assert yaml.safe_load(files[exports.TENSORRT_LLM].text) == {
        "num_slots": 12,
        "initial_global_assignments": {1: planned[0], 3: planned[1]},
        "layer_updates_per_iter": 0,
    }
    assert json.loads(files[exports.VLLM].text) == {"num_redundant_experts": 4}


def test_vllm_ascend_has_the_experts_of_each_device_once() -> None:
    """Groups stay on a node: the published example of EPLB, of which no rank has a copy twice."""
    loads = np.array([PUBLISHED_LOADS])
    files = exports.placement_files(Trace(12, load_SLE=loads), 8, 2, groups=4, nodes=2)
    content = json.loads(files[exports.VLLM_ASCEND].text)
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
    trace = skewed()

    def advised(**budget: float) -> dict[str, str]:
        return advise_on_trace(trace, (0.5, 1.0), ServingDeployment(ranks=4), Budget(**budget))[1]

    balanced = advised(at_least_speedup=1.3)
    assert json.loads(balanced[exports.VLLM]) == {"num_redundant_experts": 4}
    fast = advised(at_least_speedup=2.5)
    assert json.loads(fast[exports.VLLM]) == {"num_redundant_experts": 4}
    assert advised(at_least_speedup=1.0) == {}  # nothing need change
    even = Trace(8, load_SLE=np.full((4, 1, 8), 5))
    served = advise_on_trace(even, (1.0,), ServingDeployment(ranks=4), Budget(at_most_points=1.0))
    assert served[1] == {}
