"""Train byte-level tokenizers: that of the tiny models, and what all of them share."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlavaProcessor, PreTrainedTokenizerFast

from capmoe_eval.zoo.llava import picture_processor
from capmoe_eval.zoo.synthetic.documents import texts
from capmoe_eval.zoo.synthetic.models import MAX_POSITIONS

#: Upper bound on the number of tokens, the two special ones and the 256 bytes included.
MAX_VOCABULARY = 1024

# Their numbers are END_OF_TEXT_ID and PADDING_ID.
END_OF_TEXT, _PADDING = "<|endoftext|>", "<|padding|>"


@functools.cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the tiny models: byte-level BPE of at most 1,024 tokens.

    It splits text as OLMoE's tokenizer does and has its special tokens: ``<|endoftext|>`` (0: start
    and end of a text) and ``<|padding|>`` (1). Unlike OLMoE's it does not normalise, so that it
    encodes and decodes any Unicode text without loss. Each process trains it once, in a fraction of
    a second, with the same result; all callers share one object.
    """
    return wrapped(train_bpe(texts(), MAX_VOCABULARY), MAX_POSITIONS)


@functools.cache
def tiny_processor() -> LlavaProcessor:
    """Return the processor of the tiny LLaVA; its tokenizer has one token more than the others'."""
    return picture_processor(wrapped(train_bpe(texts(), MAX_VOCABULARY), MAX_POSITIONS))


def train_bpe(texts: Iterable[str], most: int, *, rarest: int = 0) -> Tokenizer:
    """Train byte-level BPE of at most ``most`` tokens, special ones and the 256 bytes included.

    ``rarest`` is the lowest frequency of a merge.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=most,
        min_frequency=rarest,
        special_tokens=[END_OF_TEXT, _PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def wrapped(tokenizer: Tokenizer, max_positions: int = 2048) -> PreTrainedTokenizerFast:
    """Return a tokenizer of :func:`train_bpe` as one of transformers, with OLMoE's special tokens.

    ``max_positions`` is the longest sequence in tokens; by default that of the trained models.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=_PADDING,
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
    )
