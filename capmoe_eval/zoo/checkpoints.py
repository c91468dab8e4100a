"""Load the trained tiny models, which ``capmoe-eval train`` of capmoe-zoo makes.

``weights/<name>`` has a model's ``config.json`` and ``card.json``; also ``model.safetensors`` where
it is trained here, or ``model.safetensors.xz`` where it is shipped.
"""

import lzma
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlavaProcessor,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.experiment.names import base_name
from capmoe_eval.wrapper.checkpoint import load_checkpoint, one_line
from capmoe_eval.zoo import WEIGHTS
from capmoe_eval.zoo.llava import picture_processor
from capmoe_eval.zoo.tokenizer import miniworld_tokenizer, wrapped

#: Every trained model by name, without further training seeds.
TRAINED = tuple(
    path.parent.name
    for path in sorted(WEIGHTS.glob("*/config.json"))
    if base_name(path.parent.name) == path.parent.name
)


def trained_config(name: str) -> PretrainedConfig:
    """Return the configuration of a trained model, or of one that differs in the seeds alone.

    ``olmoe_s1`` is ``olmoe`` with another training seed, ``olmoe_w8_s1`` also in the mini-world of
    seed 8. A name that is unknown is a UsageError, here and in the functions below.
    """
    if base_name(name) not in TRAINED:
        raise bad_choice("name", name, TRAINED)
    config: PretrainedConfig = AutoConfig.from_pretrained(WEIGHTS / base_name(name))
    return config


def trained_model(name: str, *, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Load a trained model on the CPU, in evaluation mode; UsageError if there are no weights."""
    kind = AutoModelForImageTextToText if reads_pictures(name) else AutoModelForCausalLM
    with tempfile.TemporaryDirectory(prefix="capmoe-") as scratch:
        directory = copy_checkpoint(WEIGHTS / name, Path(scratch))
        model: PreTrainedModel = load_checkpoint(directory, kind=kind, dtype=dtype)
    return model


def copy_checkpoint(source: Path, directory: Path) -> Path:
    """Copy a trained model's checkpoint, its weights unpacked, into a directory; return that.

    transformers and vLLM load the copy. A UsageError if there are no weights.
    """
    trained, shipped = source / "model.safetensors", source / "model.safetensors.xz"
    if not trained.is_file() and not shipped.is_file():
        raise UsageError(
            f"model.pretrained=zoo:{source.name}: no weights in {source}; "
            f"`capmoe-eval train {source.name}` makes them"
        )
    with one_line("model.pretrained", source):
        packed = not trained.is_file()
        weights = lzma.decompress(shipped.read_bytes()) if packed else trained.read_bytes()
    (directory / trained.name).write_bytes(weights)
    for file in source.glob("*config.json"):
        shutil.copyfile(file, directory / file.name)
    return directory


def reads_pictures(name: str) -> bool:
    """Return whether a trained model has a tower for pictures."""
    return hasattr(trained_config(name), "vision_config")


def trained_reader(directory: Path, *, pictures: bool) -> PreTrainedTokenizerFast | LlavaProcessor:
    """Return what a model in a directory reads with: a tokenizer, or for pictures a processor.

    The tokenizer is its own, or that of the mini-world if it has none.
    """
    file = directory / "tokenizer.json"
    tokenizer = wrapped(Tokenizer.from_file(str(file))) if file.is_file() else miniworld_tokenizer()
    return picture_processor(tokenizer) if pictures else tokenizer
