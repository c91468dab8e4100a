"""Write what MolmoE's remote code computes, in an environment that can run it.

transformers 5 cannot, so this file stands alone. It needs transformers 4.49, torch, torchvision,
einops, safetensors, and a directory with the code beside the hub's allenai/MolmoE-1B-0924
(config_molmoe.py, modeling_molmoe.py, image_preprocessing_molmo.py, preprocessing_molmo.py), of
which the repository has no copy:

    cd packages/capmoe-zoo/tests/molmoe && python remote_code.py CODE_DIRECTORY remote.safetensors

``test_parity.py`` compares the port with the file.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

HUB = Path(__file__).parent / "hub"
"""The hub's files with small sizes, but for the weights.

Crops keep their 24 × 24 patches, which are numbers in the remote code; patches have 2 × 2 pixels in
place of 14 × 14.
"""
CONFIG = json.loads((HUB / "config.json").read_text("utf-8"))
_PROCESSOR = json.loads((HUB / "preprocessor_config.json").read_text("utf-8"))
IMAGES = {
    name: _PROCESSOR[name] for name in ("base_image_input_size", "image_patch_size", "max_crops")
}
PROMPTS = ("Is it red ?", "Is it word3 word7 word9 round ?", "word1 word2")
SIZES = ((60, 100), (140, 50), (30, 30))  # height and width of each prompt's image
EVERY = 11  # positions of which the logits are kept
NEXT = (9, 17, 66, 25, 3, 31)  # tokens of a continuation
_IN_USE: list[Any] = []


def picture(number: int) -> np.ndarray[Any, Any]:
    """Return the pixels of a prompt's image: smooth colours and noise."""
    height, width = SIZES[number]
    y, x = np.mgrid[0:height, 0:width]
    waves = np.stack([np.sin(x / 7 + number), np.cos(y / 5), np.sin((x + y) / 11)], axis=-1)
    noise = np.random.RandomState(number).uniform(-30, 30, waves.shape)
    return np.clip(127 + 90 * waves + noise, 0, 255).astype(np.uint8)


def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of the checkpoint, drawn by its name (numpy's frozen generator)."""
    drawn = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) == 1 or "norm" in name:
        scaled = 0.1 * drawn + (1.0 if "norm" in name or "ln" in name else 0.0)
    else:
        embedded = "embedding" in name or "pad_embed" in name
        scaled = drawn * (2.0 if embedded else 1.5 / np.sqrt(shape[-1]))
    return torch.from_numpy(scaled.astype(np.float32))


def _modules(directory: Path) -> list[Any]:
    sys.path.insert(0, str(directory.resolve().parent))
    # Operators that torchvision announces and a build for another torch lacks; none is called.
    library = torch.library.Library("torchvision", "FRAGMENT")
    _IN_USE.append(library)
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    names = ("modeling_molmoe", "config_molmoe", "image_preprocessing_molmo", "preprocessing_molmo")
    return [importlib.import_module(f"{directory.resolve().name}.{name}") for name in names]


def _model(modeling: Any, config: Any) -> Any:
    # It takes the width of the padding's embedding from this class's default, 1024.
    vision = modeling.VisionBackboneConfig
    narrow = CONFIG["vision_backbone"]["image_emb_dim"]
    modeling.VisionBackboneConfig = lambda **given: vision(**{"image_emb_dim": narrow, **given})
    model = modeling.MolmoForCausalLM(config.MolmoConfig(**copy.deepcopy(CONFIG))).eval()
    state = {name: weight(name, tuple(value.shape)) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    return model


def _inputs(images: Any, processing: Any) -> list[dict[str, torch.Tensor]]:
    from tokenizers import Tokenizer
    from transformers import GPT2TokenizerFast

    words = json.loads((HUB / "tokenizer_config.json").read_text("utf-8"))
    tokenizer = GPT2TokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(HUB / "tokenizer.json")),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        unk_token="[UNK]",
        pad_token="<|padding|>",
        additional_special_tokens=words["additional_special_tokens"],
    )
    processor = processing.MolmoProcessor(images.MolmoImageProcessor(**IMAGES), tokenizer)
    return [
        processor.process(text=prompt, images=[picture(number)], images_kwargs=dict(IMAGES))
        for number, prompt in enumerate(PROMPTS)
    ]


def _padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return prompts as one batch, padded on the left, as the port's processor does."""
    backwards = [row["input_ids"].flip(0) for row in rows]
    mask = pad_sequence([torch.ones_like(ids) for ids in backwards], batch_first=True).flip(1)
    places = [
        torch.where(row["image_input_idx"] < 0, row["image_input_idx"], row["image_input_idx"] + n)
        for row, n in zip(rows, (mask == 0).sum(dim=1), strict=True)
    ]
    return {
        "input_ids": pad_sequence(backwards, batch_first=True, padding_value=1).flip(1),
        "attention_mask": mask,
        "images": pad_sequence([row["images"] for row in rows], True, -1),
        "image_masks": pad_sequence([row["image_masks"] for row in rows], True, -1),
        "image_input_idx": pad_sequence(places, True, -100),
    }


@torch.no_grad()
def continued(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits behind a batch and each of :data:`NEXT` but the last, by the cache."""
    inputs, mask, steps = batch, batch["attention_mask"], []
    for word in NEXT:
        output = model(**inputs, use_cache=True)
        steps.append(output.logits[:, -1])
        token = torch.full_like(mask[:, :1], word)
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)
        positions = inputs.get("position_ids")
        inputs = {"input_ids": token, "attention_mask": mask}
        inputs["past_key_values"] = output.past_key_values
        if positions is not None:  # the port counts them itself
            inputs["position_ids"] = positions[:, -1:] + 1
    return torch.stack(steps, dim=1)


@torch.no_grad()
def main(directory: str, path: str) -> None:
    """Run the remote code and write its inputs and outputs."""
    modeling, config, images, processing = _modules(Path(directory))
    model = _model(modeling, config)
    rows = _inputs(images, processing)
    kept: dict[str, torch.Tensor] = {}
    text = torch.from_numpy(np.random.RandomState(5).randint(2, 40, (3, 14)))
    text[:, 5] = 66  # a token of the second embedding matrix
    kept["text.input_ids"] = text
    kept["text.logits"] = model(input_ids=text).logits
    for name, batch in {"alone": _padded(rows[1:2]), "batch": _padded(rows)}.items():
        for key in ("input_ids", "attention_mask", "image_input_idx"):
            kept[f"{name}.{key}"] = batch[key].to(torch.int16)
        kept[f"{name}.image_masks"] = (4 * batch["image_masks"]).to(torch.int8)
        kept[f"{name}.patches"] = batch["images"].double().sum(dim=-1).half()
        kept[f"{name}.logits"] = model(**batch).logits[:, ::EVERY]
        numbers = (batch["attention_mask"].cumsum(dim=-1) - 1).clamp_min(0)
        kept[f"{name}.continued"] = continued(model, {**batch, "position_ids": numbers})
    import transformers

    names = {name: list(value.shape) for name, value in model.state_dict().items()}
    about = {"transformers": transformers.__version__, "torch": torch.__version__}
    save_file(
        {name: tensor.contiguous() for name, tensor in kept.items()},
        path,
        metadata={**about, "names": json.dumps(names)},
    )
    print({name: tuple(tensor.shape) for name, tensor in kept.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
