"""A closed world in simple English: facts, a training corpus and held-out questions.

The tiny models of the suite are trained on the corpus and evaluated on the questions. These have
the columns of the real evaluation sets, so that lm-eval's own tasks can read them.
"""

from capmoe_eval.miniworld.corpus import corpus
from capmoe_eval.miniworld.evaluation import documents, miniworld_hub, write_miniworld
from capmoe_eval.miniworld.tokenizer import miniworld_tokenizer
from capmoe_eval.miniworld.world import SPLITS, World, world

__all__ = [
    "SPLITS",
    "World",
    "corpus",
    "documents",
    "miniworld_hub",
    "miniworld_tokenizer",
    "world",
    "write_miniworld",
]
