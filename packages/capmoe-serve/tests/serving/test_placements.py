"""Placements follow the definition of EPLB, compute every pair once, and are in servers' files."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from bench_runs import bench
from capmoe_eval.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_serve import exports
from capmoe_serve.advice import advise
from capmoe_serve.bench.placement import outcomes
from capmoe_serve.placements import SlotPlan, compare, contiguous, judge, plan_eplb
from capmoe_serve.trace import Trace
from serving.test_advice import skewed

# The example of https://github.com/deepseek-ai/EPLB (README.md at commit d52c72d).
PUBLISHED_LOADS = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
PUBLISHED_MAP = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def packed(weights: Sequence[float], bins: int) -> list[list[int]]:
    """Return the items of each bin: the heaviest first, into the lightest bin that has space."""
    space = len(weights) // bins
    if space == 1:
        return [[item] for item in range(bins)]
    contents: list[list[int]] = [[] for _ in range(bins)]
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        free = [content for content in contents if len(content) < space]
        min(free, key=lambda content: sum(weights[i] for i in content)).append(item)
    return contents


def eplb(load: list[float], ranks: int, slots: int, groups: int, nodes: int) -> list[list[int]]:
    """Return by loops the experts of each rank: groups into nodes, then replicas into ranks."""
    if groups % nodes:
        groups = nodes = 1
    size = len(load) // groups
    placed = []
    for node in packed([sum(load[g * size : (g + 1) * size]) for g in range(groups)], nodes):
        experts = [expert for group in node for expert in range(group * size, (group + 1) * size)]
        copies = [*experts]
        while len(copies) < ranks * slots // nodes:  # to the highest load per replica
            copies.append(max(experts, key=lambda expert: load[expert] / copies.count(expert)))
        ranked = packed([load[copy] / copies.count(copy) for copy in copies], ranks // nodes)
        placed += [[copies[place] for place in rank] for rank in ranked]
    return placed


def test_eplb_gives_the_published_placement() -> None:
    placement = plan_eplb(PUBLISHED_LOADS, ranks=8, slots=2, groups=4, nodes=2)
    assert placement.expert_LP.tolist() == PUBLISHED_MAP


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3]))
def test_eplb_follows_its_definition_and_every_pair_is_computed_once(
    data: st.DataObject, groups: int, nodes: int
) -> None:
    ranks, local = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    slots, n_experts = local + data.draw(st.integers(0, 2)), ranks * local
    groups, nodes = math.gcd(groups, n_experts), math.gcd(nodes, ranks)
    numbers = st.one_of(st.integers(0, 5), st.integers(0, 60))
    load_E = data.draw(st.lists(numbers, min_size=n_experts, max_size=n_experts))
    placement = plan_eplb(np.array([load_E]), ranks, slots, groups, nodes)
    (rank_RN,) = placement.expert_LRN.tolist()
    assert rank_RN == eplb(load_E, ranks, slots, groups, nodes)
    if groups % nodes == 0 and nodes > 1:  # a group's replicas stay on one node
        by_node = placement.expert_LRN.reshape(nodes, -1) // (n_experts // groups)
        assert all((by_node == group).any(axis=1).sum() == 1 for group in range(groups))
    # Replicas take the pairs of two steps in turn, of one with the loads and of one that is even.
    load_SE = np.array([load_E, [2] * n_experts])
    expert_I = np.concatenate([np.repeat(np.arange(n_experts), row) for row in load_SE])
    step_I = np.repeat([0, 1], load_SE.sum(axis=1))
    slot_I = placement.slot_of(expert_I, step_I, 0)
    assert (placement.expert_LP[0][slot_I] == expert_I).all()
    counted_SP = np.zeros((2, ranks * slots), dtype=int)
    np.add.at(counted_SP, (step_I, slot_I), 1)
    assert (counted_SP == placement.split(load_SE, 0)).all()


def test_a_judgement_counts_by_hand() -> None:
    load_SLE = np.array([[[6, 2, 1, 0]], [[0, 0, 3, 1]], [[0, 0, 0, 0]]])
    judged = judge(load_SLE, contiguous(1, 4, 2))
    assert judged["straggler"] == pytest.approx((16 / 9 + 2) / 2)  # of the steps with a pair
    assert judged["worst"] == 2.0
    placement = SlotPlan(np.array([[[0, 1, 2], [2, 3, 0]]]), 4)
    # The only token of 2 goes to rank 0.
    assert placement.rank_load(load_SLE[:, 0], 0)[0].tolist() == [3 + 2 + 1, 3]
    assert judge(load_SLE, placement)["extra"] == 2


@pytest.mark.slow
def test_the_straggler_factor_is_the_meters() -> None:
    from capmoe_eval import capacity_aware
    from capmoe_eval.zoo.tiny import tiny_model

    model = tiny_model("olmoe", vocab_size=64)
    torch.manual_seed(0)
    with capacity_aware(model, "score", 1.0, ep_size=2, verify=False) as meter:
        model(input_ids=torch.randint(0, 64, (4, 40)))
    layers = meter.report()["layers"]
    load_SLE = np.array([[layer["load_before"] for layer in layers]])
    judged = judge(load_SLE, contiguous(len(layers), layers[0]["n_experts"], 2))
    measured = [layer["peak"]["device_before"]["last"] for layer in layers]
    assert judged["straggler"] == pytest.approx(np.mean(measured), abs=1e-5)
    assert judged["worst"] == pytest.approx(max(measured), abs=1e-5)


@pytest.mark.parametrize(
    ("load_SLE", "knobs", "part"),
    [
        ([[[1, 2]]] * 2, {"groups": 3}, "groups=3"),
        ([[[1, 2]]] * 2, {"nodes": 3}, "nodes=3"),
        ([[[1, -2]]] * 2, {}, "load_SLE=-2: a count must be at least 0"),
        ([1, 2], {}, r"load_SLE: int64 \[2\]; must be integers \[steps, layers, 2\]"),
        ([[[1, 1]]], {}, "load_SLE has one step: .* give at least 2"),
        ([[[1, 0.5]]] * 2, {}, "load_SLE: float64"),
    ],
)
def test_bad_input_is_one_line_that_names_the_field(
    load_SLE: Any, knobs: dict[str, int], part: str
) -> None:
    with pytest.raises(UsageError, match=part) as error:
        compare(load_SLE, 2, **knobs)
    assert "\n" not in str(error.value)


# Files for servers, in the fields that `capmoe_serve.exports` cites.


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


# The benchmark `placement`, as small as it can be.


def test_placement(tmp_path: Path) -> None:
    few = ["--models", "zoo_olmoe", "--limit", "4", "--batch", "2"]
    status, content = bench(tmp_path, "placement", *few)
    assert status == 0
    rows = {
        (row["planned_on"], row["judged_on"], row["method"]): row for row in content["balances"]
    }
    assert len(rows) == len(content["balances"]) == 3 * 6 + 2 * 2
    # Decode steps and prompts are never planned on one another.
    stale = {key[:2] for key in rows if key[0] != key[1]}
    assert stale == {("piqa", "winogrande"), ("winogrande", "piqa")}
    for (*_, method), row in rows.items():
        assert bool(row["drop_rate"]) == method.startswith("Token Drop")
        assert row["drop_rate"] or row["straggler"] >= 1
    for task, of in (("piqa", "prompts"), ("gsm8k", "decode steps")):
        of_task = {method: row for (*on, method), row in rows.items() if on == [task, task]}
        assert {row["of"] for row in of_task.values()} == {of}
        shares = [of_task[f"Token Drop γ={gamma}"]["drop_rate"] for gamma in (2, 1.5, 1)]
        assert shares == sorted(shares)
        assert shares[-1] > 0


def test_placements_are_judged_on_other_steps_than_they_are_planned_on() -> None:
    load_SLE = np.random.default_rng(3).integers(0, 9, (6, 2, 8)) * 2
    load_SLE[:, :, 0] += 200 - load_SLE.sum(axis=2)  # 100 tokens of two experts in every step
    trace = Trace(8, load_SLE=load_SLE, top_k=2)
    judged = outcomes(trace, trace, 4)
    for name, bound in {
        "contiguous": math.inf,
        "Token Drop γ=1.5": math.ceil(1.5 * 200 / 8),
    }.items():
        factors, kept = [], 0
        for layer_E in load_SLE[3:].reshape(-1, 8):  # the second half of the steps
            left = [min(int(pairs), bound) for pairs in layer_E]
            factors.append(max(sum(left[r : r + 2]) for r in range(0, 8, 2)) / (200 / 4))
            kept += sum(left)
        assert judged[name]["straggler"] == pytest.approx(sum(factors) / len(factors))
        assert judged[name]["drop_rate"] == pytest.approx(1 - kept / (6 * 200))
    turned = load_SLE[:, :, ::-1].copy()
    stale = outcomes(Trace(8, load_SLE=turned, top_k=2), trace, 4)
    assert set(stale) == {"EPLB", "EPLB+4"}
    assert stale["EPLB+4"]["straggler"] > judged["EPLB+4"]["straggler"]
    # The comparison of a user's own counts.
    for planned_SLE, expected in ((load_SLE, judged), (turned, stale)):
        compared = compare(np.concatenate([planned_SLE[:3], load_SLE[3:]]), 4)
        for name in ("EPLB", "EPLB+4"):
            assert compared.loc[name, "straggler"] == expected[name]["straggler"]
        assert compared.loc["contiguous", "straggler"] == judged["contiguous"]["straggler"]
