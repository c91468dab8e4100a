"""Train data of both models of real text: the train split of BANKING77 (Casanueva et al., 2020).

The 10,003 queries are read many times: words are left out at random, so that no query is learned by
heart.

A document of the model ``banking77`` is a customer's query and its intent, in the prompt of
LongICLBench without demonstrations. Every intent is one token, so that one forward pass scores all
77.

A document of the model that learns in context is a whole prompt of LongICLBench: queries with the
names of their intents. The names are exchanged anew in each document, so that they are known from
the demonstrations alone. A name has a loss where its intent was demonstrated before; there one head
is taught to attend to the names of those demonstrations. In the middle of the model the query's
intent, a class, is read from the states at the end of the query and at the name after it. The state
at the name is read as the name, too: without that the model did not learn to repeat a name.

Such documents begin short: first a query alone, then a few demonstrations of two intents. With long
ones from the start no schedule learned to repeat a name of the context.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from capmoe_eval.evaluation.longicl.protocol import INTRODUCTION, question
from capmoe_eval.experiment.files import read_data
from capmoe_eval.zoo.hub import REAL_TEXT
from capmoe_eval.zoo.tokenizer import wrapped
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from capmoe_zoo.embedded import batch as batches
from capmoe_zoo.embedded.batch import IGNORED, Batch, Parts
from capmoe_zoo.worlds.draw import Draw

# Shape suffixes: B rows, S positions.

#: Upper bounds on the number of tokens, without the intents: of either model.
MAX_VOCABULARY, MAX_DEMONSTRATIONS_VOCABULARY = 2048, 1500
#: Rows and positions of a batch of queries, and the share of the words that are left out of one.
SHAPE = (16, 128)
LEFT_OUT = 0.15
#: Share of the documents whose query has a loss, too: intents alone teach little of the language.
READ = 0.3

#: A query and its intent.
Query = tuple[str, str]


def train_split() -> list[Query]:
    """Read the train split."""
    import pyarrow.parquet as pq  # which training on the mini-world need not have

    table = pq.read_table(REAL_TEXT / "mteb" / "banking77" / "default" / "train.parquet")
    columns = table.select(["text", "label_text"]).to_pydict()
    return list(zip(columns["text"], columns["label_text"], strict=True))


def queries_tokenizer(queries: Sequence[Query]) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on the queries; every intent becomes one token."""
    prompts = [f"service query: {text}\nintent category:" for text, _ in queries]
    tokenizer = batches.train_bpe(prompts, MAX_VOCABULARY)
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

    pieces = batches.encoded(documents(), tokenizer, width)
    return batches.pack([[]] * n_rows, pieces, width, int(tokenizer.pad_token_id))


def with_words_left_out(text: str, draw: Draw) -> str:
    """Return a query without a random part of its words."""
    words = [word for word in text.split() if not draw.chance(LEFT_OUT)] or [text]
    return " ".join(words)


#: A prompt of five rounds of demonstrations has about 9,500 tokens.
MAX_POSITIONS = 16384
#: Positions that are left out between the demonstrations of a document, at most in the mean: so
#: half of the short documents have the distances of a long prompt.
LEFT_OUT_POSITIONS = 12_000
#: Documents of more demonstrations begin with the prompt's introduction.
MOST_ALONE = 10
#: Share of the learned names that are learned with the next tokens, and how many of these: the end
#: of the line and "service query", where an answer ends.
FOLLOWED, CONTINUED = 0.2, 3


#: The stages of the training; the comments of ``demonstrations.yaml`` say what each field is.
STAGES = read_data(__package__, "demonstrations.yaml", list[dict[str, Any]])


