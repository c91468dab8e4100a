"""Every architecture with the experts interface; see ``docs/reference/models.md``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from capmoe_eval.wrapper.layers import expected_moe_layers
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
