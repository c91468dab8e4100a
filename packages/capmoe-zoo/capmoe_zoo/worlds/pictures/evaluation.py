"""Build the evaluation sets of the picture world: MME, MMBench and SEED-Bench in small.

They have the layout, columns and categories of ``lmms-lab/MME``, ``lmms-lab/MMBench`` (en, dev) and
the pictures of ``lmms-lab/SEED-Bench``, so that one task reads either. The ``dev`` sets were used
to choose the training; the ``test`` sets were used for no decision. No picture of either is drawn
with a seed of the training.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from capmoe_eval.evaluation.multimodal.scores import ROTATION
from capmoe_eval.experiment.files import read_data
from capmoe_eval.zoo.sets import Configs, Row

from capmoe_zoo.worlds.draw import Draw
from capmoe_zoo.worlds.pictures import scene as scenes
from capmoe_zoo.worlds.pictures.drawing import drawn

#: Questions of a capability of MMBench, each asked in four rotations.
MMBENCH_QUESTIONS = 80
#: Questions of a dimension of SEED-Bench.
SEEDBENCH_QUESTIONS = 90


#: What each set asks; the comments of ``sets.yaml`` say how.
SETS = read_data(__package__, "sets.yaml", dict[str, Any])


@functools.cache
def documents(split: str = "test") -> Mapping[str, Configs]:
    """Return the sets of ``dev`` or ``test``: data set → configuration → split → rows.

    In the place of an image is what was drawn.
    """
    return {
        "lmms-lab/MME": {"default": {"test": list(_mme(split))}},
        "lmms-lab/MMBench": {"en": {"dev": list(_mmbench(split))}},
        "lmms-lab/SEED-Bench": {"default": {"test": list(_seedbench(split))}},
    }


def asked(kind: str, draw: Draw) -> tuple[scenes.Scene, scenes.PictureFact]:
    """Return a random scene that answers a kind of question, and its answer."""
    while True:
        picture_scene = scenes.scene(draw)
        candidates = [fact for fact in scenes.facts(picture_scene) if fact.kind == kind]
        if candidates:
            return picture_scene, draw.one(candidates)


def _mme(split: str) -> Iterator[Row]:
    draw = Draw(f"pictures-{split}-mme")
    for category, (kind, count) in SETS["mme"].items():
        for number in range(count):
            picture_scene, fact = asked(kind, draw)
            image = drawn(picture_scene, draw)
            for true in (True, False):
                yield {
                    "question_id": f"{category}/{number:04}.bmp",
                    "image": image,
                    "question": f"{fact.ask} Is it {scenes.supposed(fact, draw, true=true)}?",
                    "answer": "Yes" if true else "No",
                    "category": category,
                }


def _mmbench(split: str) -> Iterator[Row]:
    draw = Draw(f"pictures-{split}-mmbench")
    index = itertools.count()
    for capability, categories in SETS["mmbench"].items():
        # Categories and kinds in turn, so that each is asked for about equally often.
        turns = [
            (category, kinds[turn % len(kinds)])
            for turn in range(max(map(len, categories.values())))
            for category, kinds in categories.items()
        ]
        for category, kind in itertools.islice(itertools.cycle(turns), MMBENCH_QUESTIONS):
            picture_scene, fact = asked(kind, draw)
            image = drawn(picture_scene, draw)
            (first, _), number = scenes.four_options(fact, draw), next(index)
            for turn in range(len(scenes.LETTERS)):
                # The options are moved on by a number of places, the last to the first.
                options = first[-turn:] + first[:-turn]
                yield {
                    "index": number + turn * ROTATION,
                    "question": fact.ask,
                    "hint": "nan",
                    "answer": scenes.LETTERS[options.index(fact.value)],
                    **dict(zip(scenes.LETTERS, options, strict=True)),
                    "category": category,
                    "image": image,
                    "source": "picture world",
                    "L2-category": capability,
                    "comment": "nan",
                    "split": "dev",
                }


def _seedbench(split: str) -> Iterator[Row]:
    draw = Draw(f"pictures-{split}-seedbench")
    for dimension, kinds in enumerate(SETS["seedbench"], start=1):
        turns = itertools.islice(itertools.cycle(kinds), SEEDBENCH_QUESTIONS)
        for number, kind in enumerate(turns):
            picture_scene, fact = asked(kind, draw)
            options, answer = scenes.four_options(fact, draw)
            name = f"{dimension}_{number}"
            columns = [f"choice_{letter.lower()}" for letter in scenes.LETTERS]
            yield {
                "answer": answer,
                **dict(zip(columns, options, strict=True)),
                "data_id": [f"{name}.bmp"],
                "data_type": "image",
                "question": fact.ask,
                "question_id": name,
                "question_type_id": dimension,
                "image": [drawn(picture_scene, draw)],
                "segment": None,
            }
