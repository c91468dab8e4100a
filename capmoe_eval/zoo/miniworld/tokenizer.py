"""The tokenizer of the mini-world: byte-level BPE, trained on its corpus and shipped as a file."""

from __future__ import annotations

import functools
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from capmoe_eval.zoo.miniworld.corpus import corpus
from capmoe_eval.zoo.miniworld.lexicon import WORDINGS
from capmoe_eval.zoo.miniworld.world import say, world
from capmoe_eval.zoo.synthetic.tokenizer import train_bpe, wrapped

#: Upper bound on the number of tokens, the two special ones and the 256 bytes included.
MAX_VOCABULARY = 2560

# Numbers of documents to train on.
_SHORT, _LONG = 60_000, 2_000
# Lowest frequency of a merge; rarer ones belong to no word of the world.
_LEAST = 12


@functools.cache
def miniworld_tokenizer() -> PreTrainedTokenizerFast:
    """Return the shipped tokenizer; it encodes and decodes any Unicode text without loss.

    All callers of a process share one object.
    """
    return wrapped(Tokenizer.from_file(str(Path(__file__).with_name("tokenizer.json"))))


def train_tokenizer() -> Tokenizer:
    """Train the tokenizer on documents of the corpus; its ``save`` writes the shipped file."""
    known = world()
    documents = [
        *islice(corpus(known, seed=0), _SHORT),
        *islice(corpus(known, seed=0, long=True), _LONG),
    ]
    texts = [document.text for document in documents]
    # The corpus says little of what is not well known, but each of its words is a token, too.
    texts += [say(WORDINGS.statements[0], fact) for fact in known.facts] * _LEAST
    texts += [say(WORDINGS.rules[0], rule) for rule in known.rules] * _LEAST
    return train_bpe(texts, MAX_VOCABULARY, rarest=_LEAST)
