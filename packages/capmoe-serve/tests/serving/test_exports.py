"""Files for servers are what their schemas take, and say what was planned.

Each schema is that of the source which :mod:`capmoe_serve.exports` cites.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from capmoe_serve import exports
from capmoe_serve.advice import Budget, ServingDeployment
from capmoe_serve.advising import advise_on_trace
from capmoe_serve.placements import plan_eplb
from capmoe_serve.trace import Trace
from serving.test_advice import skewed
from serving.test_balancing import PUBLISHED_LOADS, PUBLISHED_MAP

Index = Annotated[int, Field(ge=0)]


class ExpertLocation(BaseModel):
    """SGLang's object, which passes on no other field."""

    model_config = ConfigDict(strict=True, extra="forbid")

    logical_count: Annotated[list[Annotated[list[Index], Field(min_length=1)]], Field(min_length=1)]

    @model_validator(mode="after")
    def _has_one_number_of_experts(self) -> ExpertLocation:
        if len({len(row) for row in self.logical_count}) > 1:
            raise ValueError("logical_count: rows of different lengths")
        return self


class MoeLoadBalancer(BaseModel):
    """TensorRT-LLM's configuration, which refuses other fields."""

    model_config = ConfigDict(strict=True, extra="forbid")

    num_slots: Annotated[int, Field(ge=1)]
    initial_global_assignments: dict[Index, list[Index]]  # of each MoE layer, rank after rank
    layer_updates_per_iter: Index = 0  # 0: the placement stays

    @model_validator(mode="after")
    def _fills_all_slots(self) -> MoeLoadBalancer:
        for layer, experts in self.initial_global_assignments.items():
            if len(experts) != self.num_slots:
                raise ValueError(f"initial_global_assignments[{layer}]: {len(experts)} experts")
            if len(set(experts)) != max(experts) + 1:
                raise ValueError(f"initial_global_assignments[{layer}] lacks an expert")
        return self


class EplbConfig(BaseModel):
    """vLLM's fields that do not differ between versions; defaults are vLLM's."""

    model_config = ConfigDict(strict=True, extra="forbid")

    num_redundant_experts: Index = 0
    window_size: Annotated[int, Field(gt=0)] = 1000
    step_interval: Annotated[int, Field(gt=0)] = 3000
    log_balancedness: bool = False
    policy: Literal["default"] = "default"


def with_layers(trace: Trace, *names: str) -> Trace:
    return Trace(trace.n_experts, load_SLE=trace.load_SLE, layers=names)


def test_a_placement_is_the_same_in_all_files() -> None:
    trace = with_layers(skewed(), "model.layers.1.mlp", "model.layers.3.mlp")
    load_LE = trace.loads().sum(axis=0)
    files = exports.placement_files(trace, 4, 3)
    assert set(files) >= {exports.SGLANG, exports.TENSORRT_LLM, exports.VLLM}

    location = ExpertLocation.model_validate_json(files[exports.SGLANG].text)
    assert location.logical_count[1] == load_LE[0].tolist()
    assert location.logical_count[3] == load_LE[1].tolist()
    assert location.logical_count[0] == location.logical_count[2] == [1] * 8  # dense layers
    assert "--ep-num-redundant-experts 4" in files[exports.SGLANG].usage

    content = yaml.safe_load(files[exports.TENSORRT_LLM].text)
    balancer = MoeLoadBalancer.model_validate(content)
    planned = plan_eplb(load_LE, 4, 3).expert_LP.tolist()
    assert balancer.initial_global_assignments == {1: planned[0], 3: planned[1]}
    assert (balancer.num_slots, balancer.layer_updates_per_iter) == (12, 0)

    config = EplbConfig.model_validate_json(files[exports.VLLM].text)
    assert json.loads(files[exports.VLLM].text) == {"num_redundant_experts": 4}
    assert config.window_size == 1000


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
