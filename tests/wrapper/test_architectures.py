"""Every architecture with the experts interface, and its gate; see ``docs/reference/models.md``.

A gate is recognised by what a router does, in any precision, wherever its bias lies.
"""

import dataclasses
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import FineGrainedFP8Config, Mxfp4Config
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts, Mxfp4GptOssMLP

from capmoe_eval.errors import UsageError
from capmoe_eval.wrapper import layers as layers_module
from capmoe_eval.wrapper.gates import GateRecipe, tolerance
from capmoe_eval.wrapper.layers import MoeLayer, expected_moe_layers, find_moe_layers
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.architectures import (
    DOCUMENT,
    EXCEPTIONS,
    LOCKED,
    build,
    count_experts,
    documented,
    examine,
    families,
    head,
)
from tests.wrapper.images import with_images
from tests.wrapper.models import EVERY, MLA, logits, make

README = Path(__file__).parents[2] / "README.md"

LAYOUTS: list[tuple[str, dict[str, Any], int]] = [
    ("jamba", {"num_hidden_layers": 8, "expert_layer_period": 3, "expert_layer_offset": 1}, 3),
    ("jamba", {"expert_layer_period": 1, "expert_layer_offset": 0}, 4),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "ME*E-E"}, 3),
    ("nemotron_h", {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}, 0),
    ("lfm2_moe", {"num_dense_layers": 3, "layer_types": ["conv", "full_attention"] * 2}, 1),
    ("deepseek_v4", {"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]}, 4),
    ("gemma4", {"enable_moe_block": False}, 0),
    ("qwen3_moe", {"num_experts": 0}, 0),
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, 1),
    ("qwen3_moe", {"num_hidden_layers": 7, "decoder_sparse_step": 3}, 2),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, 2),
    (
        "ernie4_5_moe",
        {"num_hidden_layers": 8, "moe_layer_start_index": 2, "moe_layer_end_index": 6},
        5,
    ),
    ("ernie4_5_moe", {"num_hidden_layers": 8, "moe_layer_interval": 2}, 4),
]


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_an_architecture_keeps_every_promise_or_is_refused(family: str) -> None:
    _, _, words = examine(family)
    assert words
    assert "\n" not in words
    if transformers.__version__ == LOCKED:  # a newer one may have other families, too
        assert words == documented()[family], "run python -m tests.wrapper.architectures"


@pytest.mark.parametrize(("family", "settings", "n_layers"), LAYOUTS)
def test_a_layout_is_counted_from_the_configuration(
    family: str, settings: dict[str, Any], n_layers: int
) -> None:
    torch.manual_seed(0)
    model = build(family, EXCEPTIONS.get(family, {}) | settings)
    assert expected_moe_layers(model.config) == n_layers
    assert count_experts(model) == n_layers


def test_the_document_and_the_readme_count_the_families() -> None:
    """What the document says of each family is held against the family above."""
    text, of_families = DOCUMENT.read_text(), documented()
    refused = re.findall(r"^- `(\w+)`", text, re.MULTILINE)
    supported = len(of_families) - len(refused)
    assert text.startswith(head(supported, len(of_families)))
    assert with_images(LOCKED) in text
    assert f"{supported} of the {len(of_families)} architectures" in README.read_text()
    if transformers.__version__ == LOCKED:
        assert {*of_families} == {*families()}


# Gates.


HALF = (torch.float16, torch.bfloat16)
BIASED = (
    "afmoe",  # the block keeps it, the router wants sequences
    "deepseek_v3",
    "ernie4_5_moe",  # a part of the router keeps it, in two dimensions
    "hy_v3",
    "kolibri1",  # on the logits
    "laguna",
    "lfm2_moe",
    "minimax_m2",
)


def routed(model: nn.Module, layer: MoeLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a layer's router returns in a forward of the model."""
    outputs: list[Any] = []
    handle = layer.router.register_forward_hook(lambda _m, _a, output: outputs.append(output))
    logits(model)
    handle.remove()
    ((logits_TE, weight_TK, topk_TK),) = outputs
    return logits_TE, weight_TK, topk_TK


def peaked(name: str, dtype: torch.dtype) -> nn.Module:
    """Return a model whose least weights are subnormal numbers of float16."""
    model = make(name)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("gate.weight", "router.weight")):
            parameter.data *= 2.0
    return model.to(dtype)


def recipes(model: nn.Module) -> list[GateRecipe]:
    return [layer.gate.recipe for layer in find_moe_layers(model)]


# Another recipe shows.


def other_recipes(recipe: GateRecipe) -> list[GateRecipe]:
    """Return recipes that differ in one thing."""
    other = "sigmoid" if recipe.activation == "softmax" else "softmax"
    return [
        dataclasses.replace(recipe, activation=other),
        dataclasses.replace(recipe, normalises=not recipe.normalises),
    ]


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", EVERY)
def test_another_recipe_shows_in_any_precision(name: str, dtype: torch.dtype) -> None:
    for model in (make(name).to(dtype), peaked(name, dtype)):
        layer = find_moe_layers(model)[0]
        logits_TE, weight_TK, topk_TK = routed(model, layer)
        for recipe in (layer.gate.recipe, *other_recipes(layer.gate.recipe)):
            gate = dataclasses.replace(layer.gate, recipe=recipe)
            deviation = gate.deviation(gate.scores(logits_TE, topk_TK), weight_TK)
            is_right = recipe == layer.gate.recipe
            assert bool(deviation <= tolerance(weight_TK.dtype)) is is_right, recipe


