"""Make the training batches of the picture world; a batch depends only on its number.

Training has three stages. First the patches of a picture are named, so that the model learns to see
before there is much to say; then come open questions, and last all forms. A row is a picture and as
many questions as it has space for. Every question attends to the picture and to itself alone, and
its positions go on from the picture's, so that it is seen as in evaluation, where it is the only
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from capmoe_eval.experiment.files import read_data
from capmoe_eval.zoo.llava import IMAGE_TOKEN, IMAGE_TOKENS, MEAN, PATCHES, SPREAD
from capmoe_eval.zoo.tokenizer import END_OF_TEXT, wrapped
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from capmoe_zoo.embedded.batch import IGNORED, Batch, attended, stage_of, train_bpe
from capmoe_zoo.worlds.draw import Draw
from capmoe_zoo.worlds.pictures import scene as scenes
from capmoe_zoo.worlds.pictures.drawing import picture

if TYPE_CHECKING:
    from PIL import Image

# Shape suffixes: B rows, S positions, N pictures, P patches,
# C channels, H height or size of a feature, W width.

#: Upper bound on the number of tokens, without that of a picture.
MAX_VOCABULARY = 1024
#: The pieces of a question, and the word that is learned at the end of each, if any: its answer at
#: the end of the question, and yes or no at the end of an answer that it proposes. So a comparison
#: is learned where it is made, and not from the one word after the whole prompt.
Pieces = list[tuple[str, str | None]]
_ANSWER = ("\nAnswer:", None)


#: The stages, and the weights of the kinds of questions; ``pictures.yaml`` has what they say.
_TRAINING = read_data(__package__, "pictures.yaml", dict[str, Any])
# Questions drawn for a row; as many are taken as it has space for.
_DRAWN = 14
_TOKENIZED = 500  # pictures of each stage whose questions the tokenizer is trained on


def picture_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer of the picture world: its words are tokens, and any text is encoded.

    So are the letters before options and ``Answer:``, with their line breaks: text is a small part
    of a query, as in the paper. The last token is that of a part of a picture.
    """
    draw = Draw("pictures-tokenizer")
    texts = [
        "".join(piece for piece, _ in pieces) + f" {answer}"
        for stage in _TRAINING["stages"][1:]
        for _ in range(_TOKENIZED)
        for pieces, answer in islice(_questions(scenes.scene(draw), stage, draw), _DRAWN)
    ]
    tokenizer = wrapped(train_bpe(texts, MAX_VOCABULARY, rarest=4))
    tokenizer.add_tokens([*(f"\n{letter}." for letter in scenes.LETTERS), _ANSWER[0]])
    tokenizer.add_tokens(IMAGE_TOKEN, special_tokens=True)
    return tokenizer


def _asked(fact: scenes.PictureFact, form: int, draw: Draw) -> tuple[Pieces, str]:
    """Return the pieces of a question after the picture, and its answer."""
    # More than one thing is in the picture: there the question alone has no one answer.
    opening = (f"\n{fact.ask}", None if fact.kind == "existence" else fact.value)
    if form == 0:
        return [opening, _ANSWER], fact.value
    if form == 1:
        true = draw.chance(0.5)
        guess, answer = f" Is it {scenes.supposed(fact, draw, true=true)}", "yes" if true else "no"
        return [opening, (guess, answer), ("?", None), _ANSWER], answer
    options, right = scenes.four_options(fact, draw)
    lines = [
        (f"\n{letter}. {option}", "yes" if letter == right else "no")
        for letter, option in zip(scenes.LETTERS, options, strict=True)
    ]
    return [opening, *lines, _ANSWER], right


def pixels(image: Image.Image) -> Tensor:
    """Return the normalised pixels [3, 96, 96] of a picture, as the processor does."""
    values = np.asarray(image, dtype=np.float32).transpose(2, 0, 1)
    return torch.from_numpy((values / 255 - MEAN) / SPREAD)


def picture_batch(tokenizer: PreTrainedTokenizerFast, seed: int, steps: int, step: int) -> Batch:
    """Return the batch of a step of so many; no seed is that of an evaluation set."""
    stage = stage_of(_TRAINING["stages"], step, steps)
    draw = Draw(f"pictures-{seed}-{step}")

    def token_of(word: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(f"Ġ{word}"))

    n_rows, width = stage["shape"]
    images, patches, asked = [], [], []
    for _ in range(n_rows):
        picture_scene = scenes.scene(draw)
        images.append(pixels(picture(picture_scene, draw)))
        patches.append(scenes.named_patches(picture_scene, draw) if stage["named"] else {})
        asked.append(list(islice(_questions(picture_scene, stage, draw), _DRAWN)))
    # All at once: a call of the tokenizer takes longer than its work.
    texts = [
        text
        for questions in asked
        for pieces, answer in questions
        for text in (*(piece for piece, _ in pieces), f" {answer}{END_OF_TEXT}")
    ]
    encoded = iter(tokenizer(texts)["input_ids"])
    input_ids_BS = torch.full((n_rows, width), int(tokenizer.pad_token_id))
    input_ids_BS[:, :IMAGE_TOKENS] = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    position_ids_BS = torch.arange(width).repeat(n_rows, 1)
    labels_BS = torch.full((n_rows, width), IGNORED)
    middle_BS = torch.full((n_rows, width), IGNORED)
    # Number of the question of a position: 0 for the picture, negative for an empty position.
    question_BS = torch.full((n_rows, width), -1)
    question_BS[:, :IMAGE_TOKENS] = 0
    for row in range(n_rows):
        for (down, right), word in patches[row].items():
            middle_BS[row, PATCHES * down + right] = token_of(word)
        start = IMAGE_TOKENS
        for number, (pieces, _) in enumerate(asked[row], start=1):
            tokens = list(islice(encoded, len(pieces) + 1))
            end = start + sum(map(len, tokens))
            if end > width:
                continue  # a shorter one may fit
            input_ids_BS[row, start:end] = torch.tensor(
                [token for piece_tokens in tokens for token in piece_tokens]
            )
            position_ids_BS[row, start:end] = IMAGE_TOKENS + torch.arange(end - start)
            question_BS[row, start:end] = number
            for (_, learned), piece_tokens in zip(pieces, tokens, strict=False):
                start += len(piece_tokens)
                if learned is not None:
                    labels_BS[row, start] = token_of(learned)
            labels_BS[row, start:end] = torch.tensor(tokens[-1])
            start = end
    return Batch(
        input_ids_BS,
        position_ids_BS,
        labels_BS,
        middle_BS,
        attended_B1SS=attended(question_BS),
        pixels_BCHW=torch.stack(images),
    )


def _questions(
    picture_scene: scenes.Scene, stage: Mapping[str, Any], draw: Draw
) -> Iterator[tuple[Pieces, str]]:
    """Yield the pieces of questions after the picture, and their answers, without end."""
    scene_facts = list(scenes.facts(picture_scene))
    kinds = sorted({fact.kind for fact in scene_facts})
    weights = [_TRAINING["weights"][kind] for kind in kinds]
    while True:
        if draw.chance(stage["cells"]):
            question, answer = scenes.content(picture_scene, draw)
            yield [(f"\n{question}", None), _ANSWER], answer
        else:
            kind = draw.one_of(kinds, weights)
            fact = draw.one([fact for fact in scene_facts if fact.kind == kind])
            yield _asked(fact, draw.one_of(range(3), stage["forms"]), draw)
