"""Make the prompts and pictures of MME, MMBench, SEED-Bench and easy-VQA.

The paper's prompts are not stated. These are the questions as the data sets have them, options as
``A. text`` on a line each, and ``Answer:``; the tasks' YAML files call them ``metadata.prompt``.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
from PIL import Image

from capmoe_eval.evaluation.multimodal.scores import options
from capmoe_eval.zoo.llava import IMAGE_TOKEN


def prompt(question: str, answers: Sequence[str] = ()) -> str:
    """Return the prompt of a question and the answers to choose from; an answer follows."""
    lines = [f"{letter}. {option}" for letter, option in zip("ABCD", answers, strict=False)]
    return "\n".join([IMAGE_TOKEN, question, *lines, "Answer:"])


def mme_prompt(doc: Mapping[str, Any]) -> str:
    """Return the prompt of a question of MME, which says itself how to answer."""
    return prompt(doc["question"])


def mmbench_prompt(doc: Mapping[str, Any]) -> str:
    """Return the prompt of a question of MMBench, after its hint if it has one."""
    hint = "" if doc["hint"] in (None, "nan") else f"{doc['hint']}\n"
    return prompt(f"{hint}{doc['question']}", list(options(doc, "ABCD").values()))


def seedbench_prompt(doc: Mapping[str, Any]) -> str:
    """Return the prompt of a question of SEED-Bench."""
    return prompt(doc["question"], [doc[f"choice_{letter}"] for letter in "abcd"])


def easy_vqa_prompt(doc: Mapping[str, Any]) -> str:
    """Return the prompt of a question of easy-VQA."""
    return prompt(doc["question"])


def of_pictures(documents: datasets.Dataset) -> datasets.Dataset:
    """Return the documents of SEED-Bench that are about pictures; the others are about videos."""
    kinds = documents["data_type"]
    return undecoded(documents.select([row for row, kind in enumerate(kinds) if kind == "image"]))


def undecoded(documents: datasets.Dataset) -> datasets.Dataset:
    """Return documents with the files of their pictures in the place of the pictures.

    lm-eval hashes a document's text, and that of a decoded picture is its place in memory.
    """
    stored = datasets.Image(decode=False)
    is_list = not isinstance(documents.features["image"], datasets.Image)
    return documents.cast_column("image", [stored] if is_list else stored)


def one_picture(doc: Mapping[str, Any]) -> list[Image.Image]:
    """Return the picture of a document of MME, MMBench or easy-VQA."""
    return [_decoded(doc["image"])]


def pictures(doc: Mapping[str, Any]) -> list[Image.Image]:
    """Return the pictures of a document of SEED-Bench."""
    return [_decoded(stored) for stored in doc["image"]]


def _decoded(stored: Mapping[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(stored["bytes"])).convert("RGB")
