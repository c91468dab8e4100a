"""The artefact: all that a training made but the base; and the checkpoint of both together."""

import json
from dataclasses import asdict, fields
from pathlib import Path

import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.provenance import weights_hash
from capmoe_eval.experiment.files import write_bytes
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    Qwen2MoeForCausalLM,
)

from capmoe_zoo.smollm2 import partition
from capmoe_zoo.smollm2.compression import compress, decompress
from capmoe_zoo.smollm2.partition import Recipe


def load_base(gguf: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Return the dense model in float32 and its tokenizer.

    Raises:
        UsageError: There is no such file.

    The model that transformers reads refuses ``save_pretrained`` because it was quantized, so its
    weights move into a model whose configuration does not say so.
    """
    if not gguf.is_file():
        raise UsageError(f"base={gguf}: no such file; packages/capmoe-zoo/README.md fetches it")
    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(source.state_dict(), assign=True)
    model.tie_weights()
    # Buffers that are in no state, such as the rotary frequencies, are still on the meta device.
    model.model.rotary_emb = source.model.rotary_emb
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    return model.eval(), tokenizer


def export(student: LlamaForCausalLM, recipe: Recipe, steps: int, artefact: Path) -> None:
    """Write what training made into an artefact, with its recipe and its number of steps.

    Matrices are in bfloat16, vectors in float32, orders of neurons in 16-bit integers.
    """
    small = {name: _small(value) for name, value in partition.trained_state(student).items()}
    data = save(small, {"recipe": json.dumps(asdict(recipe)), "step": str(steps)})
    write_bytes(artefact, compress(data))


def _small(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value.to(torch.int16).contiguous()
    return value.to(torch.bfloat16 if value.dim() > 1 else torch.float32).contiguous()


def progress(artefact: Path) -> tuple[Recipe, int]:
    """Return the recipe of an artefact's training, and its steps."""
    data = decompress(artefact)
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    content = json.loads(metadata["recipe"])
    return Recipe(**{f.name: content[f.name] for f in fields(Recipe)}), int(metadata["step"])


def read_student(base: LlamaForCausalLM, artefact: Path) -> LlamaForCausalLM:
    """Return the trained model of an artefact."""
    recipe, _ = progress(artefact)
    student = partition.build_student(base, recipe)
    partition.load_trained(student, load(decompress(artefact)))
    return student


def assemble(
    base: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, artefact: Path, directory: Path
) -> str:
    """Write a Hugging Face checkpoint, a stock Qwen2-MoE model in float32 with its tokenizer.

    Beside it are zeros for vLLM, whose attention of this architecture adds biases whatever
    ``qkv_bias`` says, and takes those that no file has as it finds the memory; transformers reads
    ``model.safetensors`` alone. Return a hash of the weights as bfloat16 has them, which does not
    depend on the processor.
    """
    stock = partition.to_stock(read_student(base, artefact))
    stock.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    write_bytes(directory / "zero_biases.safetensors", save(zero_biases(stock)))
    return weights_hash(stock.bfloat16())


def zero_biases(model: Qwen2MoeForCausalLM) -> dict[str, Tensor]:
    """Return a bias of zeros [outputs] for each q, k and v projection, by its name."""
    return {
        f"{name}.bias": torch.zeros(module.out_features)
        for name, module in model.named_modules()
        if name.endswith(("q_proj", "k_proj", "v_proj")) and isinstance(module, nn.Linear)
    }
