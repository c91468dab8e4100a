"""Every architecture of transformers that uses its experts interface, built in small.

``python -m tests.wrapper.architectures`` writes ``docs/reference/models.md`` from what is found.
"""

import dataclasses
import functools
import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from capmoe_eval.errors import UsageError
from capmoe_eval.wrapper.gates import GateRecipe
from capmoe_eval.wrapper.layers import announced_layers, expected_moe_layers, find_moe_layers
from capmoe_eval.wrapper.session import capacity_aware

VOCABULARY = 97
ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reference" / "models.md"
(LOCKED,) = re.findall(
    r"^transformers==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE
)
"""The version of transformers that the document is about."""

_ROPE = {"rope_type": "default", "rope_theta": 1e4}

_FIELDS: dict[Any, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    32: """
        hidden_size out_hidden_size text_hidden_size projector_hidden_size
        projection_hidden_dim projection_intermediate_size adapter_in_dim adapter_out_dim
        adapter_input_size d_model output_dim
    """,
    48: """
        intermediate_size dense_intermediate_size prefix_dense_intermediate_size mlp_dim
        encoder_ffn_dim
    """,
    4: """
        num_hidden_layers num_attention_heads num_key_value_heads rotary_dim index_topk
        index_block_size indexer_compress_ratio linear_num_heads linear_num_value_heads
        swa_num_attention_heads d_rel gated_norm_rank num_heads patch_size
        encoder_attention_heads
    """,
    8: """
        head_dim sliding_window num_experts num_local_experts n_routed_experts
        moe_num_experts qk_nope_head_dim qk_rope_head_dim v_head_dim o_lora_rank
        indexer_head_dim indexer_budget linear_head_dim linear_key_head_dim
        linear_value_head_dim swa_head_dim sliding_window_size global_head_dim mamba_d_state
        mamba_n_heads mamba_num_heads mamba_head_dim ssm_state_size block_size hc_lowrank
        output_channels
    """,
    128: "max_position_embeddings",
    0: """
        pad_token_id hidden_size_per_layer_input num_mtp_layers num_nextn_predict_layers
    """,
    1: """
        bos_token_id topk_group n_shared_experts first_k_dense_replace num_dense_layers
        indexer_kv_heads depth encoder_layers
    """,
    2: """
        eos_token_id num_experts_per_tok moe_topk moe_k top_k_experts n_group o_groups
        index_n_heads index_kpool index_topk_blocks indexer_n_heads linear_num_key_heads
        swa_num_key_value_heads num_global_key_value_heads n_groups window_size
    """,
    16: """
        moe_hidden_size router_hidden_size q_lora_rank kv_lora_rank index_head_dim
        rel_extent mamba_chunk_size chunk_size image_size num_position_embeddings
        position_embedding_size downsample_hidden_size
    """,
    24: """
        moe_intermediate_size shared_intermediate_size shared_expert_intermediate_size
        shared_experts_intermediate_size moe_shared_expert_intermediate_size
    """,
    (0,): "global_attn_indexes",
    (8, 8, 8, 8): "hidden_sizes",
    (1, 1, 1, 1): "depths",
}
SMALL = {name: value for value, names in _FIELDS.items() for name in names.split()}
"""Values of configuration fields, wherever a family has them."""

