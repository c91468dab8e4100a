"""Write a small MolmoE as the hub has it: its files, its names of tensors, random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from remote_code import CONFIG, IMAGES, SPECIAL, tokenizer_json, weight
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

REMOTE = Path(__file__).parent / "remote.safetensors"
"""What the remote code computed (``remote_code.py``)."""


def remote() -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
    """Return the tensors of the file, and the remote model's names and shapes."""
    with safe_open(REMOTE, "pt") as file:
        names = json.loads(file.metadata()["names"])
    return load_file(REMOTE), {name: tuple(shape) for name, shape in names.items()}


def write(directory: Path, **changed: Any) -> Path:
    """Write the files of a checkpoint, with changed fields of its config.json."""
    _, names = remote()
    save_file(
        {name: weight(name, shape) for name, shape in names.items()},
        _in(directory, "model.safetensors"),
        metadata={"format": "pt"},
    )
    auto = {
        "AutoImageProcessor": "image_preprocessing_molmo.MolmoImageProcessor",
        "AutoProcessor": "preprocessing_molmo.MolmoProcessor",
    }
    files = {
        "config.json": {**CONFIG, **changed},
        "generation_config.json": {"eos_token_id": 39, "pad_token_id": 1},
        "preprocessor_config.json": {
            **IMAGES,
            "auto_map": auto,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_padding_mask": True,
            "image_processor_type": "MolmoImageProcessor",
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "image_token_length_h": 12,
            "image_token_length_w": 12,
            "overlap_margins": [4, 4],
            "processor_class": "MolmoProcessor",
        },
        "processor_config.json": {
            "auto_map": {"AutoProcessor": auto["AutoProcessor"]},
            "processor_class": "MolmoProcessor",
        },
        "tokenizer_config.json": {
            "additional_special_tokens": list(SPECIAL),
            "auto_map": {"AutoProcessor": auto["AutoProcessor"]},
            "bos_token": None,
            "eos_token": "<|endoftext|>",
            "pad_token": "<|padding|>",
            "processor_class": "MolmoProcessor",
            "tokenizer_class": "GPTNeoXTokenizer",
            "unk_token": None,
        },
    }
    for name, content in files.items():
        _in(directory, name).write_text(json.dumps(content), encoding="utf-8")
    _in(directory, "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    return directory


def _in(directory: Path, name: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory / name
