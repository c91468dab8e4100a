"""Read byte-level BPE tokenizers, such as the shipped one of the mini-world.

A tokenizer splits text as OLMoE's does and has its special tokens: ``<|endoftext|>`` (0: start and
end of a text) and ``<|padding|>`` (1). Unlike OLMoE's it does not normalise, so that it encodes and
decodes any Unicode text without loss.
"""

from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, PADDING = "<|endoftext|>", "<|padding|>"


def wrapped(tokenizer: Tokenizer, max_positions: int = 2048) -> PreTrainedTokenizerFast:
    """Return a tokenizer as one of transformers.

    ``max_positions`` is the longest sequence in tokens; by default that of the trained models.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
    )


def miniworld_tokenizer(max_positions: int = 2048) -> PreTrainedTokenizerFast:
    """Return the shipped tokenizer of the mini-world, which its corpus has trained."""
    file = Path(__file__).with_name("tokenizer.json")
    return wrapped(Tokenizer.from_file(str(file)), max_positions)
