"""Train data of the model of real text: the train split of BANKING77 (Casanueva et al., 2020).

A document is a customer's query and its intent, in the prompt of LongICLBench without
demonstrations. Every intent is one token, so that one forward pass scores all 77. The 10,003
queries are read many times: words are left out at random, so that no query is learned by heart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from capmoe_eval.zoo.tokenizer import wrapped
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from capmoe_zoo.embedded.batch import Batch, Parts, encoded, pack
from capmoe_zoo.embedded.tokenizer import train_bpe
from capmoe_zoo.worlds.draw import Draw

DATASET = "mteb/banking77"
#: Upper bound on the number of tokens, without the intents.
MAX_VOCABULARY = 2048
#: Rows and positions of a batch, and the share of the words that are left out of a query.
SHAPE = (16, 128)
LEFT_OUT = 0.15
#: Share of the documents whose query has a loss, too: intents alone teach little of the language.
READ = 0.3

#: A query and its intent.
Query = tuple[str, str]


def train_split() -> list[Query]:
    """Read the train split."""
    import pyarrow.parquet as pq  # which training on the mini-world need not have
    from capmoe_eval.zoo.hub import REAL_TEXT

    table = pq.read_table(REAL_TEXT / DATASET / "default" / "train.parquet")
    columns = table.select(["text", "label_text"]).to_pydict()
    return list(zip(columns["text"], columns["label_text"], strict=True))


def banking77_tokenizer(queries: Sequence[Query]) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on the queries; every intent becomes one token."""
    prompts = [f"service query: {text}\nintent category:" for text, _ in queries]
    tokenizer = train_bpe(prompts, MAX_VOCABULARY)
    intents = dict.fromkeys(intent for _, intent in queries)
    tokenizer.add_tokens([AddedToken(f" {intent}", normalized=False) for intent in sorted(intents)])
    return wrapped(tokenizer)


def query_batch(
    queries: Sequence[Query], tokenizer: PreTrainedTokenizerFast, seed: int, step: int
) -> Batch:
    """Return the batch of a step."""
    draw = Draw(f"banking77-{seed}-{step}")
    n_rows, width = SHAPE

    def documents() -> Iterator[Parts]:
        while True:
            text, intent = draw.one(queries)
            yield (
                ("service query:", False),
                (f" {with_words_left_out(text, draw)}", draw.chance(READ)),
                ("\nintent category:", False),
                (f" {intent}", True),
            )

    pieces = encoded(documents(), tokenizer, width)
    return pack([[]] * n_rows, pieces, width, int(tokenizer.pad_token_id))


def with_words_left_out(text: str, draw: Draw) -> str:
    """Return a query without a random part of its words."""
    words = [word for word in text.split() if not draw.chance(LEFT_OUT)] or [text]
    return " ".join(words)
