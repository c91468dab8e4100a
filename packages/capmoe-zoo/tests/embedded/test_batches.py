"""A batch shows a question as evaluation does; the loss is that of loops."""

from dataclasses import replace

import pytest
import torch
from capmoe_eval.zoo.llava import IMAGE_TOKENS

from capmoe_zoo.embedded import train
from capmoe_zoo.embedded.batch import IGNORED

STEPS = 100  # of a whole training


@pytest.fixture(scope="module")
def pictures():
    return train.data_of(train.recipe("llava_olmoe"), STEPS)


def model_of(name, tokenizer):
    """Return a fresh model, its recipe and the reader of its classes."""
    chosen = train.recipe(name)
    config = train.configuration(chosen, len(tokenizer))
    model = train.fresh(train.model_class(chosen), config, seed=0).eval()
    return model, chosen, train.class_reader(model, chosen.classes)


@torch.no_grad()
@pytest.mark.numeric
def test_the_loss_names_queries_and_teaches_one_head():
    """The four parts of the loss, by loops over the positions."""
    tokenizer, batches = train.data_of(train.recipe("icl_olmoe"), STEPS)
    model, chosen, reader = model_of("icl_olmoe", tokenizer)
    batch = batches(24)  # the last of the second stage
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
