"""Pack documents of the corpus into batches; a batch depends only on its number.

A batch does not depend on the batches before it, so that a killed training continues exactly where
it stopped. Positions restart with every document; transformers' attention masks take that as the
border between packed sequences, so that a document attends to itself only, as in evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from capmoe_eval.zoo.miniworld.corpus import corpus
from capmoe_eval.zoo.miniworld.world import World

# Shape suffixes: B rows, S positions.

#: Label of the tokens without a loss.
IGNORED = -100
# A row with less room than this is padded, because few documents would fit.
_TOO_SMALL = 14


@dataclass(frozen=True)
class Shape:
    """Sizes of the batches.

    Attributes:
        short: Rows and positions of a batch of short documents.
        long: Rows and positions of a batch whose rows begin with a long document.
        every: Every how many batches one has long documents; 0 for none.
        early: Number of batches before the second part of the training.
    """

    short: tuple[int, int] = (10, 208)
    long: tuple[int, int] = (5, 448)
    every: int = 5
    early: int = 1500


@dataclass(frozen=True)
class Batch:
    """The tensors of one training step.

    Attributes:
        input_ids_BS: Tokens.
        position_ids_BS: Positions in the document.
        labels_BS: The tokens again, or ``IGNORED`` for pads, the first token of a document, and
            pieces without a loss.
    """

    input_ids_BS: Tensor
    position_ids_BS: Tensor
    labels_BS: Tensor


class Batches:
    """The batches of a corpus.

    Args:
        known: The world.
        tokenizer: Its tokenizer.
        seed: Seed of the documents.
        shape: Sizes of the batches.
    """

    def __init__(
        self, known: World, tokenizer: PreTrainedTokenizerFast, *, seed: int, shape: Shape
    ) -> None:
        self._world = known
        self._tokenizer = tokenizer
        self._seed = seed
        self._shape = shape

    def __getitem__(self, step: int) -> Batch:
        """Return the batch of a step."""
        every = self._shape.every
        long = every > 0 and step % every == every - 1
        n_rows, n_positions = self._shape.long if long else self._shape.short
        pad = int(self._tokenizer.pad_token_id)
        input_ids_BS = torch.full((n_rows, n_positions), pad)
        position_ids_BS = torch.arange(n_positions).repeat(n_rows, 1)
        labels_BS = torch.full((n_rows, n_positions), IGNORED)
        # Every step has a seed of its own; the factor keeps those of different seeds apart.
        seed = self._seed * 1_000_003 + step
        late = step >= self._shape.early
        openings = self._documents(seed, long=long, late=late, most=n_positions)
        fillers = openings
        if long:
            fillers = self._documents(seed, long=False, late=late, most=n_positions)
        ids: list[int] = []
        for row in range(n_rows):
            start = 0
            if long or not ids:  # otherwise begin with the document that did not fit the last row
                ids, labels = next(openings)
            while start + len(ids) <= n_positions:
                end = start + len(ids)
                input_ids_BS[row, start:end] = torch.tensor(ids)
                labels_BS[row, start + 1 : end] = torch.tensor(labels[1:])
                position_ids_BS[row, start:end] = torch.arange(len(ids))
                position_ids_BS[row, end:] = torch.arange(n_positions - end)
                start, ids = end, []
                if n_positions - start < _TOO_SMALL:
                    break
                ids, labels = next(fillers)
        return Batch(input_ids_BS, position_ids_BS, labels_BS)

    def _documents(
        self, seed: int, *, long: bool, late: bool, most: int
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the tokens and the labels of documents of at most ``most`` tokens."""
        for document in corpus(self._world, seed, long=long, late=late):
            texts, learned = zip(*document.parts, strict=True)
            ids: list[int] = []
            labels: list[int] = []
            for part, yes in zip(self._tokenizer(list(texts))["input_ids"], learned, strict=True):
                ids += part
                labels += part if yes else [IGNORED] * len(part)
            end = int(self._tokenizer.eos_token_id)
            if len(ids) < most:
                yield [*ids, end], [*labels, end]
