"""Read easy-VQA, a real set of questions about drawn pictures, from its own package.

The package ``easy-vqa`` (Victor Zhou, MIT; https://github.com/vzhou842/easy-VQA) is an extra of the
suite. Its test split has 1,000 pictures of 64 × 64 pixels, each of one shape on a light ground. Its
9,673 questions ask for the shape, for its colour, or for yes or no.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from capmoe_eval.errors import UsageError
from capmoe_eval.zoo.hub import Configs, Row

DATASET: Final = "vzhou842/easy-VQA"
#: Kinds of questions.
SHAPE, COLOR, YES_NO = "shape", "color", "yes_no"
_KINDS: Final = {
    **dict.fromkeys(("circle", "rectangle", "triangle"), SHAPE),
    **dict.fromkeys(("yes", "no"), YES_NO),
}


def documents() -> Mapping[str, Configs]:
    """Return the test split: data set → configuration → split → rows."""
    return {DATASET: {"default": {"test": list(_rows())}}}


def _rows() -> Iterator[Row]:
    try:
        import easy_vqa
    except ModuleNotFoundError as error:
        raise UsageError(
            "data.root=easy_vqa: its package is not installed; pip install -e '.[easy-vqa]', or "
            "pip install easy-vqa"
        ) from error
    paths = easy_vqa.get_test_image_paths()
    pictures = {number: Path(path).read_bytes() for number, path in paths.items()}
    asked = zip(*easy_vqa.get_test_questions(), strict=True)
    for number, (question, answer, picture) in enumerate(asked):
        yield {
            "question_id": number,
            "image": {"bytes": pictures[picture], "path": None},
            "question": question,
            "answer": answer,
            "kind": _KINDS.get(answer, COLOR),
        }