# Biases.


@pytest.mark.numeric
@pytest.mark.parametrize("std", [0.0, 0.02, 4.0])
@pytest.mark.parametrize("family", BIASED)
def test_a_bias_ranks_and_does_not_weigh(family: str, std: float) -> None:
    """The invariants hold the router's choice and weights, and the scores, against the recipe."""
    for seed in range(3):
        torch.manual_seed(seed)
        model = build(family)
        bias = find_moe_layers(model)[-1].gate.bias
        assert bias is not None
        nn.init.normal_(operator.attrgetter(bias.name)(bias.owner), std=std)
        with capacity_aware(model, "score", gamma=0.5) as meter:
            assert meter.layers[-1].gate.recipe.biased != "none"
            logits(model)


# Groups, normalisation, fixed choices.


@st.composite
def grouped_routers(draw: st.DrawFn) -> tuple[str, dict[str, Any], float, float]:
    """Return a family, its configuration, and the scales of its router's weights and bias."""
    n_groups, size = draw(st.integers(2, 6)), draw(st.integers(2, 6))
    best = draw(st.integers(1, n_groups))
    settings = {
        **MLA,
        "first_k_dense_replace": 0,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "n_routed_experts": n_groups * size,
        "n_group": n_groups,
        "topk_group": best,
        "num_experts_per_tok": draw(st.integers(1, min(best * size, 8))),
    }
    family = draw(st.sampled_from(["deepseek_v2", "deepseek_v3"]))
    if family == "deepseek_v2":
        settings["topk_method"] = draw(st.sampled_from(["group_limited_greedy", "greedy"]))
    # Beyond a deviation of 1 a chosen score may be as small as the 1e-20 that DeepSeek-V3 adds to
    # its denominator, which the probes cannot see; such a forward is refused (gate_as_read).
    return family, settings, 10 ** draw(st.floats(-3, 0)), draw(st.sampled_from([0.0, 0.1, 3.0]))


@given(grouped_routers(), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
@pytest.mark.numeric
def test_groups_limit_the_eligible_experts_whatever_the_configuration(
    drawn: tuple[str, dict[str, Any], float, float], seed: int
) -> None:
    """Also where they show neither in the choice of few experts nor in small scores.

    Which experts are eligible is checked by ``scores_as_defined`` in the forward.
    """
    family, fields, std, bias_std = drawn
    torch.manual_seed(seed)
    model: Any = build(family, fields)
    for layer in model.model.layers:
        nn.init.normal_(layer.mlp.gate.weight, std=std)
        if family == "deepseek_v3":
            nn.init.normal_(layer.mlp.gate.e_score_correction_bias, std=bias_std)
    groups = "top2" if family == "deepseek_v3" else "max"
    if fields.get("topk_method") == "greedy":
        groups = "none"
    for recipe in recipes(model):  # where all groups are among the best, none can be told
        assert recipe.groups == groups or fields["topk_group"] == fields["n_group"]
    with capacity_aware(model, "expanded_drop", 1.0, candidates="global"):
        logits(model)


@pytest.mark.parametrize("seed", range(3))
def test_whether_weights_are_normalised_is_determined_where_every_expert_is_chosen(
    seed: int,
) -> None:
    """The sum over the top-k is then 1, so that the weights alone do not show it."""
    torch.manual_seed(seed)
    fields = {"num_experts_per_tok": 4, "num_hidden_layers": 6}
    for family, field in (("gpt_oss", "num_local_experts"), ("olmoe", "num_experts")):
        all_chosen = build(family, {field: 4, **fields})
        assert {*recipes(all_chosen)} == {*recipes(make(family))}


@pytest.mark.parametrize("seed", range(3))
def test_what_no_probe_decides_is_decided_for_all_layers_together(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers_module, "probes_elsewhere", lambda *_: [])
    torch.manual_seed(seed)
    fields = {"num_local_experts": 4, "num_experts_per_tok": 4, "num_hidden_layers": 6}
    layers = find_moe_layers(build("gpt_oss", fields))
    assert len({layer.gate.recipe for layer in layers}) == 1


# What is refused.


def offloaded() -> nn.Module:
    return cpu_offload(make("ernie4_5_moe"), execution_device=torch.device("cpu"))


def in_fp8() -> nn.Module:
    model = replace_with_fp8_linear(make("mixtral"), quantization_config=FineGrainedFP8Config())
    return model.to_empty(device="cpu")


def in_fp4() -> nn.Module:
    model = make("gpt_oss")
    for layer in model.model.layers:
        layer.mlp = Mxfp4GptOssMLP(layer.mlp.router, Mxfp4GptOssExperts(model.config))
    model.config.quantization_config = Mxfp4Config()
    return model


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            in_fp8,
            r"the experts of model\.layers\.0\.mlp \(FP8Experts\) have kernels of their own.*"
            "dequantize=True",
        ),
        (in_fp4, "no Mixture-of-Experts layer found.*dequantize=True"),
        (offloaded, "offloaded: a bias there cannot be read"),
    ],
)
def test_what_is_not_understood_is_refused_in_one_line(
    model: Callable[[], nn.Module], line: str
) -> None:
    """``test_architectures.py`` has those of transformers."""
    with pytest.raises(UsageError, match=line) as error, capacity_aware(model(), "score", 1.0):
        pass
    assert "\n" not in str(error.value)
