"""The embedded default of the suite: tiny models, their tokenizer and synthetic documents.

Everything is made on the spot, in seconds, without a network. The models are untrained: what they
score is chance. They show that the machinery works and what a capacity limit does to it.
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
