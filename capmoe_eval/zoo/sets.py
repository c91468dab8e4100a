"""Read the evaluation sets that come with the suite, and easy-VQA from its own package.

``sets/<world>-<split>.parquet`` has a row for each document: data set, configuration, split, and
the document's columns as JSON. The ``dev`` sets were used to choose worlds and training settings;
the ``test`` sets were used for no decision. ``python -m capmoe_zoo sets`` generates the files, and
an installed capmoe-zoo the mini-worlds of other seeds.

A picture is stored as it was drawn, before its noise, which does not compress: 0.6 MB instead of
50. It stands in the first of the rows that show it.

The package ``easy-vqa`` (Victor Zhou, MIT; https://github.com/vzhou842/easy-VQA) is an extra of the
suite. Its test split has 1,000 pictures of 64 × 64 pixels, each of one shape on a light ground. Its
9,673 questions ask for the shape, for its colour, or for yes or no.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from capmoe_eval.beside import load_entry_points
from capmoe_eval.errors import UsageError, check_choice
from capmoe_eval.experiment.names import split_world
from capmoe_eval.lazy import np

Row = dict[str, Any]
#: Rows by split, and splits by configuration.
Splits = Mapping[str, Sequence[Row]]
Configs = Mapping[str, Splits]
#: Makes the documents of a split (``dev`` or ``test``) of a world of a seed.
Generator = Callable[[str, int], Mapping[str, Configs]]

SETS: Final = Path(__file__).with_name("sets")
#: The worlds that have a ``dev`` and a ``test`` split.
WORLDS: Final = {"miniworld": "mini-world", "pictures": "picture world"}
#: Entry points of generators, by the names of worlds.
GENERATORS: Final = "capmoe_eval.documents"
EASY_VQA: Final = "easy_vqa"
#: Pixels of a side of a picture, and the standard deviation of their noise.
PICTURE_SIDE, _NOISE = 96, 12.0


def documents(name: str, split: str = "test") -> Mapping[str, Configs]:
    """Return the documents of a source: data set → configuration → split → rows.

    ``name`` is a world, a mini-world of another seed (``miniworld_w8``), or ``easy_vqa``.

    Raises:
        UsageError: If the split is unknown, or a package that has the documents is not installed.
    """
    if name == EASY_VQA:
        return {"vzhou842/easy-VQA": {"default": {"test": list(_easy_vqa_rows())}}}
    check_choice("split", split, ("dev", "test"))
    _, seed = split_world(name)
    return _read(SETS / f"{name}-{split}.parquet") if seed is None else generator(name)(split, seed)


def generator(name: str) -> Generator:
    """Return what makes the documents of a world of another seed; UsageError if nothing does."""
    generators: dict[str, Generator] = load_entry_points(GENERATORS)
    world, _ = split_world(name)
    if world not in generators:
        raise UsageError(
            f"data.root={name}: capmoe-zoo, which generates it, is not installed; in a checkout, "
            "pip install ./packages/capmoe-zoo, or make install"
        )
    return generators[world]


@functools.cache
def _read(file: Path) -> Mapping[str, Configs]:
    import pyarrow.parquet as pq

    sets: dict[str, dict[str, dict[str, list[Row]]]] = {}
    picture: Row = {}
    for stored in pq.read_table(file).to_pylist():
        row = json.loads(stored["row"])
        if "image" in row:
            if stored["pixels"] is not None:
                picture = _file(stored["pixels"], stored["noise"], stored["light"])
            row["image"] = picture if row["image"] is None else [picture]
        configs = sets.setdefault(stored["dataset"], {})
        configs.setdefault(stored["config"], {}).setdefault(stored["split"], []).append(row)
    return sets


def noisy_picture(pixels: bytes, noise: int, light: int) -> Any:
    """Return a drawn picture of RGB pixels [96, 96, 3] with its noise, as an image of Pillow.

    ``noise`` is the seed of the noise, and ``light`` is added to every pixel.
    """
    from PIL import Image

    drawn_HWC = np.frombuffer(pixels, np.uint8).reshape(PICTURE_SIDE, PICTURE_SIDE, 3)
    # The stream of RandomState is the same in every version of numpy.
    noise_HWC = np.random.RandomState(noise).standard_normal(drawn_HWC.shape)
    noisy_HWC = drawn_HWC + _NOISE * noise_HWC + light
    return Image.fromarray(noisy_HWC.clip(0, 255).astype(np.uint8))


def _file(pixels: bytes, noise: int, light: int) -> Row:
    """Return a picture as the hub's files hold it.

    As BMP: the bytes of a PNG depend on the build of zlib.
    """
    file = io.BytesIO()
    noisy_picture(pixels, noise, light).save(file, "BMP")
    return {"bytes": file.getvalue(), "path": None}


def _easy_vqa_rows() -> Iterator[Row]:
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
    kinds = dict.fromkeys(("circle", "rectangle", "triangle"), "shape")
    kinds |= dict.fromkeys(("yes", "no"), "yes_no")
    for number, (question, answer, picture) in enumerate(asked):
        yield {
            "question_id": number,
            "image": {"bytes": pictures[picture], "path": None},
            "question": question,
            "answer": answer,
            "kind": kinds.get(answer, "color"),
        }
