"""Train tokenizers, and pack documents into a batch: several in a row, each with its own positions.

Positions restart with every document; transformers' attention masks take that as the border between
packed sequences, so that a document attends to itself only, as in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from capmoe_eval.zoo.tokenizer import END_OF_TEXT, PADDING
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

# Shape suffixes: B rows, S positions.

#: Label of the tokens without a loss.
IGNORED = -100

#: The pieces of a document in order, and whether each has a loss.
Parts = Sequence[tuple[str, bool]]
#: The tokens and the labels of a document.
Encoded = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Batch:
    """The tensors of one training step."""

    input_ids_BS: Tensor
    position_ids_BS: Tensor  # in the document
    # The tokens again; IGNORED for pads, first tokens of documents, and pieces without a loss.
    labels_BS: Tensor
    # The token, and the number of the class, as which the state after the recipe's middle layer is
    # read, at its own position; IGNORED elsewhere.
    middle_BS: Tensor | None = None
    classes_BS: Tensor | None = None
    # Whether a position (the third dimension) attends to another; None: to earlier ones of its
    # document.
    attended_B1SS: Tensor | None = None
    # The positions that the first head of the layer after the middle is taught to attend to.
    sought_BSS: Tensor | None = None
    pixels_BCHW: Tensor | None = None  # a normalised picture for each row

    def on(self, device: torch.device) -> Batch:
        """Return the batch with its tensors on a device."""
        tensors = {name: each for name, each in vars(self).items() if each is not None}
        return replace(self, **{name: each.to(device) for name, each in tensors.items()})

    def taken(self, model: Any) -> dict[str, Any]:
        """Return what the model takes, by its names."""
        inputs = {"input_ids": self.input_ids_BS, "position_ids": self.position_ids_BS}
        if self.attended_B1SS is not None:
            # Added to the logits, as every attention kernel takes it.
            mask = torch.zeros(self.attended_B1SS.shape, device=self.attended_B1SS.device)
            least = torch.finfo(mask.dtype).min
            inputs["attention_mask"] = mask.masked_fill(~self.attended_B1SS, least)
        if self.pixels_BCHW is None:
            return inputs
        features = model.model.get_image_features(self.pixels_BCHW, return_dict=True)
        return inputs | {"mm_encoder_outputs": {"image": features}}


Batches = Callable[[int], Batch]
"""The batch of a step, which depends on its number alone: a killed training goes on exactly."""


def stage_of(stages: Sequence[Mapping[str, Any]], step: int, steps: int) -> Mapping[str, Any]:
    """Return the stage that a step of so many is in; each goes ``until`` a share of the steps."""
    return next(stage for stage in stages if step < stage["until"] * steps)


def train_bpe(texts: Iterable[str], most: int, *, rarest: int = 0) -> Tokenizer:
    """Train byte-level BPE, which splits text as OLMoE's does.

    It has at most ``most`` tokens, special ones and the 256 bytes included. ``rarest`` is the
    lowest frequency of a merge.
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


def encoded(
    documents: Iterable[Parts], tokenizer: PreTrainedTokenizerFast, most: int
) -> Iterator[Encoded]:
    """Yield tokens and labels of documents of at most ``most`` tokens, the end of text included.

    Tokens end where the pieces of a document do; longer documents are left out.
    """
    end = int(tokenizer.eos_token_id)
    for parts in documents:
        texts, learned = zip(*parts, strict=True)
        ids: list[int] = []
        labels: list[int] = []
        for part, yes in zip(tokenizer(list(texts))["input_ids"], learned, strict=True):
            ids += part
            labels += part if yes else [IGNORED] * len(part)
        if len(ids) < most:
            yield [*ids, end], [*labels, end]


def pack(
    rows: Sequence[Sequence[Encoded]], documents: Iterator[Encoded], width: int, pad: int
) -> Batch:
    """Return a batch whose rows are filled up with documents.

    As many tokens are drawn as there is space for. The longest document comes first, each into the
    first row with space for it; one without space is left out. ``rows`` has the documents that each
    row of ``width`` positions begins with, none longer; positions that stay empty are ``pad``.
    """
    filled = [list(row) for row in rows]
    space = [width - sum(len(ids) for ids, _ in row) for row in rows]
    drawn: list[Encoded] = []
    missing = sum(space)
    while missing > 0:
        drawn.append(next(documents))
        missing -= len(drawn[-1][0])
    for document in sorted(drawn, key=lambda document: -len(document[0])):
        size = len(document[0])
        place = next((place for place, left in enumerate(space) if left >= size), None)
        if place is not None:
            filled[place].append(document)
            space[place] -= size
    input_ids_BS = torch.full((len(rows), width), pad)
    position_ids_BS = torch.arange(width).repeat(len(rows), 1)
    labels_BS = torch.full((len(rows), width), IGNORED)
    for place, row in enumerate(filled):
        start = 0
        for ids, labels in row:
            end = start + len(ids)
            input_ids_BS[place, start:end] = torch.tensor(ids)
            labels_BS[place, start + 1 : end] = torch.tensor(labels[1:])
            position_ids_BS[place, start:end] = torch.arange(len(ids))
            position_ids_BS[place, end:] = torch.arange(width - end)
            start = end
    return Batch(input_ids_BS, position_ids_BS, labels_BS)


def attended(group_BS: Tensor) -> Tensor:
    """Return which positions [B, 1, S, S] attend to which.

    A position attends to earlier ones of its group and of group 0, the picture of a row. The group
    of an empty position is negative.
    """
    width = group_BS.shape[1]
    earlier_SS = torch.ones(width, width, dtype=torch.bool).tril()
    same_BSS = group_BS[:, :, None] == group_BS[:, None, :]
    of_picture_BSS = (group_BS == 0)[:, None, :] & (group_BS >= 0)[:, :, None]
    return ((same_BSS | of_picture_BSS) & earlier_SS)[:, None]
