"""The tokenizer of the mini-world: byte-level BPE, trained on its corpus and shipped as a file."""

from __future__ import annotations

import functools
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from capmoe_eval.zoo.miniworld.corpus import corpus
from capmoe_eval.zoo.miniworld.world import World, world
from capmoe_eval.zoo.synthetic.tokenizer import wrapped

#: Upper bound on the number of tokens, the two special ones and the 256 bytes included.
MAX_VOCABULARY = 2048
#: Longest sequence in tokens.
MAX_POSITIONS = 2048
END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"

_FILE = Path(__file__).parent / "tokenizer.json"
_SAMPLE = {"short": 60_000, "long": 2_000}
# Lowest frequency of a merge; rarer ones belong to no word of the world.
_LEAST = 12


@functools.cache
def miniworld_tokenizer() -> PreTrainedTokenizerFast:
    """Return the shipped tokenizer; it encodes and decodes any Unicode text without loss.

    All callers of a process share one object.
    """
    return wrapped(Tokenizer.from_file(str(_FILE)), MAX_POSITIONS)


def train_tokenizer(known: World | None = None) -> Tokenizer:
    """Train the tokenizer on documents of the corpus; this takes some seconds.

    Args:
        known: The world; None for the world of the shipped models.
    """
    known = known or world()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        min_frequency=_LEAST,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [
        document.text
        for length, number in _SAMPLE.items()
        for document in islice(corpus(known, seed=0, long=length == "long"), number)
    ]
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def save_tokenizer() -> None:
    """Train the tokenizer again and replace the shipped file."""
    train_tokenizer().save(str(_FILE))
