"""The recipe of each trained tiny model, its training, and its shipped weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, MistralConfig, PretrainedConfig, PreTrainedModel

from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.wrapper.checkpoint import load_checkpoint
from capmoe_eval.zoo.miniworld.packing import Batches, Shape
from capmoe_eval.zoo.miniworld.tokenizer import miniworld_tokenizer
from capmoe_eval.zoo.miniworld.world import world
from capmoe_eval.zoo.synthetic.models import tiny_config
from capmoe_eval.zoo.train import Schedule, train
from capmoe_eval.zoo.upcycle import upcycle

#: The directory of the shipped weights, with one directory per model.
WEIGHTS = Path(__file__).parent / "weights"

#: Training steps of a model; for an upcycled one, including those of its dense model.
STEPS = 4000

_HIDDEN, _LAYERS, _HEADS = 96, 4, 4
_DENSE_WIDTH = 128
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_COMMON: dict[str, Any] = {
    "hidden_size": _HIDDEN,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "max_position_embeddings": 2048,
    "initializer_range": 0.06,
    "rms_norm_eps": 1e-5,  # equal in all, so that an upcycled model begins as its dense one
}


@dataclass(frozen=True)
class Recipe:
    """The recipe of one model of the zoo.

    Attributes:
        family: One of ``TINY_FAMILIES``.
        changes: Fields of the configuration that differ from the untrained tiny model's.
        steps: Training steps in all.
        dense_steps: Steps of the dense model that it is upcycled from; 0 for training from scratch.
        noise: Noise on upcycled experts, as a share of their own standard deviation.
        rate: Highest learning rate.
        aux: Coefficient of the router's auxiliary loss, where the class has one.
        ep_size: Number of ranks as in the paper's deployment; it divides the number of experts.
        seed: Seed of the first weights.
    """

    family: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    dense_steps: int = 0
    noise: float = 0.5
    rate: float = 3e-3
    aux: float = 2e-4
    ep_size: int = 8
    seed: int = 0


#: Every trained model, by name.
ZOO: Mapping[str, Recipe] = {
    "olmoe": Recipe("olmoe", {"intermediate_size": 32}),
    "deepseek_v2": Recipe(
        "deepseek_v2",
        {
            "num_hidden_layers": _LAYERS + 1,  # the first has no experts
            "intermediate_size": 192,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "kv_lora_rank": 96,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 24,
            "v_head_dim": 24,
        },
        steps=3 * STEPS // 2,  # with latent attention it learns the first facts late
    ),
    "mixtral": Recipe(
        "mixtral",
        {"intermediate_size": _DENSE_WIDTH, "num_key_value_heads": 4, "rope_parameters": _ROPE},
        dense_steps=STEPS // 4,
    ),
    "qwen2_moe": Recipe(
        "qwen2_moe",
        {
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "rope_parameters": _ROPE,
        },
        dense_steps=STEPS // 4,
        ep_size=6,
    ),
    "qwen3_moe": Recipe(
        "qwen3_moe", {"moe_intermediate_size": 48, "num_key_value_heads": 4, "head_dim": 24}
    ),
}


def trained_model(name: str, *, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Load a shipped model on the CPU, in evaluation mode.

    Args:
        name: One of ``ZOO``.
        dtype: Type of the weights; the files have bfloat16.

    Raises:
        UsageError: If the name is unknown or there are no weights.
    """
    recipe(name)
    directory = WEIGHTS / name
    if not (directory / "model.safetensors").is_file():
        raise UsageError(
            f"no weights in {directory}; `python -m capmoe_eval.tiny train {name}` makes them"
        )
    model: PreTrainedModel = load_checkpoint(directory, dtype=dtype)
    return model


def recipe(name: str) -> Recipe:
    """Return a recipe by its name.

    Raises:
        UsageError: If the name is unknown.
    """
    if name not in ZOO:
        raise bad_choice("name", name, tuple(ZOO))
    return ZOO[name]


def configuration(name: str) -> PretrainedConfig:
    """Return the configuration that a model of the zoo is trained with.

    Raises:
        UsageError: If the name is unknown.
    """
    chosen = recipe(name)
    aux = {"output_router_logits": True, "router_aux_loss_coef": chosen.aux}
    routed = {} if chosen.family == "deepseek_v2" else aux  # its class has no such loss
    changes = {**_COMMON, **chosen.changes, **routed}
    return tiny_config(chosen.family, len(miniworld_tokenizer()), **changes)


def corpus_seed(seed: int | None) -> int:
    """Return the corpus seed that belongs to a seed of the weights; None: the shipped models'."""
    return 1 + 1000 * (seed or 0)


def build(
    name: str,
    work: Path,
    *,
    steps: int | None = None,
    seed: int | None = None,
    scratch: bool = False,
    say: Callable[[str], None] = print,
) -> tuple[PreTrainedModel, list[float]]:
    """Train a model of the zoo; after a kill, continue from the last checkpoint.

    Args:
        name: One of ``ZOO``.
        work: Directory of the checkpoints.
        steps: Total number of steps; None for the recipe's.
        seed: Seed of the first weights and of the corpus; None for those of the shipped model.
        scratch: Whether to train a model from scratch that the zoo upcycles.
        say: Function that takes progress lines.

    Returns:
        The model in float32, in evaluation mode, and the loss of each step, those of its dense
        model first.

    Raises:
        UsageError: If the name is unknown.
    """
    chosen = recipe(name)
    steps = chosen.steps if steps is None else steps
    tokenizer = miniworld_tokenizer()
    start = chosen.seed if seed is None else seed
    shape = Shape(early=steps // 2)
    batches = Batches(world(), tokenizer, seed=corpus_seed(seed), shape=shape)
    dense_steps = 0 if scratch else chosen.dense_steps * steps // chosen.steps
    model = _fresh(configuration(name), start)
    losses: list[float] = []
    if dense_steps:
        dense = _fresh(_dense_config(len(tokenizer)), start)
        say(f"dense: {_millions(dense)} million parameters")
        schedule = Schedule(dense_steps, rate=chosen.rate)
        # Models that are upcycled from the same dense model share its checkpoint.
        state = work / f"dense-{start}-{dense_steps}.pt"
        losses += train(dense, batches, schedule, checkpoint=state, say=say)
        upcycle(dense, model, noise=chosen.noise, seed=start)
    say(f"{name}: {_millions(model)} million parameters")
    losses += train(
        model,
        batches,
        Schedule(steps - dense_steps, rate=chosen.rate),
        checkpoint=work / f"{name}-{start}-{steps}{'-scratch' if scratch else ''}.pt",
        first=dense_steps,
        say=say,
    )
    model.config.output_router_logits = False  # evaluation needs no auxiliary loss
    return model, losses


def _fresh(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _dense_config(vocab_size: int) -> PretrainedConfig:
    return MistralConfig(
        vocab_size=vocab_size,
        intermediate_size=_DENSE_WIDTH,
        num_key_value_heads=_HEADS,
        sliding_window=None,
        rope_parameters=_ROPE,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        tie_word_embeddings=False,
        **_COMMON,
    )


def _millions(model: PreTrainedModel) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.2f}"


def save(model: PreTrainedModel, directory: Path) -> None:
    """Write a model as bfloat16 ``model.safetensors`` with its ``config.json``.

    Raises:
        OSError: If the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    for file in directory.iterdir():
        file.chmod(0o644)  # safetensors makes its files private
