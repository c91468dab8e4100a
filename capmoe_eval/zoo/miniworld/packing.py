"""Make the batches of the corpus; a batch depends only on its number.

A batch does not depend on the batches before it, so that a killed training continues exactly where
it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from capmoe_eval.zoo.batch import Batch, Encoded, encoded, pack
from capmoe_eval.zoo.miniworld.corpus import corpus
from capmoe_eval.zoo.miniworld.world import World


@dataclass(frozen=True)
class Batches:
    """The batches of a corpus.

    Attributes:
        known: The world.
        tokenizer: Its tokenizer.
        seed: Seed of the documents.
        short: Rows and positions of a batch of short documents.
        long: Rows and positions of a batch whose rows begin with a long document.
        every: Every how many batches one has long documents.
        early: Number of batches before the second part of the training.
    """

    known: World
    tokenizer: PreTrainedTokenizerFast
    seed: int
    short: tuple[int, int] = (16, 128)
    long: tuple[int, int] = (4, 480)
    every: int = 5
    early: int = 1500

    def __getitem__(self, step: int) -> Batch:
        """Return the batch of a step."""
        is_long = step % self.every == self.every - 1
        n_rows, width = self.long if is_long else self.short

        def documents(long: bool) -> Iterator[Encoded]:
            # Every step has a seed of its own; the factor keeps those of different seeds apart.
            seed = self.seed * 1_000_003 + step
            own = corpus(self.known, seed, long=long, late=step >= self.early)
            return encoded((document.parts for document in own), self.tokenizer, width)

        openings = documents(long=True)
        rows = [[next(openings)] if is_long else [] for _ in range(n_rows)]
        return pack(rows, documents(long=False), width, int(self.tokenizer.pad_token_id))
