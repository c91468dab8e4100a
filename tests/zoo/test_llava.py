"""The LLaVA reads a picture as 144 tokens, with Pillow alone, and what it sees matters."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration, LlavaProcessor

from capmoe_eval.zoo.llava import IMAGE_TOKENS, MEAN, SPREAD
from capmoe_eval.zoo.tiny import tiny_llava, tiny_processor, tiny_tokenizer


def picture(seed, side=96):
    pixels = np.random.RandomState(seed).randint(0, 256, (side, side, 3))
    return Image.fromarray(pixels.astype("uint8"))


@pytest.fixture(scope="module", name="model")
def built():
    processor = tiny_processor()
    return tiny_llava(vocab_size=len(processor.tokenizer), image_token_id=processor.image_token_id)


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
def test_the_tiny_llava_sees_and_is_the_same_each_time(model):
    assert isinstance(model, LlavaForConditionalGeneration)
    processor = tiny_processor()

    def logits(seen):
        inputs = processor(images=seen, text="<image>\nIs it red?", return_tensors="pt")
        return model(**inputs).logits[0, -1]

    assert torch.equal(logits(picture(0)), logits(picture(0)))
    assert not torch.allclose(logits(picture(0)), logits(picture(1)), atol=1e-3)
    again = tiny_llava(vocab_size=len(processor.tokenizer), image_token_id=processor.image_token_id)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
