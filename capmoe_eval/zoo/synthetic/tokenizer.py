"""Train a small byte-level tokenizer on the synthetic documents."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from capmoe_eval.zoo.synthetic.documents import texts
from capmoe_eval.zoo.synthetic.models import END_OF_TEXT_ID, MAX_POSITIONS, PADDING_ID

#: Upper bound on the number of tokens, the two special ones and the 256 bytes included.
MAX_VOCABULARY = 1024

_SPECIAL = {"<|endoftext|>": END_OF_TEXT_ID, "<|padding|>": PADDING_ID}


@functools.cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the tiny models: byte-level BPE of at most 1,024 tokens.

    It splits text as OLMoE's tokenizer does and has its special tokens: ``<|endoftext|>`` (0: start
    and end of a text) and ``<|padding|>`` (1). Unlike OLMoE's it does not normalise, so that it
    encodes and decodes any Unicode text without loss. Each process trains it once, in a fraction of
    a second, with the same result; all callers share one object.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        special_tokens=sorted(_SPECIAL, key=_SPECIAL.__getitem__),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer=trainer)
    return wrapped(tokenizer, MAX_POSITIONS)


def wrapped(tokenizer: Tokenizer, max_positions: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer as a tokenizer of transformers with OLMoE's special tokens.

    Args:
        tokenizer: A tokenizer with the tokens ``<|endoftext|>`` and ``<|padding|>``.
        max_positions: Longest sequence in tokens.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|padding|>",
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
    )
