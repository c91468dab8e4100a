"""Build tiny MoE models: transformers' own classes with small random weights.

They are **untrained** and score as chance does. With them every command of the suite runs anywhere
in seconds. Their routing is skewed like that of trained models, so that a capacity drops tokens.
Documents and tokenizer are those of the mini-world.
"""

import functools
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlavaProcessor,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from capmoe_eval.errors import check_choice
from capmoe_eval.experiment.files import read_data
from capmoe_eval.zoo.llava import llava_config, picture_processor
from capmoe_eval.zoo.tokenizer import miniworld_tokenizer

#: Longest sequence in tokens.
MAX_POSITIONS = 4096

# Measured on mini-world documents: the fullest expert of a model then has 3 to 6 times the mean
# load (1.8 for Mixtral, where 4 is the most that is possible).
_SKEW = 0.8
_SHARPNESS = 1.25
# With random weights the experts contribute little to a block's output; doubled, drops show.
_EXPERT_GAIN = 2.0

_CONFIGS = read_data(__package__, "tiny.yaml", dict[str, Any])
_FAMILIES: dict[str, dict[str, Any]] = _CONFIGS["families"]
TINY_FAMILIES = tuple(_FAMILIES)
"""The families that have a tiny model, by transformers' ``model_type``."""
TINY_LLAVA = "llava_olmoe"
"""The tiny model that also reads pictures: a CLIP tower before the tiny OLMoE."""


@functools.cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return the mini-world's tokenizer for longer sequences; all callers share one object."""
    return miniworld_tokenizer(MAX_POSITIONS)


@functools.cache
def tiny_processor() -> LlavaProcessor:
    """Return the processor of the tiny LLaVA; its tokenizer has one token more than the others'."""
    return picture_processor(miniworld_tokenizer(MAX_POSITIONS))


def tiny_config(family: str, vocab_size: int, **changes: Any) -> PretrainedConfig:
    """Return the configuration of a tiny model, a scaled-down form of the family's original.

    ``changes`` are fields of it. A family that is none of ``TINY_FAMILIES`` is a UsageError.
    """
    check_choice("family", family, TINY_FAMILIES)
    fields = {
        "vocab_size": vocab_size,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
    }
    fields |= _CONFIGS["common"] | _FAMILIES[family] | changes
    config: PretrainedConfig = AutoConfig.for_model(family, **fields)
    return config


def tiny_model(
    family: str, *, vocab_size: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Build an untrained tiny model of one of ``TINY_FAMILIES`` on the CPU, in evaluation mode.

    The same arguments give the same weights; another ``dtype`` gives the same weights rounded.
    torch's random state is not changed.
    """
    return _untrained(AutoModelForCausalLM, tiny_config(family, vocab_size), seed, dtype)


def tiny_llava(
    *, vocab_size: int, image_token_id: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Build ``TINY_LLAVA``, untrained, as :func:`tiny_model` does the others.

    The tokens of the vocabulary include that of a part of a picture, ``image_token_id``.
    """
    config = llava_config(tiny_config("olmoe", vocab_size), _CONFIGS["vision"], image_token_id)
    return _untrained(AutoModelForImageTextToText, config, seed, dtype)


def _untrained(
    kind: Any, config: PretrainedConfig, seed: int, dtype: torch.dtype
) -> PreTrainedModel:
    # torch.manual_seed would also seed the generators of accelerators, which the fork leaves out.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = kind.from_config(config, dtype=torch.float32)
        nn.init.normal_(model.get_input_embeddings().weight)
        for name, parameter in model.named_parameters():
            if name.endswith(".mlp.gate.weight"):
                # For zero-mean inputs a router's longer row has larger positive logits, and more
                # tokens choose its expert.
                log_length_E = torch.linspace(-_SKEW, _SKEW, len(parameter))
                log_length_E = log_length_E[torch.randperm(len(parameter))]
                parameter.mul_(_SHARPNESS * log_length_E.exp()[:, None])
            elif name.endswith(".mlp.experts.down_proj"):
                parameter.mul_(_EXPERT_GAIN)
    return model.to(dtype).eval()
