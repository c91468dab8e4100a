"""The recipe of each embedded model, and its training."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from capmoe_eval.errors import bad_choice
from capmoe_eval.experiment.data_file import read_data
from capmoe_eval.experiment.files import write_bytes, write_text
from capmoe_eval.experiment.names import split_seed, split_world
from capmoe_eval.zoo.llava import llava_config
from capmoe_eval.zoo.tiny import tiny_config
from capmoe_eval.zoo.tokenizer import miniworld_tokenizer, wrapped
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from capmoe_zoo.embedded.banking77 import QueryBatches, banking77_tokenizer, train_split
from capmoe_zoo.embedded.batch import NumberedBatches
from capmoe_zoo.embedded.demonstrations import DemonstrationBatches, demonstrations_tokenizer
from capmoe_zoo.embedded.miniworld import Batches, train_tokenizer
from capmoe_zoo.embedded.pictures import PictureBatches, picture_tokenizer
from capmoe_zoo.embedded.train import Schedule, train, upcycle
from capmoe_zoo.worlds.miniworld.world import WORLD_SEED, world


@dataclass(frozen=True)
class Recipe:
    """The recipe of one model of the zoo."""

    family: str  # one of TINY_FAMILIES
    changes: Mapping[str, Any]  # fields of the configuration that differ from the tiny model's
    steps: int = 2400  # in all
    dense_steps: int = 0  # of the dense model that it is upcycled from; 0 for training from scratch
    noise: float = 0.5  # on upcycled experts, as a share of their own standard deviation
    rate: float = 3e-3  # highest learning rate
    restart: int = 0  # the step at which the learning rate rises and falls a second time
    decay: float = 0.05  # of weights
    aux: float = 1e-5  # coefficient of the routers' auxiliary loss
    middle: int | None = None  # the layer after which states are labelled, too; 0: before the first
    classes: int = 0  # number of the classes among these labels
    seed: int = 0  # of the first weights and of the corpus
    data: Literal["miniworld", "banking77", "demonstrations", "pictures"] = "miniworld"
    world: int = WORLD_SEED  # the seed of the mini-world
    vision: Mapping[str, Any] | None = None  # fields of a CLIP tower's configuration, for a LLaVA


@dataclass(frozen=True)
class _Recipes:
    common: dict[str, Any]  # fields of every configuration, which the others take in
    dense: dict[str, Any]
    models: dict[str, Recipe]


_RECIPES = read_data(__package__, "recipes.yaml", _Recipes)
#: Every trained model, by name.
ZOO: Mapping[str, Recipe] = _RECIPES.models


def recipe(name: str) -> Recipe:
    """Return a recipe by its name.

    ``olmoe_s1`` is ``olmoe`` with another training seed, ``olmoe_w8_s1`` also in the mini-world of
    seed 8. A name that is unknown is a UsageError, here and in the functions below.
    """
    in_world, seed = split_seed(name)
    model, world_seed = split_world(in_world)
    if model not in ZOO or (world_seed is not None and ZOO[model].data != "miniworld"):
        raise bad_choice("name", name, tuple(ZOO))
    chosen = ZOO[model]
    return replace(
        chosen,
        seed=chosen.seed if seed is None else seed,
        world=chosen.world if world_seed is None else world_seed,
    )


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


def build(
    name: str,
    work: Path,
    *,
    steps: int | None = None,
    seed: int | None = None,
    scratch: bool = False,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = print,
) -> tuple[PreTrainedModel, list[float]]:
    """Train a model of the zoo; after a kill, continue from the last checkpoint.

    Args:
        name: As :func:`recipe` takes it.
        work: Directory of the checkpoints.
        steps: Total number of steps; None for the recipe's.
        seed: Seed of the first weights and of the corpus; None for the recipe's.
        scratch: Whether to train a model from scratch that the zoo upcycles.
        device: Where it is trained; the weights are those of one kind of processor.
        say: Takes progress lines.

    Returns:
        The model in float32, in evaluation mode, and the loss of each step, those of its dense
        model first.
    """
    chosen = recipe(name)
    steps = chosen.steps if steps is None else steps
    start = chosen.seed if seed is None else seed
    # After a restart the corpus goes on as it ended.
    tokenizer, batches = _data(chosen, corpus_seed(start), chosen.restart or steps)
    vocabulary = len(tokenizer)
    dense_steps = 0 if scratch else chosen.dense_steps * steps // chosen.steps
    model = _fresh(model_class(chosen), configuration(chosen, vocabulary), start)
    losses: list[float] = []
    if dense_steps:
        config = MistralConfig(vocab_size=vocabulary, **_RECIPES.dense)
        dense = _fresh(AutoModelForCausalLM, config, start)
        say(f"dense: {_millions(dense)} million parameters")
        schedule = Schedule(dense_steps, rate=chosen.rate, decay=chosen.decay)
        # Models that are upcycled from the same dense model share its checkpoint.
        state = work / f"dense-{chosen.world}-{start}-{dense_steps}.pt"
        losses += train(dense.to(device), batches, schedule, checkpoint=state, say=say)
        upcycle(dense.cpu(), model, noise=chosen.noise, seed=start)
    say(f"{name}: {_millions(model)} million parameters")
    losses += train(
        model.to(device),
        batches,
        Schedule(
            steps - dense_steps,
            rate=chosen.rate,
            decay=chosen.decay,
            aux=chosen.aux,
            middle=chosen.middle,
            classes=chosen.classes,
            restart=chosen.restart,
        ),
        checkpoint=work / f"{name}-{start}-{steps}{'-scratch' if scratch else ''}.pt",
        first=dense_steps,
        say=say,
    )
    return model, losses


def _data(chosen: Recipe, seed: int, steps: int) -> tuple[PreTrainedTokenizerFast, NumberedBatches]:
    """Return the tokenizer and the batches of a training."""
    if chosen.data == "miniworld":
        mini_world = world(chosen.world)
        shipped = chosen.world == WORLD_SEED
        tokenizer = miniworld_tokenizer() if shipped else wrapped(train_tokenizer(mini_world))
        return tokenizer, Batches(mini_world, tokenizer, seed, early=steps // 2)
    if chosen.data == "pictures":
        tokenizer = picture_tokenizer()
        return tokenizer, PictureBatches(tokenizer, seed, steps)
    queries = train_split()
    if chosen.data == "demonstrations":
        tokenizer = demonstrations_tokenizer(queries)
        return tokenizer, DemonstrationBatches(queries, tokenizer, seed, steps)
    tokenizer = banking77_tokenizer(queries)
    return tokenizer, QueryBatches(queries, tokenizer, seed)


def model_class(chosen: Recipe) -> Any:
    """Return the class of transformers that makes and loads the model of a recipe."""
    return AutoModelForImageTextToText if chosen.vision else AutoModelForCausalLM


def _fresh(kind: Any, config: PretrainedConfig, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = kind.from_config(config, dtype=torch.float32)
        return model


def _millions(model: PreTrainedModel) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.2f}"


def save(model: PreTrainedModel, directory: Path) -> None:
    """Write a model as bfloat16 ``model.safetensors`` with its ``config.json``, each file whole."""
    with tempfile.TemporaryDirectory() as scratch:
        model.to(torch.bfloat16).save_pretrained(scratch)
        for file in sorted(Path(scratch).iterdir()):
            write_bytes(directory / file.name, file.read_bytes())


def save_tokenizer(name: str, directory: Path) -> None:
    """Write the tokenizer of a model beside its weights, where it is not the shipped one."""
    chosen = recipe(name)
    if (chosen.data, chosen.world) != ("miniworld", WORLD_SEED):
        tokenizer, _ = _data(chosen, corpus_seed(chosen.seed), chosen.steps)
        write_text(directory / "tokenizer.json", tokenizer.backend_tokenizer.to_str(pretty=True))