_HALF_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense"] + ["sparse"] * 3}},
    "diffusion_gemma": {"text_config": {"enable_moe_block": True}},
    "dots3_note": {"layer_types": ["full_attention"] * 4},
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [24, 24],
            "rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]},
        }
    },
    "gemma4": {"enable_moe_block": True},
    "glm4v_moe": {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 0]}}},
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0}},
    "granitemoehybrid": _HALF_LINEAR,
    "hy_v4_vl": {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _HALF_LINEAR,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Further settings of a family; those of its parts, by the name of the part."""

_CLASSES = {
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
"""Models of families whose first class is deprecated, or answers with something else than text."""


@functools.cache
def families() -> tuple[str, ...]:
    """Return the names of the installed architectures that use the experts interface."""
    models = Path(transformers.__file__).parent / "models"
    return tuple(
        path.parent.name
        for path in sorted(models.glob("*/modeling_*.py"))
        if "@use_experts_implementation" in path.read_text()
    )


def model_class(family: str) -> Any:
    """Return the class of a family that answers with text, or else its first one with a head."""
    module: ModuleType = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if family in _CLASSES:
        return getattr(module, _CLASSES[family])
    classes = [
        value
        for value in (getattr(module, name) for name in module.__all__)
        if isinstance(value, type) and issubclass(value, PreTrainedModel)
    ]
    for ending in ("ForCausalLM", "ForConditionalGeneration"):
        for each in classes:
            if each.__name__.endswith(ending):
                return each
    return next(each for each in classes if "For" in each.__name__)


def small_config(config_class: type[PreTrainedConfig], settings: Mapping[str, Any]) -> Any:
    """Return a configuration in which all that makes a model large is small.

    Args:
        config_class: Its class.
        settings: Fields with another value; of a part, a mapping under the part's name.
    """
    fields = {field.name for field in dataclasses.fields(config_class)}
    parts = config_class.sub_configs
    values = {name: value for name, value in SMALL.items() if name in fields - parts.keys()}
    for name, part in parts.items():
        part_class = type(getattr(config_class(), name)) if part is AutoConfig else part
        if dataclasses.is_dataclass(part_class):
            values[name] = small_config(part_class, settings.get(name, {}))
    values |= {name: value for name, value in settings.items() if name not in parts}
    return config_class(**values)


def build(
    family: str, settings: Mapping[str, Any] | None = None, *, experts: str | None = None
) -> PreTrainedModel:
    """Return a tiny model of a family whose router has an opinion and whose bias is not zero.

    Args:
        family: One of :func:`families`.
        settings: Configuration fields, in place of the family's exceptions.
        experts: The experts' kernel.
    """
    built = model_class(family)
    chosen = EXCEPTIONS.get(family, {}) if settings is None else settings
    config = small_config(built.config_class, chosen)
    if experts is not None:
        config._experts_implementation = experts
    return with_opinions(built(config))


def with_opinions(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with routers that have an opinion and with biases that are not zero."""
    for name, parameter in model.named_parameters():
        if "experts" in name:
            nn.init.normal_(parameter, std=0.3)
        if "router" in name or name.endswith(("gate.weight", "wg.weight")):
            nn.init.normal_(parameter, std=1.0)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            nn.init.normal_(tensor, std=0.2)
        if name.endswith("tid2eid"):  # experts of each token
            tensor.copy_(torch.rand(len(tensor), 8).argsort(dim=1)[:, : tensor.shape[1]])
    return model.eval()


def count_experts(model: nn.Module) -> int:
    """Return how many modules of a model are experts behind the interface."""
    return sum(hasattr(module, "_is_expert_parallel") for module in model.modules())


@functools.cache
def examine(family: str) -> tuple[str, bool, str]:
    """Build a family in small and run it under a capacity.

    Returns:
        The class that was built, whether it is refused, and the reason, or how its gates work.

    Raises:
        AssertionError: If an invariant does not hold.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(family)
        tokens = torch.randint(3, VOCABULARY, (4, 12))
    config: Any = model.config
    name, built, announced = type(model).__name__, count_experts(model), expected_moe_layers(config)
    before = _logits(model, tokens)
    try:
        with capacity_aware(model, "score", gamma=1.0) as meter:
            inside = _logits(model, tokens)
            with meter.real_tokens(torch.zeros_like(tokens)):  # no token counts
                _logits(model, tokens)
    except UsageError as error:
        reason = str(error).partition(": ")[2]
        other = f"its configuration announces {announced} MoE layers, {built} were"
        assert announced == built or reason.startswith(other)
        return name, True, reason
    proofs = meter.proofs()
    assert all(proof["passed"] for proof in proofs.values()), proofs
    assert meter.summary()["dropped"] > 0
    assert bool(inside.isfinite().all())
    assert not torch.allclose(before, inside, atol=1e-5)
    assert torch.equal(before, _logits(model, tokens))
    layers = find_moe_layers(model)
    assert announced == built
    assert announced_layers(config) in (None, (built, layers[0].n_experts, layers[0].top_k))
    recipes = dict.fromkeys(layer.gate.recipe for layer in layers)
    return name, False, "; ".join(map(_words, recipes))


@torch.no_grad()
def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens).logits
    return logits


def documented() -> dict[str, str]:
    """Return what the document says of each family of the locked version: its gate, or why not."""
    text = DOCUMENT.read_text()
    rows = re.findall(r"^\| ([^`|]+) \| (`.*`) \|$", text, re.MULTILINE)
    gates = {name: gate for gate, names in rows for name in re.findall(r"`(\w+)`", names)}
    return gates | dict(re.findall(r"^- `(\w+)` \(`\w+`\): (.*)$", text, re.MULTILINE))


def head(supported: int, n_families: int) -> str:
    """Return the beginning of the document."""
    return _HEAD.format(supported=supported, all=n_families, version=LOCKED)


def document() -> str:
    """Return ``docs/reference/models.md``."""
    from tests.wrapper.images import with_images

    examined = {family: examine(family) for family in families()}
    names: dict[str, list[str]] = {}
    for family, (_, is_refused, words) in examined.items():
        if not is_refused:
            names.setdefault(words, []).append(f"`{family}`")
    rows = sorted(names.items(), key=lambda row: -len(row[1]))
    gates = _TABLE + "".join(f"| {gate} | {', '.join(same)} |\n" for gate, same in rows)
    refusals = "".join(
        f"- `{family}` (`{model}`): {reason}\n"
        for family, (model, is_refused, reason) in examined.items()
        if is_refused
    )
    begin = head(sum(map(len, names.values())), len(examined))
    return f"{begin}{gates}\n{with_images(LOCKED)}\n\n## Refused\n\n{refusals}"


_HEAD = """\
# Supported models

{supported} of the {all} architectures of transformers {version} that dispatch their experts through
its experts interface run under a capacity. Of each, a small model with random weights was run at
γ=1. Every [invariant](invariants.md) held, tokens were dropped, and the model was itself again
afterwards. `python -m tests.wrapper.architectures` writes this page; a test keeps it true.

A router is identified by what it does, not by its name: by its choices and weights for random
hidden states. An architecture that is not listed is identified in the same way, or refused with
the reason. Quantised experts (FP8, MXFP4) are refused: load them dequantised.

## Supported

A *bias* is added for the choice alone.

"""
_TABLE = "| gate | architectures |\n|---|---|\n"


def _words(recipe: GateRecipe) -> str:
    parts = {
        "activation": "scores as returned" if recipe.activation == "none" else recipe.activation,
        "normalises": "normalised" if recipe.normalises else "",
        "epsilon": f"+{recipe.epsilon:g} in the sum" if recipe.epsilon else "",
        "groups": f"groups by {recipe.groups}" if recipe.groups != "none" else "",
        "biased": f"bias on {recipe.biased}" if recipe.biased != "none" else "",
        "fixed": "choice fixed for each token" if recipe.fixed else "",
        "scales": "a factor for each expert" if recipe.scales else "",
    }
    return ", ".join(part for part in parts.values() if part)


if __name__ == "__main__":
    DOCUMENT.write_text(document())
