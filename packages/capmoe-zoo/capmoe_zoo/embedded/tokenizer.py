"""Train byte-level BPE tokenizers, which split text as OLMoE's does."""

from __future__ import annotations

from collections.abc import Iterable

from capmoe_eval.zoo.tokenizer import END_OF_TEXT, PADDING
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


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
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer
