"""Write a model of the paper as the hub has it: every width, random weights, few layers."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.loading import reader_of, weightless
from capmoe_eval.experiment.cell import ModelId
from capmoe_eval.experiment.data_file import read_data
from capmoe_eval.wrapper.molmoe import SPECIAL_TOKENS
from capmoe_eval.zoo.tokenizer import END_OF_TEXT, miniworld_tokenizer
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion

_SHARD: Final = 10**9  # bytes, at most
_LAYER: Final = re.compile(r"\.(?:layers|blocks)\.(\d+)\.")

# What the hub's chat models have beside the others.
_SAMPLING: Final = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05}
_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
)


@dataclass(frozen=True)
class Published:
    """A model as the hub has it."""

    models: tuple[str, ...]  # that have these sizes, by their names in ``conf/model/``
    total_size: int  # bytes of all weights
    config: dict[str, Any]  # fields of its config.json


PUBLISHED: Final = read_data(__package__, "published.yaml", tuple[Published, ...])
"""The models of the paper."""


class Checkpoint:
    """A model of the paper in a directory, in the hub's files and names of tensors.

    Args:
        name: The model, as in ``conf/model/``.
        directory: Where the files go; it is made.
        tokenizer: Stands in for the model's own, cut to its vocabulary: a directory or an
            id on the hub; None for the mini-world's.
    """

    def __init__(self, name: str, directory: Path, tokenizer: str | None = None) -> None:
        (published,) = (each for each in PUBLISHED if name in each.models)
        self.model, self._directory = ModelId(name, str(directory)), directory
        self._config = dict(published.config)
        self._is_molmo = self._config["model_type"] == "molmo"
        self._layers = "n_layers" if self._is_molmo else "num_hidden_layers"
        self.published_layers: int = self._config[self._layers]
        directory.mkdir(parents=True)
        self._write_reader(_cut(tokenizer, self._config["vocab_size"]))
        self._write("config.json", self._config)

    @property
    def layers(self) -> int:
        """The number of layers that the checkpoint has."""
        return int(self._config[self._layers])

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors by their names on the hub."""
        model = weightless(self.model)
        named = revert_weight_conversion(model, model.state_dict())
        shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
        if self._is_molmo:  # transformers tells neither of these back from the model's names
            shapes = {n.replace(".attn.o_proj.", ".attn.attn_out."): s for n, s in shapes.items()}
            parts = {"embedding": "embedding_size", "new_embedding": "additional_vocab_size"}
            for part, field in parts.items():
                shape = (self._config[field], self._config["d_model"])
                shapes[f"model.transformer.wte.{part}"] = shape
        return shapes

    def cut(self, most: float) -> None:
        """Leave as many layers as take, with all that is no layer, at most so many bytes.

        Raises:
            UsageError: If there is no space for a MoE layer.
        """
        of_layer, rest = [0] * self.layers, 0
        for name, shape in self.tensors().items():
            if match := _LAYER.search(name):
                of_layer[int(match[1])] += _bytes(shape)
            else:
                rest += _bytes(shape)
        totals = [rest + layers for layers in itertools.accumulate(of_layer)]
        fitting = sum(total <= most for total in totals)
        dense = self._config.get("first_k_dense_replace", 0)
        if fitting <= dense:
            raise UsageError(
                f"--memory={most / 2**30:g}: {self.model.name} needs {totals[dense] / 2**30:.1f} "
                "GiB for its first MoE layer; choose more, or other --models"
            )
        self._config |= {self._layers: fitting}
        self._write("config.json", self._config)

    def write_weights(self) -> tuple[int, int]:
        """Write random weights and their index; return their bytes and the number of shards."""
        tensors = self.tensors()
        total, filled = sum(map(_bytes, tensors.values())), 0
        shards: list[list[str]] = [[]]
        for name, shape in tensors.items():
            if shards[-1] and filled + _bytes(shape) > min(_SHARD, total // 3):
                shards.append([])
                filled = 0
            shards[-1].append(name)
            filled += _bytes(shape)
        places: dict[str, str] = {}
        for number, names in enumerate(shards, start=1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            content = {name: _random(name, tensors[name]) for name in names}
            save_file(content, self._directory / file, metadata={"format": "pt"})
            places |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        self._write("model.safetensors.index.json", index)
        return total, len(shards)

    def _write_reader(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Write the files of tokenizer, images and generation."""
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        if self.model.name.endswith(("_chat", "_instruct")):
            tokenizer.chat_template = _TEMPLATE
            ends = {**_SAMPLING, **ends, "eos_token_id": list(ends.values())}
        if self._is_molmo:  # its own tokens follow the vocabulary
            self._config |= {"vocab_size": len(tokenizer)}
            tokenizer.add_tokens(list(SPECIAL_TOKENS), special_tokens=True)
            images = {
                "image_processor_type": "MolmoImageProcessor",
                "processor_class": "MolmoProcessor",
            }
            self._write("preprocessor_config.json", images)
            self._write("processor_config.json", {"processor_class": "MolmoProcessor"})
        tokenizer.save_pretrained(self._directory)
        self._write("generation_config.json", ends)

    def _write(self, name: str, content: object) -> None:
        (self._directory / name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def _cut(tokenizer: str | None, size: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer that stands in for another, without the tokens from ``size`` on."""
    whole: Any = miniworld_tokenizer()
    if tokenizer is not None:
        whole = reader_of(ModelId("stand-in", "tiny:olmoe", tokenizer=tokenizer))
    content = json.loads(whole.backend_tokenizer.to_str())
    model = content["model"]
    model["vocab"] = {token: place for token, place in model["vocab"].items() if place < size}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    content["added_tokens"] = [each for each in content["added_tokens"] if each["id"] < size]
    backend = type(whole.backend_tokenizer).from_str(json.dumps(content))
    end = whole.eos_token or END_OF_TEXT
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=end, eos_token=end, pad_token=whole.pad_token or end
    )


def _bytes(shape: Sequence[int]) -> int:
    """Return the bytes of a tensor in bfloat16."""
    return 2 * math.prod(shape)


def _random(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the weights of a tensor: of a norm ones, else normal as most models begin."""
    if len(shape) == 1 and name.endswith("weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)
