"""Untrained tiny models, their tokenizer and synthetic documents.

Everything is generated in seconds, without a network. The models score as chance does; they serve
to run every command of the suite.
"""

from capmoe_eval.tiny.hub import synthetic_hub, write_hub
from capmoe_eval.tiny.models import TINY_FAMILIES, tiny_config, tiny_model
from capmoe_eval.tiny.tokenizer import tiny_tokenizer

__all__ = [
    "TINY_FAMILIES",
    "synthetic_hub",
    "tiny_config",
    "tiny_model",
    "tiny_tokenizer",
    "write_hub",
]
