"""Names of intents are known from the demonstrations of a document alone, and learned there."""

import pytest
import torch
from capmoe_eval.experiment import longicl

from capmoe_zoo.embedded.banking77 import train_split
from capmoe_zoo.embedded.batch import IGNORED
from capmoe_zoo.embedded.demonstrations import (
    MOST_ALONE,
    STAGES,
    DemonstrationBatches,
    demonstrations_tokenizer,
)
from capmoe_zoo.embedded.loss import Middle, batch_loss
from capmoe_zoo.embedded.recipes import _fresh, configuration, model_class, recipe

QUERIES = train_split()[::20]
STEPS = 100  # of a whole training


@pytest.fixture(scope="module", name="tokenizer")
def trained():
    return demonstrations_tokenizer(QUERIES)


@pytest.fixture(scope="module", name="batches")
def numbered(tokenizer):
    return DemonstrationBatches(QUERIES, tokenizer, seed=1, steps=STEPS)


def of_stage(batches, number):
    return batches[round(STAGES[number].until * STEPS) - 1]


def names_of(batch, row, tokenizer):
    """Return document, place, intent and name of each demonstration of a row, naively."""
    demonstrations = []
    for place, intent in enumerate(batch.classes_BS[row].tolist()):
        if batch.middle_BS[row, place] != IGNORED:
            document = int(batch.attended_B1SS[row, 0, place].nonzero()[0])  # its first position
            name = tokenizer.decode([batch.input_ids_BS[row, place]])
            demonstrations.append((document, place, intent, name))
    return demonstrations


def test_a_batch_is_a_function_of_its_number(tokenizer, batches):
    again = DemonstrationBatches(QUERIES, tokenizer, seed=1, steps=STEPS)
    for number, stage in enumerate(STAGES):
        batch, other = of_stage(batches, number), of_stage(again, number)
        assert batch.input_ids_BS.shape == stage.shape
        for name, tensor in vars(batch).items():
            assert torch.equal(tensor, getattr(other, name)), name
    another = DemonstrationBatches(QUERIES, tokenizer, seed=2, steps=STEPS)
    assert not torch.equal(another[0].input_ids_BS, batches[0].input_ids_BS)
    assert not torch.equal(batches[1].input_ids_BS, batches[0].input_ids_BS)


def test_a_single_query_has_no_name_to_learn(batches):
    alone = of_stage(batches, 0)
    assert (alone.labels_BS == IGNORED).all()
    assert not alone.sought_BSS.any()
    assert (alone.middle_BS != IGNORED).sum() > 100
    assert (alone.classes_BS != IGNORED).sum() == 2 * (alone.middle_BS != IGNORED).sum()


def test_names_change_between_documents_and_not_within(batches, tokenizer):
    names = {}
    intents = sorted({intent for _, intent in QUERIES})
    for number in range(1, len(STAGES)):
        batch = of_stage(batches, number)
        for row in range(len(batch.input_ids_BS)):
            for document, place, intent, name in names_of(batch, row, tokenizer):
                assert name in intents
                assert batch.middle_BS[row, place] == batch.input_ids_BS[row, place]
                assert batch.classes_BS[row, place - 1] == intent
                assert names.setdefault((number, row, document, intent), name) == name
    same = sum(intents[intent] == name for (_, _, _, intent), name in names.items())
    assert same < 0.05 * len(names)


def test_a_name_is_learned_and_sought_where_its_intent_was_demonstrated(batches, tokenizer):
    """Every label and every position that is sought, by a loop over the demonstrations."""
    batch = of_stage(batches, 3)
    is_name_BS = torch.zeros_like(batch.labels_BS, dtype=torch.bool)
    is_learned_BS = is_name_BS.clone()
    sought_BSS = torch.zeros_like(batch.sought_BSS)
    for row in range(len(sought_BSS)):
        demonstrations = names_of(batch, row, tokenizer)
        for document, place, intent, _ in demonstrations:
            for other, earlier, other_intent, _ in demonstrations:
                if other == document and earlier < place and other_intent == intent:
                    is_name_BS[row, place] = is_learned_BS[row, place : place + 4] = True
                    sought_BSS[row, place - 1, earlier] = True
    assert torch.equal(batch.sought_BSS, sought_BSS)
    labelled_BS = batch.labels_BS != IGNORED
    assert torch.equal(batch.labels_BS[labelled_BS], batch.input_ids_BS[labelled_BS])
    assert (labelled_BS | ~is_name_BS).all()
    assert (is_learned_BS | ~labelled_BS).all()
    followed = {tokenizer.decode([i]) for i in batch.labels_BS[labelled_BS & ~is_name_BS]}
    assert followed == {"\n", "service", " query"}
    assert sought_BSS.sum() > 50


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


def test_half_of_the_documents_have_the_distances_of_a_long_prompt(batches):
    gaps = [
        (batch.position_ids_BS.diff(dim=-1) > 1).any(-1).float().mean()
        for batch in (of_stage(batches, 3), of_stage(batches, 4))
    ]
    assert 0.2 < sum(gaps) / 2 < 0.95
    assert of_stage(batches, 4).position_ids_BS.max() > 2_000


@torch.no_grad()
@pytest.mark.numeric
def test_the_loss_names_queries_and_teaches_one_head(batches, tokenizer):
    """The four parts of the loss, by loops over the positions."""
    chosen = recipe("icl_olmoe")
    model = _fresh(model_class(chosen), configuration(chosen, len(tokenizer)), seed=0).eval()
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
