"""The recipe of each embedded model, and the configuration that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from capmoe_eval.errors import bad_choice
from capmoe_eval.experiment.data_file import read_data
from capmoe_eval.experiment.names import split_seed, split_world
from capmoe_eval.zoo.llava import llava_config
from capmoe_eval.zoo.tiny import tiny_config
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)

from capmoe_zoo.worlds.miniworld.world import WORLD_SEED


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


def recipe(name: str, *, steps: int | None = None, seed: int | None = None) -> Recipe:
    """Return a recipe by its name, and with other steps or another training seed if they are given.

    ``olmoe_s1`` is ``olmoe`` with another training seed, ``olmoe_w8_s1`` also in the mini-world of
    seed 8. A name that is unknown is a UsageError.
    """
    in_world, name_seed = split_seed(name)
    model, world_seed = split_world(in_world)
    if model not in ZOO or (world_seed is not None and ZOO[model].data != "miniworld"):
        raise bad_choice("name", name, tuple(ZOO))
    chosen = ZOO[model]
    changes: dict[str, Any] = {
        "world": world_seed,
        "seed": name_seed if seed is None else seed,
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
