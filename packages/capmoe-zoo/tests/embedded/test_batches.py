"""A batch shows a question as evaluation does; the loss is that of loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from capmoe_eval.evaluation.longicl import protocol as longicl
from capmoe_eval.evaluation.multimodal.prompts import prompt
from capmoe_eval.zoo.llava import IMAGE_TOKENS, picture_processor

from capmoe_zoo.embedded import train
from capmoe_zoo.embedded.banking77 import MOST_ALONE, STAGES
from capmoe_zoo.embedded.batch import IGNORED
from capmoe_zoo.embedded.pictures import pixels
from capmoe_zoo.worlds.draw import Draw
from capmoe_zoo.worlds.pictures.drawing import picture
from capmoe_zoo.worlds.pictures.scene import scene

STEPS = 100  # of a whole training


@pytest.fixture(scope="module")
def demonstrations():
    return train.data_of(train.recipe("icl_olmoe"), STEPS)


@pytest.fixture(scope="module")
def pictures():
    return train.data_of(train.recipe("llava_olmoe"), STEPS)


def of_stage(batches, number):
    return batches(round(STAGES[number]["until"] * STEPS) - 1)


def model_of(name, tokenizer):
    """Return a fresh model, its recipe and the reader of its classes."""
    chosen = train.recipe(name)
    config = train.configuration(chosen, len(tokenizer))
    model = train.fresh(train.model_class(chosen), config, seed=0).eval()
    return model, chosen, train.class_reader(model, chosen.classes)


def test_a_document_has_the_tokens_of_a_prompt(demonstrations):
    tokenizer, batches = demonstrations
    batch = of_stage(batches, 4)
    assert STAGES[4]["demonstrations"][0] > MOST_ALONE
    ids_S = batch.input_ids_BS[0][batch.attended_B1SS[0, 0, :, 0]]  # of the first document
    text = tokenizer.decode(ids_S)
    assert tokenizer(text)["input_ids"] == ids_S.tolist()
    introduction, *lines = text.rstrip("\n").split("\nservice query: ")
    rows = []
    for line in lines:
        query, _, name = line.partition("\nintent category: ")
        rows.append({"text": query, "label_text": name})
    assert text.startswith(longicl.prompt(rows[:-1], rows[-1]["text"]))
    assert introduction == longicl.INTRODUCTION.rstrip("\n")


@torch.no_grad()
@pytest.mark.numeric
def test_the_loss_names_queries_and_teaches_one_head(demonstrations):
    """The four parts of the loss, by loops over the positions."""
    tokenizer, batches = demonstrations
    model, chosen, reader = model_of("icl_olmoe", tokenizer)
    batch = of_stage(batches, 1)
    before = model.config._attn_implementation
    loss = train.batch_loss(model, batch, chosen, reader)
    assert model.model.layers[chosen.middle].self_attn.config._attn_implementation == before
    model.set_attn_implementation("eager")
    output = model.model(
        **batch.taken(model), use_cache=False, output_hidden_states=True, output_attentions=True
    )
    final = model.lm_head(output.last_hidden_state).log_softmax(-1)
    states = output.hidden_states[chosen.middle]
    tokens = model.lm_head(model.model.norm(states)).log_softmax(-1)
    classes = reader(states).log_softmax(-1)
    head = output.attentions[chosen.middle][:, 0]
    parts = [[], [], [], []]
    for row, labels in enumerate(batch.labels_BS.tolist()):
        for place, label in enumerate(labels):
            if label != IGNORED:
                parts[0].append(-final[row, place - 1, label])
            if (name := int(batch.middle_BS[row, place])) != IGNORED:
                parts[1].append(-tokens[row, place, name])
            if (intent := int(batch.classes_BS[row, place])) != IGNORED:
                parts[2].append(-classes[row, place, intent])
            sought = batch.sought_BSS[row, place].nonzero().flatten().tolist()
            if sought:
                parts[3].append(-sum(head[row, place, other] for other in sought).log())
    assert all(len(part) > 20 for part in parts)
    expected = sum(sum(part) / len(part) for part in parts)
    assert torch.allclose(loss, expected, rtol=1e-4)


@torch.no_grad()
@pytest.mark.numeric
def test_a_patch_is_named_where_the_recipe_says(pictures):
    tokenizer, batches = pictures
    model, chosen, reader = model_of("llava_olmoe", tokenizer)
    alone, all_forms = batches(0), batches(90)
    taken = alone.taken(model)
    states = model.model(**taken, output_hidden_states=True).hidden_states[chosen.middle]
    features = torch.stack(list(taken["mm_encoder_outputs"]["image"].pooler_output))
    assert torch.equal(states[:, :IMAGE_TOKENS], features)
    logits = model.lm_head(model.model.language_model.norm(states))
    named = alone.middle_BS != IGNORED
    names = alone.middle_BS[named].tolist()
    values = logits[named].log_softmax(-1)
    expected = -sum(row[name] for row, name in zip(values, names, strict=True)) / len(names)
    loss, without_names = (
        [train.batch_loss(model, batch, each, reader) for batch in (alone, all_forms)]
        for each in (chosen, replace(chosen, middle=None))
    )
    assert torch.allclose(loss[0], expected, atol=1e-4)
    assert without_names[0] == 0.0
    assert loss[1] == without_names[1] > 0


@torch.no_grad()
@pytest.mark.numeric
def test_a_question_is_seen_as_in_evaluation(pictures):
    """The processor makes the same tokens and pixels, the packed row the same states."""
    tokenizer, batches = pictures
    model, *_ = model_of("llava_olmoe", tokenizer)
    batch = batches(90)
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


def test_the_processor_makes_the_same_of_a_prompt_and_a_picture(pictures):
    tokenizer, _ = pictures
    draw = Draw("one")
    image = picture(scene(draw), draw)
    processor = picture_processor(tokenizer)
    text = prompt("What color is the ring?", ["red", "blue", "pink", "green"])
    made = processor(images=image, text=text, return_tensors="pt")
    assert np.allclose(made["pixel_values"][0], pixels(image), atol=1e-5)
    after = tokenizer(text.removeprefix("<image>"))["input_ids"]
    assert made["input_ids"][0].tolist() == [processor.image_token_id] * IMAGE_TOKENS + after
