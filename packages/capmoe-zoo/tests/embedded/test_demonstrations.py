"""A document reads as a prompt of the evaluation; the loss is that of loops."""

from functools import partial

import pytest
import torch
from capmoe_eval.evaluation.longicl import protocol as longicl

from capmoe_zoo.embedded.banking77 import (
    MOST_ALONE,
    STAGES,
    demonstration_batch,
    demonstrations_tokenizer,
    train_split,
)
from capmoe_zoo.embedded.batch import IGNORED
from capmoe_zoo.embedded.loss import Middle, batch_loss
from capmoe_zoo.embedded.recipes import configuration, model_class, recipe
from capmoe_zoo.embedded.train import fresh

QUERIES = train_split()[::20]
STEPS = 100  # of a whole training


@pytest.fixture(scope="module", name="tokenizer")
def trained():
    return demonstrations_tokenizer(QUERIES)


@pytest.fixture(scope="module", name="batches")
def numbered(tokenizer):
    return partial(demonstration_batch, QUERIES, tokenizer, 1, STEPS)


def of_stage(batches, number):
    return batches(round(STAGES[number].until * STEPS) - 1)


def test_a_document_has_the_tokens_of_a_prompt(batches, tokenizer):
    batch = of_stage(batches, 4)
    assert STAGES[4].demonstrations[0] > MOST_ALONE
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
def test_the_loss_names_queries_and_teaches_one_head(batches, tokenizer):
    """The four parts of the loss, by loops over the positions."""
    chosen = recipe("icl_olmoe")
    model = fresh(model_class(chosen), configuration(chosen, len(tokenizer)), seed=0).eval()
    batch = of_stage(batches, 1)
    before = model.config._attn_implementation
    middle = Middle(model, chosen.middle, chosen.classes)
    loss = batch_loss(model, batch, 0.0, middle)
    assert model.model.layers[chosen.middle].self_attn.config._attn_implementation == before
    model.set_attn_implementation("eager")
    output = model.model(
        **batch.taken(model), use_cache=False, output_hidden_states=True, output_attentions=True
    )
    final = model.lm_head(output.last_hidden_state).log_softmax(-1)
    states = output.hidden_states[chosen.middle]
    tokens = model.lm_head(model.model.norm(states)).log_softmax(-1)
    classes = middle.reader(states).log_softmax(-1)
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
