"""A batch shows a question as evaluation does; the loss is that of loops."""

from functools import partial

import numpy as np
import pytest
import torch
from capmoe_eval.evaluation.multimodal.prompts import prompt
from capmoe_eval.zoo.llava import IMAGE_TOKENS, picture_processor

from capmoe_zoo.embedded.batch import IGNORED
from capmoe_zoo.embedded.loss import Middle, batch_loss
from capmoe_zoo.embedded.pictures import (
    picture_batch,
    picture_tokenizer,
    pixels,
)
from capmoe_zoo.embedded.recipes import configuration, model_class, recipe
from capmoe_zoo.embedded.train import fresh
from capmoe_zoo.worlds.draw import Draw
from capmoe_zoo.worlds.pictures.drawing import picture
from capmoe_zoo.worlds.pictures.scene import scene


@pytest.fixture(scope="module", name="tokenizer")
def trained():
    return picture_tokenizer()


@torch.no_grad()
@pytest.mark.numeric
def test_a_patch_is_named_where_the_recipe_says(tokenizer):
    chosen = recipe("llava_olmoe")
    model = fresh(model_class(chosen), configuration(chosen, len(tokenizer)), seed=0).eval()
    batches = partial(picture_batch, tokenizer, 1, 100)
    alone, all_forms = batches(0), batches(90)
    taken = alone.taken(model)
    states = model.model(**taken, output_hidden_states=True).hidden_states
    features = torch.stack(list(taken["mm_encoder_outputs"]["image"].pooler_output))
    assert torch.equal(states[0][:, :IMAGE_TOKENS], features)
    logits = model.lm_head(model.model.language_model.norm(states[chosen.middle]))
    total, count = 0.0, 0
    for row, names in enumerate(alone.middle_BS.tolist()):
        for position, name in enumerate(names):
            if name != IGNORED:
                total -= logits[row, position].log_softmax(-1)[name]
                count += 1
    middle = Middle(model, chosen.middle)
    assert torch.allclose(batch_loss(model, alone, 0.0, middle), total / count, atol=1e-4)
    assert batch_loss(model, alone, 0.0) == 0.0
    without_names = batch_loss(model, all_forms, 0.0)
    assert batch_loss(model, all_forms, 0.0, middle) == without_names > 0


@torch.no_grad()
@pytest.mark.numeric
def test_a_question_is_seen_as_in_evaluation(tokenizer):
    """The processor makes the same tokens and pixels, the packed row the same states."""
    chosen = recipe("llava_olmoe")
    model = fresh(model_class(chosen), configuration(chosen, len(tokenizer)), seed=0).eval()
    batch = picture_batch(tokenizer, 1, 100, 90)
    packed = model.model(
        input_ids=batch.input_ids_BS[:1],
        position_ids=batch.position_ids_BS[:1],
        pixel_values=batch.pixels_BCHW[:1],
        attention_mask=batch.attended_B1SS[:1],
    ).last_hidden_state[0]
    starts = (batch.position_ids_BS[0] == IMAGE_TOKENS).nonzero().flatten().tolist()
    start, end = starts[1:3]  # the second question
    ids = torch.cat([batch.input_ids_BS[0, :IMAGE_TOKENS], batch.input_ids_BS[0, start:end]])
    alone = model.model(input_ids=ids[None], pixel_values=batch.pixels_BCHW[:1]).last_hidden_state
    assert torch.allclose(packed[start:end], alone[0, IMAGE_TOKENS:], atol=1e-4)


def test_the_processor_makes_the_same_of_a_prompt_and_a_picture(tokenizer):
    draw = Draw("one")
    image = picture(scene(draw), draw)
    processor = picture_processor(tokenizer)
    text = prompt("What color is the ring?", ["red", "blue", "pink", "green"])
    made = processor(images=image, text=text, return_tensors="pt")
    assert np.allclose(made["pixel_values"][0], pixels(image), atol=1e-5)
    after = tokenizer(text.removeprefix("<image>"))["input_ids"]
    assert made["input_ids"][0].tolist() == [processor.image_token_id] * IMAGE_TOKENS + after
