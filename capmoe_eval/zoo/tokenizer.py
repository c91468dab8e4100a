"""Train byte-level BPE tokenizers, and read the shipped one of the mini-world.

A tokenizer splits text as OLMoE's does and has its special tokens: ``<|endoftext|>`` (0: start and
end of a text) and ``<|padding|>`` (1). Unlike OLMoE's it does not normalise, so that it encodes and
decodes any Unicode text without loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, _PADDING = "<|endoftext|>", "<|padding|>"


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
    """Return a tokenizer as one of transformers.

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


def miniworld_tokenizer(max_positions: int = 2048) -> PreTrainedTokenizerFast:
    """Return the shipped tokenizer of the mini-world, which its corpus has trained."""
    file = Path(__file__).with_name("miniworld") / "tokenizer.json"
    return wrapped(Tokenizer.from_file(str(file)), max_positions)
