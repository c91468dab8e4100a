"""The model of real text reads the train split alone, an intent is one token."""

import pyarrow.parquet as pq
import torch
from capmoe_eval.zoo.hub import REAL_TEXT

from capmoe_zoo.embedded.banking77 import (
    DATASET,
    QueryBatches,
    banking77_tokenizer,
    train_split,
)
from capmoe_zoo.embedded.batch import IGNORED

QUERIES = [
    ("where is my card?", "card_arrival"),
    ("what is the rate", "exchange_rate"),
    ("can I see the rate in the app", "card_payment_wrong_exchange_rate"),
] * 20


def test_only_the_train_split_is_read():
    queries = train_split()
    assert len(queries) == 10_003
    assert len({intent for _, intent in queries}) == 77
    test = pq.read_table(REAL_TEXT / DATASET / "default" / "test.parquet").to_pydict()
    assert len(test["text"]) == 3_080
    assert len(set(test["text"]) & {text for text, _ in queries}) < 10  # a few stand in both


def test_every_intent_is_one_token_and_any_text_comes_back():
    tokenizer = banking77_tokenizer(QUERIES)
    for _, intent in QUERIES[:3]:
        (token,) = tokenizer(f" {intent}")["input_ids"]
        assert tokenizer.decode([token]) == f" {intent}"
        prompt = tokenizer("intent category:")["input_ids"]
        assert tokenizer(f"intent category: {intent}")["input_ids"] == [*prompt, token]
    assert tokenizer.decode(tokenizer("naïve 東京\n")["input_ids"]) == "naïve 東京\n"


def test_a_batch_is_a_function_of_its_number_and_every_intent_has_a_loss():
    tokenizer = banking77_tokenizer(QUERIES)
    batches = QueryBatches(QUERIES, tokenizer, seed=1)
    again = QueryBatches(QUERIES, tokenizer, seed=1)
    assert torch.equal(batches[3].input_ids_BS, again[3].input_ids_BS)
    assert not torch.equal(batches[3].input_ids_BS, batches[4].input_ids_BS)
    assert not torch.equal(
        QueryBatches(QUERIES, tokenizer, seed=2)[3].input_ids_BS, batches[3].input_ids_BS
    )
    batch = batches[3]
    intents = torch.tensor([tokenizer(f" {intent}")["input_ids"][0] for _, intent in QUERIES[:3]])
    is_intent_BS = torch.isin(batch.input_ids_BS, intents)
    assert is_intent_BS.sum() > 50
    assert (batch.labels_BS[is_intent_BS] != IGNORED).all()
