"""Write what MolmoE's remote code computes, in an environment that can run it.

transformers 5 cannot, so this file stands alone. It needs transformers 4.49, torch, torchvision,
einops, safetensors, and a directory with the code beside the hub's allenai/MolmoE-1B-0924
(config_molmoe.py, modeling_molmoe.py, image_preprocessing_molmo.py, preprocessing_molmo.py), of
which the repository has no copy:

    cd packages/capmoe-zoo/tests/molmoe && python remote_code.py CODE_DIRECTORY remote.safetensors

``test_parity.py`` compares the port with the file.
"""

from __future__ import annotations

import importlib
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

# The hub's config.json with small sizes. Crops keep their 24 × 24 patches, which are numbers in
# the remote code; patches have 2 × 2 pixels in place of 14 × 14.
CONFIG: dict[str, Any] = {
    "model_type": "molmo",
    "auto_map": {
        "AutoConfig": "config_molmoe.MolmoConfig",
        "AutoModelForCausalLM": "modeling_molmoe.MolmoForCausalLM",
    },
    "activation_type": "swiglu",
    "additional_vocab_size": 8,
    "architectures": ["OLMoForCausalLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": True,
    "attention_layer_norm_with_affine": True,
    "attention_type": "sdpa",
    "bias_for_layer_norm": False,
    "block_type": "moe",
    "clip_qkv": None,
    "d_model": 32,
    "embedding_dropout": 0.0,
    "embedding_size": 64,
    "final_logit_softcapping": None,
    "float32_attention": True,
    "head_dim": None,
    "image_feature_dropout": 0.0,
    "image_padding_embed": "pad_and_partial_pad",
    "image_pooling_2d": "attention-meanq",
    "image_pooling_h": 2,
    "image_pooling_w": 2,
    "image_projector": "mlp",
    "include_bias": False,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-5,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "max_position_embeddings": 2048,
    "max_sequence_length": 2048,
    "mlp_hidden_size": None,
    "mlp_ratio": 1,
    "moe_num_experts": 8,
    "moe_top_k": 3,
    "multi_query_attention": None,
    "n_heads": 4,
    "n_kv_heads": None,
    "n_layers": 3,
    "norm_after": False,
    "normalize_input_embeds": False,
    "pad_token_id": 1,
    "qkv_bias": False,
    "residual_dropout": 0.1,
    "rope": True,
    "rope_full_precision": True,
    "rope_impl": "llama",
    "rope_theta": 10000.0,
    "scale_logits": False,
    "unconditioned": False,
    "use_cache": True,
    "use_cls_feature": False,
    "use_position_ids": True,
    "vision_backbone": {
        "image_default_input_size": [48, 48],
        "image_emb_dim": 16,
        "image_head_dim": 8,
        "image_mlp_activations": "quick_gelu",
        "image_mlp_dim": 24,
        "image_model_type": "openai",
        "image_norm_eps": 1e-5,
        "image_num_heads": 2,
        "image_num_key_value_heads": 2,
        "image_num_layers": 3,
        "image_num_pos": 577,
        "image_patch_size": 2,
        "image_pos_patch_size": 2,
    },
    "vit_layers": [-2, -3],
    "vocab_size": 40,
    "weight_tying": False,
}
IMAGES = {"base_image_input_size": [48, 48], "image_patch_size": 2, "max_crops": 6}
SPECIAL = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<|image|>")
WORDS = (
    *("[UNK]", "<|padding|>", "User:", "Assistant:", "Is", "it", "red", "round", "?", "Yes", "No"),
    *(f"word{n}" for n in range(28)),
    "<|endoftext|>",
)
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


def tokenizer_json() -> str:
    """Return a tokenizer.json that splits at spaces."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    added = [
        *((word, vocabulary[word]) for word in ("<|padding|>", "<|endoftext|>")),
        *((word, len(WORDS) + number) for number, word in enumerate(SPECIAL)),
    ]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {"id": number, "content": word, "special": True, **flags} for word, number in added
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
        }
    )


def _modules(directory: Path) -> tuple[Any, Any, Any, Any]:
    sys.path.insert(0, str(directory.resolve().parent))
    # Operators that torchvision announces and a build for another torch lacks; none is called.
    library = torch.library.Library("torchvision", "FRAGMENT")
    _IN_USE.append(library)
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    names = ("modeling_molmoe", "config_molmoe", "image_preprocessing_molmo", "preprocessing_molmo")
    modeling, config, images, processing = (
        importlib.import_module(f"{directory.resolve().name}.{name}") for name in names
    )
    return modeling, config, images, processing


def _model(modeling: Any, config: Any) -> Any:
    # It takes the width of the padding's embedding from this class's default, 1024.
    vision = modeling.VisionBackboneConfig
    narrow = CONFIG["vision_backbone"]["image_emb_dim"]
    modeling.VisionBackboneConfig = lambda **given: vision(**{"image_emb_dim": narrow, **given})
    model = modeling.MolmoForCausalLM(config.MolmoConfig(**json.loads(json.dumps(CONFIG)))).eval()
    state = {name: weight(name, tuple(value.shape)) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    return model


def _inputs(images: Any, processing: Any) -> list[dict[str, torch.Tensor]]:
    from tokenizers import Tokenizer
    from transformers import GPT2TokenizerFast

    tokenizer = GPT2TokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json()),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        unk_token="[UNK]",
        pad_token="<|padding|>",
        additional_special_tokens=list(SPECIAL),
    )
    processor = processing.MolmoProcessor(images.MolmoImageProcessor(**IMAGES), tokenizer)
    return [
        processor.process(text=prompt, images=[picture(number)], images_kwargs=dict(IMAGES))
        for number, prompt in enumerate(PROMPTS)
    ]


def _padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return prompts as one batch, padded on the left, as the port's processor does."""
    width = max(len(row["input_ids"]) for row in rows)
    crops = max(len(row["images"]) for row in rows)
    filled = {"input_ids": 1, "attention_mask": 0, "images": -1, "image_masks": -1}
    batch: dict[str, list[torch.Tensor]] = {key: [] for key in (*filled, "image_input_idx")}
    for row in rows:
        shift = width - len(row["input_ids"])
        place = row["image_input_idx"]
        given = {
            **row,
            "attention_mask": torch.ones_like(row["input_ids"]),
            "image_input_idx": torch.where(place < 0, place, place + shift),
        }
        for key, parts in batch.items():
            value = given[key]
            text = key in ("input_ids", "attention_mask")
            missing = shift if text else crops - len(value)
            pads = value.new_full((missing, *value.shape[1:]), filled.get(key, -100))
            parts.append(torch.cat([pads, value] if text else [value, pads]))
    return {key: torch.stack(parts) for key, parts in batch.items()}


@torch.no_grad()
def _continued(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits behind a batch and each of :data:`NEXT` but the last, by the cache."""
    mask = batch["attention_mask"]
    given = {**batch, "position_ids": (mask.cumsum(dim=-1) - 1).clamp_min(0)}
    steps = []
    for word in NEXT:
        output = model(**given, use_cache=True)
        steps.append(output.logits[:, -1])
        token = torch.full_like(mask[:, :1], word)
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)
        given = {
            "input_ids": token,
            "attention_mask": mask,
            "position_ids": given["position_ids"][:, -1:] + 1,
            "past_key_values": output.past_key_values,
        }
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
        kept[f"{name}.continued"] = _continued(model, batch)
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
