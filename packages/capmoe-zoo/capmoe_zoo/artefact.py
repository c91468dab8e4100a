"""What the repository holds of a trained model: everything but the base, in one small file."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.provenance import weights_hash
from capmoe_eval.experiment.files import write_bytes
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from capmoe_zoo.student import build_student, load_trained, to_stock
from capmoe_zoo.train import Recipe


def export(state_file: Path, artefact: Path) -> int:
    """Write the averaged weights of a training into an artefact; return its bytes.

    Matrices are in bfloat16, vectors in float32, orders of neurons in 16-bit integers.
    """
    if not state_file.exists():
        raise UsageError(f"state={state_file}: no such file; train first")
    state = torch.load(state_file, map_location="cpu", weights_only=True)
    small = {name: _small(value) for name, value in (state["ema"] or state["trained"]).items()}
    metadata = {
        "recipe": json.dumps(state["recipe"]),
        "step": str(state["step"]),
        "tokens": str(state["tokens"]),
    }
    content = save(small, metadata)
    write_bytes(artefact, content)
    return len(content)


def _small(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value.to(torch.int16).contiguous()
    return value.to(torch.bfloat16 if value.dim() > 1 else torch.float32).contiguous()


def progress(artefact: Path) -> tuple[Recipe, int]:
    """Return the recipe of an artefact's training, and its steps."""
    if not artefact.exists():
        raise UsageError(f"artefact={artefact}: no such file")
    with safe_open(artefact, "pt") as file:
        metadata = file.metadata()
    content = json.loads(metadata["recipe"])
    names = [field.name for field in fields(Recipe)]
    return Recipe(**{name: content[name] for name in names}), int(metadata["step"])


def read_student(base: LlamaForCausalLM, artefact: Path) -> tuple[LlamaForCausalLM, Recipe]:
    """Return the trained model of an artefact, and its recipe."""
    recipe, _ = progress(artefact)
    with safe_open(artefact, "pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    student = build_student(
        base, recipe.shape, step=recipe.step, rank=recipe.rank, other_rank=recipe.other_rank
    )
    load_trained(student, state)
    return student, recipe


def assemble(
    base: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, artefact: Path, directory: Path
) -> str:
    """Write a Hugging Face checkpoint, a stock Qwen2-MoE model in float32 with its tokenizer.

    Return a hash of its weights as bfloat16 has them, which does not depend on the processor.
    """
    student, recipe = read_student(base, artefact)
    stock = to_stock(student, step=recipe.step)
    stock.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return weights_hash(stock.bfloat16())
