"""Train a tiny model by its recipe: plain AdamW on the model's own loss.

``capmoe-eval train <name>`` runs it. A killed training continues from its last checkpoint and ends
with the same weights.

A dense model is upcycled into a Mixture-of-Experts model in one of two ways. As in Mixtral, every
expert is a copy of the dense MLP. As in Qwen1.5-MoE, the shared expert is a part of the MLP, and
each other part goes to several routed experts. Noise makes the copies different.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from capmoe_eval.experiment.files import write_bytes, write_text
from capmoe_eval.zoo.tokenizer import miniworld_tokenizer, wrapped
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from capmoe_zoo.embedded.banking77 import (
    banking77_tokenizer,
    demonstration_batch,
    demonstrations_tokenizer,
    query_batch,
    train_split,
)
from capmoe_zoo.embedded.batch import Batches
from capmoe_zoo.embedded.loss import Middle, batch_loss
from capmoe_zoo.embedded.miniworld import corpus_batch, train_tokenizer
from capmoe_zoo.embedded.pictures import picture_batch, picture_tokenizer
from capmoe_zoo.embedded.recipes import DENSE, Recipe, configuration, corpus_seed, model_class
from capmoe_zoo.training import take_steps
from capmoe_zoo.worlds.miniworld.world import WORLD_SEED, world

# Sorts tokens by expert; on a CPU it trains 1.2 times as fast as the loop over experts.
TRAINING_KERNEL = "grouped_mm"


def build(
    name: str,
    chosen: Recipe,
    work: Path,
    *,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = print,
) -> tuple[PreTrainedModel, list[float]]:
    """Train a model by a recipe; after a kill, continue from the last checkpoint.

    ``work`` is the directory of the checkpoints, in which ``name`` is a part of their names.
    ``say`` takes progress lines. The weights are those of one kind of processor.

    Returns:
        The model in float32, in evaluation mode, and the loss of each step, those of its dense
        model first.
    """
    steps, dense_steps, seed = chosen.steps, chosen.dense_steps, chosen.seed
    # After a restart the corpus goes on as it ended.
    tokenizer, batches = data_of(chosen, chosen.restart or steps)
    vocabulary = len(tokenizer)
    model = fresh(model_class(chosen), configuration(chosen, vocabulary), seed)
    losses: list[float] = []
    if dense_steps:
        config = MistralConfig(vocab_size=vocabulary, **DENSE)
        dense = fresh(AutoModelForCausalLM, config, seed)
        say(f"dense: {dense.num_parameters() / 1e6:.2f} million parameters")
        # Models that are upcycled from the same dense model share its checkpoint.
        state = work / f"dense-{chosen.world}-{seed}-{dense_steps}.pt"
        part = replace(chosen, steps=dense_steps, aux=0.0)
        losses += train(dense.to(device), batches, part, checkpoint=state, say=say)
        upcycle(dense.cpu(), model, noise=chosen.noise, seed=seed)
    say(f"{name}: {model.num_parameters() / 1e6:.2f} million parameters")
    losses += train(
        model.to(device),
        batches,
        replace(chosen, steps=steps - dense_steps),
        checkpoint=work / f"{name}-{seed}-{steps}-{dense_steps}.pt",
        first=dense_steps,
        say=say,
    )
    return model, losses


def data_of(chosen: Recipe, steps: int) -> tuple[PreTrainedTokenizerFast, Batches]:
    """Return the tokenizer and the batches of a training of so many steps."""
    seed = corpus_seed(chosen.seed)
    if chosen.data == "miniworld":
        mini_world = world(chosen.world)
        shipped = chosen.world == WORLD_SEED
        tokenizer = miniworld_tokenizer() if shipped else wrapped(train_tokenizer(mini_world))
        return tokenizer, partial(corpus_batch, mini_world, tokenizer, seed, steps // 2)
    if chosen.data == "pictures":
        tokenizer = picture_tokenizer()
        return tokenizer, partial(picture_batch, tokenizer, seed, steps)
    queries = train_split()
    if chosen.data == "demonstrations":
        tokenizer = demonstrations_tokenizer(queries)
        return tokenizer, partial(demonstration_batch, queries, tokenizer, seed, steps)
    tokenizer = banking77_tokenizer(queries)
    return tokenizer, partial(query_batch, queries, tokenizer, seed)


def fresh(kind: Any, config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """Return a model in float32 with the first weights of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = kind.from_config(config, dtype=torch.float32)
        return model