def demonstrations_tokenizer(queries: Sequence[Query]) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on the queries; the name of every intent becomes one token."""
    tokenizer = batches.train_bpe(
        [question(text) for text, _ in queries], MAX_DEMONSTRATIONS_VOCABULARY
    )
    names = sorted({intent for _, intent in queries})
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
    return wrapped(tokenizer, MAX_POSITIONS)


def demonstration_batch(
    queries: Sequence[Query], tokenizer: PreTrainedTokenizerFast, seed: int, steps: int, step: int
) -> Batch:
    """Return the batch of a step of so many."""
    stage = batches.stage_of(STAGES, step, steps)
    shape = stage["shape"]
    draw = Draw(f"demonstrations-{seed}-{step}")
    n_rows, width = shape
    input_ids_BS = torch.full(shape, int(tokenizer.pad_token_id))
    position_ids_BS = torch.zeros(shape, dtype=torch.long)
    labels_BS, middle_BS, classes_BS = (torch.full(shape, IGNORED) for _ in range(3))
    # Number of a position's document, negative for an empty position.
    document_BS = torch.full(shape, -1)
    for row in range(n_rows):
        start = 0
        for number, position, tokens, intent in _pieces(queries, tokenizer, stage, draw):
            end = start + len(tokens)
            if end > width:
                break
            input_ids_BS[row, start:end] = torch.tensor(tokens)
            position_ids_BS[row, start:end] = position + torch.arange(len(tokens))
            document_BS[row, start:end] = number
            if intent is not None:
                classes_BS[row, end - 3 : end - 1] = intent
                middle_BS[row, end - 2] = tokens[-2]
            start = end
    attended_B1SS = batches.attended(document_BS)
    is_name_BS = middle_BS != IGNORED
    is_end_BS = is_name_BS.roll(-1, -1)  # of a query
    is_same_BSS = classes_BS[:, :, None] == classes_BS[:, None, :]
    sought_BSS = is_end_BS[:, :, None] & is_name_BS[:, None] & is_same_BSS & attended_B1SS[:, 0]
    for row, place in sought_BSS.any(-1).nonzero().tolist():
        learned = slice(place + 1, place + 2 + (CONTINUED if draw.chance(FOLLOWED) else 0))
        is_same_S = document_BS[row, learned] == document_BS[row, place]
        labels_BS[row, learned] = torch.where(is_same_S, input_ids_BS[row, learned], IGNORED)
    tensors = (input_ids_BS, position_ids_BS, labels_BS, middle_BS, classes_BS)
    return Batch(*tensors, attended_B1SS, sought_BSS)


def _pieces(
    queries: Sequence[Query],
    tokenizer: PreTrainedTokenizerFast,
    stage: Mapping[str, Any],
    draw: Draw,
) -> Iterator[tuple[int, int, list[int], int | None]]:
    """Yield pieces of documents without end.

    A piece has the number of its document, from 1, its first position, its tokens, and the
    number of its intent, or None for the introduction. A demonstration ends in a query's last
    token, a name, and the end of the line.
    """
    texts: dict[str, list[str]] = {}
    for text, name in queries:
        texts.setdefault(name, []).append(text)
    end = tokenizer("\n")["input_ids"]
    intents = sorted(texts)
    for number in count(1):
        n_demonstrations = draw.one(stage["demonstrations"])
        names = draw.shuffled(intents)
        asked = draw.some(range(len(intents)), draw.one(stage["intents"]))
        gap = draw.below(2 * LEFT_OUT_POSITIONS // n_demonstrations) if draw.chance(0.5) else 0
        position = 0
        if n_demonstrations > MOST_ALONE:
            tokens = tokenizer(INTRODUCTION)["input_ids"]
            yield number, position, tokens, None
            position += len(tokens)
        for place in range(n_demonstrations):
            intent = asked[place] if place < len(asked) else draw.one(asked)
            query = with_words_left_out(draw.one(texts[intents[intent]]), draw)
            tokens = [
                *tokenizer(question(query))["input_ids"],
                int(tokenizer.convert_tokens_to_ids(names[intent])),
                *end,
            ]
            position += draw.below(gap + 1)
            yield number, position, tokens, intent
            position += len(tokens)
