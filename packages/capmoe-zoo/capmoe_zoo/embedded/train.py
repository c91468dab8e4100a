"""Train a tiny model by its recipe: plain AdamW on the model's own loss.

``capmoe-eval train <name>`` runs it. A killed training continues from its last checkpoint and ends
with the same weights.

Beside the next token, data may label states in the middle of the model, and may teach one head what
to attend to (``Batch``).

A dense model is upcycled into a Mixture-of-Experts model in one of two ways. As in Mixtral, every
expert is a copy of the dense MLP. As in Qwen1.5-MoE, the shared expert is a part of the MLP, and
each other part goes to several routed experts. Noise makes the copies different.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from capmoe_eval.errors import bad_choice
from capmoe_eval.experiment.files import read_data, write_bytes, write_text
from capmoe_eval.experiment.names import split_seed, split_world
from capmoe_eval.zoo.llava import llava_config
from capmoe_eval.zoo.tiny import tiny_config
from capmoe_eval.zoo.tokenizer import miniworld_tokenizer, wrapped
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from capmoe_zoo.embedded import banking77
from capmoe_zoo.embedded.batch import IGNORED, Batch, Batches
from capmoe_zoo.embedded.miniworld import corpus_batch, train_tokenizer
from capmoe_zoo.embedded.pictures import picture_batch, picture_tokenizer
from capmoe_zoo.training import say, take_steps
from capmoe_zoo.worlds.miniworld.world import WORLD_SEED, world

# Sorts tokens by expert; on a CPU it trains 1.2 times as fast as the loop over experts.
TRAINING_KERNEL = "grouped_mm"


@dataclass(frozen=True)
class Recipe:
    """The recipe of one model of the zoo."""

    family: str  # one of TINY_FAMILIES
    changes: Mapping[str, Any]  # fields of the configuration that differ from the tiny model's
    steps: int = 2400  # in all
    dense_steps: int = 0  # of the dense model that it is upcycled from; 0 for training from scratch
    noise: float = 0.5  # on upcycled experts, as a share of their own standard deviation
    rate: float = 3e-3  # highest learning rate
    warmup: int = 100  # steps of linear rise; a cosine then falls to a fiftieth of ``rate``
    restart: int = 0  # the step at which the learning rate rises and falls a second time
    decay: float = 0.05  # of weights
    aux: float = 1e-5  # coefficient of the routers' auxiliary loss
    middle: int | None = None  # the layer after which states are labelled, too; 0: before the first
    classes: int = 0  # number of the classes among these labels
    seed: int = 0  # of the first weights and of the corpus
    data: Literal["miniworld", "banking77", "demonstrations", "pictures"] = "miniworld"
    world: int = WORLD_SEED  # the seed of the mini-world
    vision: Mapping[str, Any] | None = None  # fields of a CLIP tower's configuration, for a LLaVA


_RECIPES = read_data(__package__, "recipes.yaml", dict[str, Any])
#: Every trained model, by name.
ZOO = {name: Recipe(**fields) for name, fields in _RECIPES["models"].items()}
#: Configuration of the dense model that some are upcycled from, but for its vocabulary.
DENSE: Mapping[str, Any] = _RECIPES["dense"]


def recipe(name: str, *, steps: int | None = None) -> Recipe:
    """Return a recipe by its name, and with other steps if they are given.

    ``olmoe_s1`` is ``olmoe`` with another training seed, ``olmoe_w8_s1`` also in the mini-world of
    seed 8. A name that is unknown is a UsageError.
    """
    in_world, seed = split_seed(name)
    model, world_seed = split_world(in_world)
    if model not in ZOO or (world_seed is not None and ZOO[model].data != "miniworld"):
        raise bad_choice("name", name, tuple(ZOO))
    chosen = ZOO[model]
    changes: dict[str, Any] = {
        "world": world_seed,
        "seed": seed,
        "steps": steps,
        "dense_steps": steps and chosen.dense_steps * steps // chosen.steps,
    }
    return replace(chosen, **{key: value for key, value in changes.items() if value is not None})


def configuration(chosen: Recipe, vocab_size: int) -> PretrainedConfig:
    """Return the configuration of a model that is trained by a recipe.

    The last token of a model with a tower stands for a part of a picture.
    """
    text = tiny_config(chosen.family, vocab_size, **chosen.changes)
    if chosen.vision is None:
        return text
    return llava_config(text, chosen.vision, image_token_id=vocab_size - 1)


def corpus_seed(seed: int) -> int:
    """Return the corpus seed that belongs to a seed of the weights."""
    return 1 + 1000 * seed


def model_class(chosen: Recipe) -> Any:
    """Return the class of transformers that makes and loads the model of a recipe."""
    return AutoModelForImageTextToText if chosen.vision else AutoModelForCausalLM


def build(
    name: str, chosen: Recipe, work: Path, *, device: torch.device | str = "cpu"
) -> tuple[PreTrainedModel, list[float]]:
    """Train a model by a recipe; after a kill, continue from the last checkpoint.

    ``work`` is the directory of the checkpoints, in which ``name`` is a part of their names.
    The weights are those of one kind of processor.

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
        losses += train(dense.to(device), batches, part, checkpoint=state)
        upcycle(dense.cpu(), model, noise=chosen.noise, seed=seed)
    say(f"{name}: {model.num_parameters() / 1e6:.2f} million parameters")
    losses += train(
        model.to(device),
        batches,
        replace(chosen, steps=steps - dense_steps),
        checkpoint=work / f"{name}-{seed}-{steps}-{dense_steps}.pt",
        first=dense_steps,
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
    queries = banking77.train_split()
    if chosen.data == "demonstrations":
        tokenizer = banking77.demonstrations_tokenizer(queries)
        return tokenizer, partial(banking77.demonstration_batch, queries, tokenizer, seed, steps)
    tokenizer = banking77.queries_tokenizer(queries)
    return tokenizer, partial(banking77.query_batch, queries, tokenizer, seed)


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


def class_reader(model: PreTrainedModel, classes: int) -> nn.Module:
    """Return the layer that reads classes in the middle of a model.

    It is trained along and is no part of the model; without classes it does nothing.
    """
    if not classes:
        return nn.Identity()
    size = model.config.get_text_config().hidden_size
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.RMSNorm(size), nn.Linear(size, classes)).to(model.device)