def save(model: PreTrainedModel, chosen: Recipe, directory: Path) -> None:
    """Write a model as bfloat16 ``model.safetensors`` with its ``config.json``, each file whole.

    Its tokenizer is written beside them, where it is not the shipped one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        model.to(torch.bfloat16).save_pretrained(scratch)
        for file in sorted(Path(scratch).iterdir()):
            write_bytes(directory / file.name, file.read_bytes())
    if (chosen.data, chosen.world) != ("miniworld", WORLD_SEED):
        tokenizer, _ = data_of(chosen, chosen.steps)
        write_text(directory / "tokenizer.json", tokenizer.backend_tokenizer.to_str(pretty=True))


def train(
    model: PreTrainedModel,
    batches: Batches,
    chosen: Recipe,
    *,
    checkpoint: Path | None = None,
    every: int = 200,
    first: int = 0,
    say: Callable[[str], None] = print,
) -> list[float]:
    """Train a causal language model in float32, in place, and return the loss of every step.

    ``first`` is the number of the first batch; an upcycled model begins after those of its dense
    model. The other arguments are those of :func:`capmoe_zoo.training.take_steps`.
    """
    middle = None
    if chosen.middle is not None:
        middle = Middle(model, chosen.middle, chosen.classes)
    trained = nn.ModuleDict({"model": model} | ({"middle": middle} if middle else {}))
    parameters = list(trained.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": chosen.decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )

    def loss_of(step: int) -> Tensor:
        return batch_loss(model, batches(first + step).on(model.device), chosen.aux, middle)

    _kernel(model, TRAINING_KERNEL)
    model.train()
    losses = take_steps(
        trained,
        optimizer,
        loss_of,
        chosen.steps,
        rate_at=lambda step: rate_at(chosen, step),
        checkpoint=checkpoint,
        every=every,
        say=say,
    )
    _kernel(model, "eager")
    model.eval()
    return losses


def rate_at(chosen: Recipe, step: int) -> float:
    """Return the learning rate of a step: a linear rise, then a cosine to a fiftieth."""
    start, end = (0, chosen.restart) if step < chosen.restart else (chosen.restart, chosen.steps)
    step, steps = step - start, end - start
    if step < chosen.warmup:
        return chosen.rate * (step + 1) / chosen.warmup
    done = (step - chosen.warmup) / max(1, steps - chosen.warmup)
    return chosen.rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def _kernel(model: PreTrainedModel, name: str) -> None:
    """Set the experts' kernel of a model; do nothing for a dense one."""
    if any(hasattr(module, "num_experts") for module in model.modules()):
        # The decoder: a class with a tower takes none.
        model.get_decoder().set_experts_implementation(name)


# Shape suffixes: E experts, I width of an expert, D width of the dense MLP, H hidden size.


def upcycle(dense: PreTrainedModel, sparse: PreTrainedModel, *, noise: float, seed: int) -> None:
    """Copy a dense model into a Mixture-of-Experts model, in place.

    Attention, norms and embeddings are copied where both models have them. Routers and parameters
    that the dense model lacks (Qwen's biases and the gate of the shared expert) stay unchanged.

    Args:
        dense: A model whose layers have ``mlp.gate_proj``, ``mlp.up_proj`` and ``mlp.down_proj``.
        sparse: A model with as many layers of the same hidden size; the widths of its shared expert
            (if any) and of one or more whole experts add up to the dense width.
        noise: Standard deviation of the noise relative to that of the experts' weights.
        seed: Seed of the noise.
    """
    source, target = dense.state_dict(), sparse.state_dict()
    generator = torch.Generator().manual_seed(seed)

    def noisy(weight: Tensor) -> Tensor:
        return weight + noise * weight.std() * torch.randn(weight.shape, generator=generator)

    with torch.no_grad():
        for name, weight in target.items():
            if name in source and source[name].shape == weight.shape:
                weight.copy_(source[name])
        for layer in range(dense.config.num_hidden_layers):
            mlp = f"model.layers.{layer}.mlp"
            gate_DH, up_DH, down_HD = (
                source[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up", "down")
            )
            cut, shared = 0, f"{mlp}.shared_expert"
            if f"{shared}.gate_proj.weight" in target:
                cut = len(target[f"{shared}.gate_proj.weight"])
                target[f"{shared}.gate_proj.weight"].copy_(gate_DH[:cut])
                target[f"{shared}.up_proj.weight"].copy_(up_DH[:cut])
                # Doubled, because an untrained sigmoid gate is about one half.
                target[f"{shared}.down_proj.weight"].copy_(2 * down_HD[:, :cut])
            gate_up_EIH = target[f"{mlp}.experts.gate_up_proj"]
            down_EHI = target[f"{mlp}.experts.down_proj"]
            n_experts, _, width = down_EHI.shape
            for expert in range(n_experts):
                start = cut + expert * width % (len(gate_DH) - cut)
                rows = slice(start, start + width)
                gate_up_EIH[expert].copy_(noisy(torch.cat([gate_DH[rows], up_DH[rows]])))
                down_EHI[expert].copy_(noisy(down_HD[:, rows]))
