"""Files for servers are what their schemas take, and say what was planned."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from capmoe_eval.serving.advice import Budget
from capmoe_eval.serving.advising import Deployment, advise_on_trace
from capmoe_eval.serving.exports import files, megatron, sglang, tensorrt_llm, vllm
from capmoe_eval.serving.placement.eplb import plan_eplb
from capmoe_eval.serving.settings import Setting
from capmoe_eval.serving.trace import Trace
from tests.serving.test_front import skewed


def with_layers(trace: Trace, *names: str) -> Trace:
    return Trace(trace.n_experts, load_SLE=trace.load_SLE, layers=names)


def test_a_placement_is_the_same_in_all_files() -> None:
    trace = with_layers(skewed(), "model.layers.1.mlp", "model.layers.3.mlp")
    load_LE = trace.loads().sum(axis=0)
    found = files.placement_files(trace, 4, 3)
    assert set(found) == {files.SGLANG, files.TENSORRT_LLM, files.VLLM}

    location = sglang.ExpertLocation.model_validate_json(found[files.SGLANG].text)
    assert location.logical_count[1] == load_LE[0].tolist()
    assert location.logical_count[3] == load_LE[1].tolist()
    assert location.logical_count[0] == location.logical_count[2] == [1] * 8  # dense layers
    assert "--ep-num-redundant-experts 4" in found[files.SGLANG].usage
    assert "lp" not in found[files.SGLANG].usage.split()

    content = yaml.safe_load(found[files.TENSORRT_LLM].text)
    balancer = tensorrt_llm.MoeLoadBalancer.model_validate(content)
    planned = plan_eplb(load_LE, 4, 3).expert_LP.tolist()
    assert balancer.initial_global_assignments == {1: planned[0], 3: planned[1]}
    assert (balancer.num_slots, balancer.layer_updates_per_iter) == (12, 0)

    config = vllm.EplbConfig.model_validate_json(found[files.VLLM].text)
    assert json.loads(found[files.VLLM].text) == {"num_redundant_experts": 4}
    assert config.window_size == 1000


def test_layers_without_numbers_of_their_own_are_numbered_by_place() -> None:
    assert files.layer_numbers(("a", "b")) == (0, 1)
    assert files.layer_numbers(("block1.moe", "block1.other")) == (0, 1)
    assert files.layer_numbers(("3", "10")) == (3, 10)


def capacity(method: str = "score", granularity: str = "expert", knobs: str = "") -> Setting:
    return Setting.model_validate(
        {
            "kind": "capacity",
            "method": method,
            "gamma": 1.5,
            "granularity": granularity,
            "knobs": knobs,
            "straggler": 1.0,
            "speedup": 1.5,
        }
    )


def test_megatron_has_score_and_order_of_each_expert() -> None:
    line = megatron.capacity_arguments(capacity())
    assert line == (
        "--moe-expert-capacity-factor 1.5 --moe-token-drop-policy probs "
        "--moe-token-dispatcher-type alltoall\n"
    )
    read = megatron.read_arguments(line)
    assert (read.moe_expert_capacity_factor, read.moe_token_drop_policy) == (1.5, "probs")
    padded = megatron.read_arguments(f"{line.strip()} --moe-pad-expert-input-to-capacity")
    assert padded.moe_pad_expert_input_to_capacity
    assert megatron.read_arguments(padded.line()) == padded
    order = megatron.capacity_arguments(capacity("order"))
    assert order is not None and "--moe-token-drop-policy position" in order
    for other in (
        capacity("random"),
        capacity("score", "device"),
        capacity("score", "expert", "count_padding=true"),
        capacity().model_copy(update={"placement": "EPLB"}),
        capacity().model_copy(update={"gamma": None, "layer_gammas": (1.0, 1.5)}),
        Setting(kind="unchanged", method="contiguous", straggler=1.0, speedup=1.0),
    ):
        assert megatron.capacity_arguments(other) is None


@pytest.mark.parametrize(
    ("schema", "content"),
    [
        (sglang.ExpertLocation, {"logical_count": [[1, 2], [1]]}),
        (sglang.ExpertLocation, {"logical_count": [[-1]]}),
        (sglang.ExpertLocation, {"logical_count": [[1]], "ep_size": 8}),
        (tensorrt_llm.MoeLoadBalancer, {"num_slots": 3, "initial_global_assignments": {0: [0, 1]}}),
        (tensorrt_llm.MoeLoadBalancer, {"num_slots": 2, "initial_global_assignments": {0: [0, 2]}}),
        (vllm.EplbConfig, {"num_redundant_experts": -1}),
        (vllm.EplbConfig, {"redundant": 1}),
        (megatron.Arguments, {"moe-expert-capacity-factor": 1, "moe-token-drop-policy": "score"}),
    ],
)
def test_what_a_server_would_refuse_is_refused(schema: type, content: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        schema.model_validate(content)  # type: ignore[attr-defined]


def test_the_files_are_those_of_what_is_recommended() -> None:
    trace = skewed()

    def advised(**budget: float) -> dict[str, str]:
        return advise_on_trace(trace, (0.5, 1.0), Deployment(4), Budget(**budget)).files

    balanced = advised(at_least_speedup=1.3)
    assert files.MEGATRON not in balanced
    assert json.loads(balanced[files.VLLM]) == {"num_redundant_experts": 4}
    fast = advised(at_least_speedup=2.5)
    # A capacity on EPLB's placement: its servers take the placement, and Megatron-LM has none.
    assert json.loads(fast[files.VLLM]) == {"num_redundant_experts": 4}
    assert files.MEGATRON not in fast
    two = dataclasses.replace(trace, load_SLE=trace.load_SLE[:1])  # type: ignore[index]
    unplanned = advise_on_trace(two, (1.0,), Deployment(8), Budget(at_least_speedup=2.0)).files
    assert "--moe-expert-capacity-factor 1.0" in unplanned[files.MEGATRON]
    assert advised(at_least_speedup=1.0) == {}  # nothing need change
    even = Trace(8, load_SLE=np.full((4, 1, 8), 5))
    assert advise_on_trace(even, (1.0,), Deployment(4), Budget(at_most_points=1.0)).files == {}