def batch_loss(model: PreTrainedModel, batch: Batch, chosen: Recipe, reader: nn.Module) -> Tensor:
    """Return the loss of a batch: cross-entropy of its labels, and the auxiliary loss.

    States in the middle are read, too, where they have labels: tokens as from the last layer,
    classes by the ``reader``. The classes' own loss computes logits of every position, six times as
    many as have a label.
    The auxiliary loss is that of Switch Transformer, E · Σ (share of the assignments · mean
    probability), averaged over the layers, as the families were trained with. (transformers counts
    all layers as one, and DeepSeek-V2's class has none.) Pads do not count.
    """
    middle, aux = chosen.middle, chosen.aux
    with _attention_of(model, None if batch.sought_BSS is None else middle) as attention:
        output = model.model(
            **batch.taken(model),
            use_cache=False,
            output_hidden_states=middle is not None,
            **({"output_router_logits": True} if aux > 0 else {}),
        )
    loss = _read(model.lm_head, output.last_hidden_state[:, :-1], batch.labels_BS[:, 1:])
    if middle is not None:
        last = nn.Sequential(model.get_decoder().norm, model.lm_head)
        named = _read(last, output.hidden_states[middle], batch.middle_BS)
        loss = loss + (named + _read(reader, output.hidden_states[middle], batch.classes_BS))
    if attention and batch.sought_BSS is not None and batch.sought_BSS.any():
        # How far the head misses the positions that it is to attend to: −log of their share.
        share_BS = (attention[0][:, 0] * batch.sought_BSS).sum(-1)
        share_N = share_BS[batch.sought_BSS.any(-1)]
        loss = loss - share_N.clamp_min(1e-9).log().mean()
    if aux > 0:
        real_N = (batch.input_ids_BS != model.config.pad_token_id).flatten()
        top_k = int(model.config.num_experts_per_tok)
        losses = [_imbalance(gate[real_N], top_k) for gate in output.router_logits]
        loss = loss + aux * torch.stack(losses).mean()
    return loss


def _read(reader: nn.Module, states_BSH: Tensor, labels_BS: Tensor | None) -> Tensor:
    """Return the cross-entropy of the labels of states; 0 where none has a label."""
    if labels_BS is None or not (labelled_BS := labels_BS != IGNORED).any():
        return states_BSH.new_zeros(())
    return functional.cross_entropy(reader(states_BSH[labelled_BS]), labels_BS[labelled_BS])


@contextmanager
def _attention_of(model: PreTrainedModel, layer: int | None) -> Iterator[list[Tensor]]:
    """Collect the attention [B, heads, S, S] of a layer, which only the eager kernel returns."""
    if layer is None:
        yield []
        return
    attention = model.get_decoder().layers[layer].self_attn
    config = attention.config
    attention.config = copy(config)
    attention.config._attn_implementation = "eager"
    collected: list[Tensor] = []
    hook = attention.register_forward_hook(lambda _module, _inputs, out: collected.append(out[1]))
    try:
        yield collected
    finally:
        hook.remove()
        attention.config = config


def _imbalance(logits_NE: Tensor, top_k: int) -> Tensor:
    """Return the auxiliary loss of a layer: 1 at balance, at most E/K."""
    n_experts = logits_NE.shape[1]
    probabilities_NE = logits_NE.softmax(-1)
    chosen = probabilities_NE.detach().topk(top_k).indices.flatten()
    share_E = chosen.bincount(minlength=n_experts) / len(chosen)
    return n_experts * (share_E * probabilities_NE.mean(0)).sum()


def train(
    model: PreTrainedModel, batches: Batches, chosen: Recipe, *, checkpoint: Path, first: int = 0
) -> list[float]:
    """Train a causal language model in float32, in place, and return the loss of every step.

    ``first`` is the number of the first batch; an upcycled model begins after those of its dense
    model. The other arguments are those of :func:`capmoe_zoo.training.take_steps`.
    """
    reader = class_reader(model, chosen.classes)
    trained = nn.ModuleDict({"model": model, "reader": reader})
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
        return batch_loss(model, batches(first + step).on(model.device), chosen, reader)

    _kernel(model, TRAINING_KERNEL)
    model.train()
    losses = take_steps(
        trained,
        optimizer,
        loss_of,
        chosen.steps,
        rate_at=partial(rate_at, chosen),
        checkpoint=checkpoint,
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
