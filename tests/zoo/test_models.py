"""The models of the zoo: tiny ones that are made on the spot, and weights that are shipped."""

import hashlib
import shutil
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration, LlavaProcessor

from capmoe_eval.errors import UsageError
from capmoe_eval.wrapper.session import capacity_aware
from capmoe_eval.zoo import WEIGHTS, checkpoints
from capmoe_eval.zoo.checkpoints import copy_checkpoint, trained_model
from capmoe_eval.zoo.llava import IMAGE_TOKENS, MEAN, SPREAD
from capmoe_eval.zoo.sets import documents
from capmoe_eval.zoo.tiny import (
    TINY_FAMILIES,
    tiny_llava,
    tiny_model,
    tiny_processor,
    tiny_tokenizer,
)

#: E/K of the originals, and the ranks of their emulated deployment.
ORIGINALS = {
    "olmoe": (Fraction(64, 8), 8),
    "qwen2_moe": (Fraction(60, 4), 6),
    "qwen3_moe": (Fraction(128, 8), 8),
    "deepseek_v2": (Fraction(64, 6), 8),
    "mixtral": (Fraction(8, 2), 8),
}


@pytest.fixture(scope="module", name="tokens_BS")
def tokens():
    """16 sequences of 128 tokens of the mini-world."""
    rows = [
        *documents("miniworld")["openai/gsm8k"]["main"]["train"],
        *documents("miniworld")["aps/super_glue"]["boolq"]["train"],
        *documents("miniworld")["Rowan/hellaswag"]["default"]["train"],
    ]
    text = "\n\n".join(" ".join(map(str, row.values())) for row in rows)
    ids = tiny_tokenizer().encode(text, truncation=True, max_length=16 * 128)
    return torch.tensor(ids).view(16, 128)


def build(family, **keywords):
    return tiny_model(family, vocab_size=len(tiny_tokenizer()), **keywords)


@pytest.mark.parametrize("family", TINY_FAMILIES)
@torch.no_grad()
def test_a_tiny_model_is_its_original_in_small(family, tokens_BS):
    """Its routing is skewed, and matters; the seed decides every weight."""
    model, again, other = build(family), build(family), build(family, seed=1)
    assert type(model).__module__.startswith(f"transformers.models.{family}.")
    assert not model.training
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)
    blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    assert len(blocks) == 3
    ratio, ranks = ORIGINALS[family]
    for block in blocks:
        num_experts = len(block.gate.weight)
        assert Fraction(num_experts, block.gate.top_k) == ratio
        assert num_experts % ranks == 0
    with capacity_aware(model, "baseline") as meter:
        logits = model(tokens_BS).logits
    # Measured peaks: 3.0, 4.7, 5.6, 3.8 and, of at most 4, 1.8.
    peaks = [layer["peak"]["expert_before"]["max"] for layer in meter.report()["layers"]]
    assert min(peaks) > 1.3, "a capacity factor of 1 must drop something in every layer"
    low, high = (1.6, 3.0) if family == "mixtral" else (2.5, 6.5)
    assert low < max(peaks) < high
    # Without routed experts the logits change by 0.4 to 1 of their norm.
    for block in blocks:
        block.experts.register_forward_hook(lambda *arguments: torch.zeros_like(arguments[-1]))
    silenced = model(tokens_BS).logits
    assert (silenced - logits).norm() / logits.norm() > 0.35
    assert (silenced.argmax(-1) != logits.argmax(-1)).double().mean() > 0.4
    assert 0.8 < logits.std() < 1.2


# The LLaVA reads a picture as 144 tokens, with Pillow alone.


def picture(seed, side=96):
    pixels = np.random.RandomState(seed).randint(0, 256, (side, side, 3))
    return Image.fromarray(pixels.astype("uint8"))


def test_a_picture_is_144_tokens_and_its_pixels_are_normalised():
    processor = tiny_processor()
    assert isinstance(processor, LlavaProcessor)
    assert "torchvision" not in sys.modules
    batch = processor(
        images=[picture(0), picture(1, 50)],
        text=["<image>\nIs it red?", "<image>\nWhich colour has the large one?"],
        padding="longest",
        return_tensors="pt",
    )
    assert batch["pixel_values"].shape == (2, 3, 96, 96)
    expected = (np.asarray(picture(0)).transpose(2, 0, 1) / 255 - MEAN) / SPREAD
    assert np.allclose(batch["pixel_values"][0], expected, atol=1e-5)
    is_image_BS = batch["input_ids"] == processor.image_token_id
    assert is_image_BS.sum(1).tolist() == [IMAGE_TOKENS] * 2 == [144, 144]
    assert len(processor.tokenizer) == len(tiny_tokenizer()) + 1


@torch.no_grad()
def test_the_tiny_llava_sees_and_is_the_same_each_time():
    processor = tiny_processor()
    size = {"vocab_size": len(processor.tokenizer), "image_token_id": processor.image_token_id}
    model, again = tiny_llava(**size), tiny_llava(**size)
    assert isinstance(model, LlavaForConditionalGeneration)

    def logits(seen):
        inputs = processor(images=seen, text="<image>\nIs it red?", return_tensors="pt")
        return model(**inputs).logits[0, -1]

    assert torch.equal(logits(picture(0)), logits(picture(0)))
    assert not torch.allclose(logits(picture(0)), logits(picture(1)), atol=1e-3)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


# Shipped weights are bit for bit those that were trained, and damaged ones are refused.


SHIPPED = {
    "deepseek_v2": "29899ddac0de0efe18023736f49c3a6c9c4839a8ac2457515714d517f3347ed3",
    "llava_olmoe": "b01e70cefe0043154b65e078bc4bccf10b32c2315e731262381328820ebbebcc",
    "mixtral": "f393e22b1dcbd0ad8827173504d0fe690a0f238821078be95bf48a00bd3cc4ec",
    "olmoe": "f19add36d0d86926ead8bac01fb86b7185be2a14836e2824e1ffe6991893f1d0",
    "qwen2_moe": "c70c1d8575f94fd943d4c980be01f8779051c661c1792d572bafd1683b5fe6b4",
}
"""SHA-256 of the safetensors files that training wrote."""


@pytest.mark.parametrize(("name", "digest"), SHIPPED.items())
def test_the_shipped_weights_are_those_that_were_trained(name, digest, tmp_path):
    assert copy_checkpoint(WEIGHTS / name, tmp_path) == tmp_path
    assert hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest() == digest
    files = {"config.json", "generation_config.json", "model.safetensors"}
    assert {file.name for file in tmp_path.iterdir()} == files


def test_weights_are_whole_or_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "WEIGHTS", tmp_path)
    directory = shutil.copytree(WEIGHTS / "mixtral", tmp_path / "mixtral")
    packed = directory / "model.safetensors.xz"
    (scratch := tmp_path / "scratch").mkdir()
    whole = copy_checkpoint(directory, scratch) / "model.safetensors"
    packed.write_bytes(packed.read_bytes()[:-30])
    with pytest.raises(UsageError, match=r"mixtral: cannot be loaded .*whole checkpoint"):
        trained_model("mixtral")
    shutil.copy(whole, directory)  # trained here, it goes before what is shipped
    assert trained_model("mixtral").config.model_type == "mixtral"
    (directory / whole.name).unlink()
    packed.unlink()
    with pytest.raises(UsageError, match=r"no weights in .*`capmoe-eval train mixtral` makes them"):
        trained_model("mixtral")
