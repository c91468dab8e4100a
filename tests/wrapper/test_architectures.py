"""Every architecture with the experts interface; see ``docs/reference/models.md``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from capmoe_eval.wrapper.layers import announced_layers, expected_moe_layers, find_moe_layers
from tests.wrapper import architectures
from tests.wrapper.architectures import (
    Finding,
    build,
    count_experts,
    documented,
    examine,
    families,
)

README = Path(__file__).parents[2] / "README.md"

LAYOUTS: list[tuple[str, dict[str, Any], int]] = [
    ("jamba", {"num_hidden_layers": 8, "expert_layer_period": 3, "expert_layer_offset": 1}, 3),
    ("jamba", {"expert_layer_period": 1, "expert_layer_offset": 0}, 4),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "ME*E-E"}, 3),
    ("nemotron_h", {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}, 0),
    ("lfm2_moe", {"num_dense_layers": 3, "layer_types": ["conv", "full_attention"] * 2}, 1),
    ("afmoe", {"num_dense_layers": 0}, 4),
    ("deepseek_v3", {"first_k_dense_replace": 3}, 1),
    ("deepseek_v4", {"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]}, 4),
    ("gemma4", {"enable_moe_block": False}, 0),
    ("granitemoehybrid", {"num_local_experts": 0}, 0),
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
    finding = examine(family)
    assert bool(finding.recipes) != bool(finding.refused)
    assert "\n" not in finding.refused


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_the_configuration_announces_the_layers_that_are_built(family: str) -> None:
    finding, model = examine(family), build(family)
    n_experts = count_experts(model)
    announced = announced_layers(model.config)
    if announced is not None and not finding.refused:
        layer = find_moe_layers(model)[0]
        assert announced == (n_experts, layer.n_experts, layer.top_k)
    if finding.announced != n_experts:
        assert finding.refused.startswith(
            f"its configuration announces {finding.announced} MoE layers, {n_experts} were found"
        )


@pytest.mark.parametrize(("family", "settings", "n_layers"), LAYOUTS)
def test_a_layout_is_counted_from_the_configuration(
    family: str, settings: dict[str, Any], n_layers: int
) -> None:
    torch.manual_seed(0)
    exceptions = architectures.EXCEPTIONS.get(family, {})
    model = build(family, exceptions | settings)
    assert expected_moe_layers(model.config) == n_layers
    assert count_experts(model) == n_layers


@pytest.mark.slow
def test_the_document_is_true() -> None:
    assert architectures.DOCUMENT.read_text() == architectures.document(), (
        "run python -m tests.wrapper.architectures"
    )


@pytest.mark.slow
def test_the_readme_counts_as_the_document_does() -> None:
    findings: list[Finding] = [examine(family) for family in documented()]
    supported = sum(not finding.refused for finding in findings)
    assert f"{supported} of the {len(findings)} architectures" in README.read_text()
