"""What is dropped of images and of text, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record, read_record
from capmoe_eval.paper.pairing import scores_by_unit
from capmoe_eval.report.figures import images
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from tests import records
from tests.report.figures.material import evidence

BASELINE = create_method("baseline")
PRIORITIES = ("uniform", "text_first", "image_first")


def found(
    method: Method,
    correct: Sequence[int] = (1, 1, 1, 0),
    *,
    text: float = 0.0,
    image: float = 0.0,
    peak: float = 2.0,
    bands: Sequence[Sequence[int]] = ((0,) * 8,),
) -> Record:
    """A record of MME with these shares of dropped pairs, and drops by eighths in each layer.

    Each eighth of an image has ten tokens, with two experts each.
    """
    layers = [records.layer(name=f"layers.{number}") for number in range(len(bands))]
    parts = {"layers": layers, "load": {"mean_peak_after": peak}}
    one = records.of_images(records.record_of(method, correct, task="mme", parts=parts))
    content = json.loads(json.dumps(one.content))
    told = content["capmoe"]["load"]["modalities"]
    told["text"]["drop_rate"], told["image"]["drop_rate"] = text, image
    for layer, dropped in zip(content["capmoe"]["layers"], bands, strict=True):
        layer["modalities"]["image"]["bands"] = {"tokens": [10] * 8, "dropped": list(dropped)}
    return Record(content, one.path)


def first(modality: str, gamma: float = 1.0) -> Method:
    return create_method("score", gamma, modality=modality)


def test_the_front_is_of_the_best_at_each_peak_and_images_count_once() -> None:
    numbers = images.measure_front(
        evidence(
            images=[found(BASELINE, [1, 1, 1, 1], peak=3.0)],
            images_priority=[
                found(first("uniform"), [1, 1, 0, 0], peak=1.0),
                found(first("text_first"), [1, 0, 0, 0], peak=1.0),
                found(first("image_first"), [1, 1, 1, 0], peak=1.0),
            ],
            images_drops=[found(first("image_first", 2.0), [1, 1, 0, 0], peak=2.0)],
        )
    ).numbers
    assert (numbers["questions"], numbers["images"]) == (4, 2)
    assert [line["modality"] for line in numbers["lines"]] == list(PRIORITIES)
    points = {
        (line["modality"], point["gamma"]): point
        for line in numbers["lines"]
        for point in line["points"]
    }
    assert [key for key, point in points.items() if point["on_front"]] == [("image_first", 1.0)]
    assert numbers["baseline"]["on_front"] and numbers["baseline"]["value"] == 100
    # Two images with shares of 1 and 0: a standard deviation of √½ and a standard error of ½.
    assert points["uniform", 1.0]["value"] == 50
    assert points["uniform", 1.0]["stderr"] == pytest.approx(50)
    assert points["image_first", 1.0]["stderr"] == pytest.approx(25)


def test_shares_are_by_modality_in_the_order_of_gamma() -> None:
    numbers = images.measure_shares(
        evidence(
            images=[],
            images_priority=[found(first("text_first"), text=0.5, image=0.25)],
            images_drops=[
                found(first("text_first", 2.0), text=0.125),
                found(first("text_first", 0.5), text=0.75, image=0.5),
            ],
        )
    ).numbers
    (line,) = numbers["lines"]
    assert numbers["baseline"] is None and line["label"] == "text first"
    assert [point["gamma"] for point in line["points"]] == [0.5, 1.0, 2.0]
    assert [point["dropped"]["text"] for point in line["points"]] == [0.75, 0.5, 0.125]
    assert [point["dropped"]["image"] for point in line["points"]] == [0.5, 0.25, 0.0]
    images.draw_shares(numbers)


def test_positions_are_shares_of_pairs_over_all_layers() -> None:
    late = [[0, 0, 0, 0, 0, 0, 0, 20], [0, 0, 0, 0, 0, 0, 10, 20]]
    early = [bands[::-1] for bands in late]
    numbers = images.measure_positions(
        evidence(
            images_order=[
                found(create_method("order", 1.0), bands=late),
                found(create_method("reverse_order", 1.0), bands=early),
            ],
            images_priority=[found(first("image_first"), bands=early)],
        )
    ).numbers
    order, reverse = numbers["methods"]
    assert order["dropped"] == [0, 0, 0, 0, 0, 0, 0.25, 1]
    assert reverse["dropped"] == order["dropped"][::-1]
    assert [line["label"] for line in numbers["priorities"]] == ["images first"]
    assert numbers["gamma"] == 1.0


def test_a_record_that_tells_no_modalities_is_named() -> None:
    blind = records.record_of(first("uniform"), task="mme")
    with pytest.raises(UsageError, match="tells no modalities; run it again"):
        images.measure_front(evidence(images_priority=[blind]))
    with pytest.raises(UsageError, match="tells no modalities; run it again"):
        images.measure_positions(evidence(images_order=[blind], images_priority=[]))


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=2, max_size=6))
def test_units_are_images_and_keep_the_mean(images: list[list[int]]) -> None:
    scores = [float(one) for image in images for one in image]
    numbers = [number for number, image in enumerate(images) for _ in image]
    units = scores_by_unit({"t": ("hash", np.array(scores), np.array([]), np.array(numbers))})
    factor = len(images) / len(scores)
    assert units.tolist() == pytest.approx([sum(image) * factor for image in images])
    assert units.mean() == pytest.approx(np.mean(scores))
    without = {"t": ("hash", np.array(scores), np.array([]), np.array([]))}
    assert scores_by_unit(without).tolist() == scores
    assert math.isfinite(units.std(ddof=1))


def test_a_committed_record_has_all_that_is_drawn() -> None:
    """Of the embedded model, Table 4's record: what is dropped first loses the larger share."""
    folder = Path("results/zoo/zoo_llava_olmoe/mme")
    shares = {}
    for name in ("text_first", "image_first"):
        (path,) = folder.glob(f"score-g1-ep8-{name}-*.json")
        record = read_record(path)
        (line,) = images.measure_shares(evidence(images_priority=[record])).numbers["lines"]
        shares[name] = line["points"][0]["dropped"]
        (places,) = images.measure_positions(
            evidence(images_order=[], images_priority=[record])
        ).numbers["priorities"]
        # The eighths are of one size, so their mean is the image's share.
        assert np.mean(places["dropped"]) == pytest.approx(shares[name]["image"], abs=1e-6)
    assert shares["text_first"]["text"] > shares["image_first"]["text"]
    assert shares["text_first"]["image"] < shares["image_first"]["image"]
