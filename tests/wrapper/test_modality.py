"""Which modality is dropped first, on every kind of model with images."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, PreTrainedModel

from capmoe_eval.wrapper.observers.loads import Modalities
from capmoe_eval.wrapper.plan import BANDS, find_images, image_bands
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper import images
from tests.wrapper.models import called


@torch.no_grad()
def logits(model: PreTrainedModel, inputs: images.Inputs) -> torch.Tensor:
    return model(**inputs).logits  # type: ignore[no-any-return]


def routed(
    model: PreTrainedModel, inputs: images.Inputs, method: str = "score", **knobs: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the logits under a method, and the meter's report."""
    with capacity_aware(model, method, **{"gamma": 0.5, "verify": False, **knobs}) as meter:
        return logits(model, inputs), meter.report()


@pytest.mark.numeric
@pytest.mark.parametrize("family", images.FAMILIES)
def test_a_model_with_images_knows_the_modality_of_each_token(family: str) -> None:
    model, inputs = images.make(family), images.batch(family)
    stock = logits(model, inputs)
    blank = {**inputs, "pixel_values": torch.zeros_like(inputs["pixel_values"])}
    assert not torch.equal(stock, logits(model, blank)), "it does not look at the images"
    n_images, real = 3 * images.N_IMAGE, int(inputs["attention_mask"].sum())
    rates = {}
    for modality in ("uniform", "image_first", "text_first"):
        changed, report = routed(model, inputs, modality=modality, verify=True)
        assert not torch.equal(changed, stock)
        for layer in report["layers"]:
            by = layer["modalities"]
            assert by["image"]["tokens"] == n_images
            assert by["text"]["tokens"] == real - n_images == layer["tokens"] - n_images
            for name in ("load_before", "load_after"):
                apart = [sum(pair) for pair in zip(*(by[m][name] for m in by), strict=True)]
                assert apart == layer[name]
            for count in ("dropped", "added", "lost_all"):
                assert by["image"][count] + by["text"][count] == layer[count]
        proofs = report["proofs"]
        assert all(proof["passed"] for name, proof in proofs.items() if name != "modality_order")
        assert proofs["modality_order"]["passed"] is (None if modality == "uniform" else True)
        rates[modality] = {m: report["summary"]["modalities"][m]["drop_rate"] for m in by}
    image = [rates[m]["image"] for m in ("image_first", "uniform", "text_first")]
    text = [rates[m]["text"] for m in ("image_first", "uniform", "text_first")]
    assert image == sorted(image, reverse=True)
    assert image[0] > image[2]
    assert text == sorted(text)
    assert text[0] < text[2]
    for gamma in (float("inf"), 100.0):  # 100: the whole decision is made
        assert torch.equal(routed(model, inputs, gamma=gamma, modality="image_first")[0], stock)
    assert torch.equal(logits(model, inputs), stock)


@pytest.mark.parametrize("method", ["score", "expanded_drop"])
def test_the_meter_counts_as_a_loop_over_pairs_does(method: str) -> None:
    model, inputs = images.make("llava"), images.batch("llava", (1, 2, 1, 0))
    knobs = {"ep_size": 2, "modality": "image_first", "verify": False}
    with capacity_aware(model, "baseline"), called(model) as stock_calls:
        logits(model, inputs)
    with capacity_aware(model, method, 0.5, **knobs) as meter, called(model) as calls:
        logits(model, inputs)
    chosen, computed = ([index for index, _ in of] for of in (stock_calls, calls))
    width, report = inputs["input_ids"].shape[1], meter.report()["layers"]
    tokens = inputs["input_ids"].flatten().tolist()
    real = inputs["attention_mask"].flatten().tolist()
    # The first layer's choice is the stock model's; what comes after differs.
    for when, index_NS in (("before", chosen[0]), ("after", computed[0])):
        load = {"text": [0] * 8, "image": [0] * 8}
        for row, slots in enumerate(index_NS.tolist()):
            for expert in slots:
                if real[row] and expert < 8:
                    load["image" if tokens[row] == images.IMAGE else "text"][expert] += 1
        for name, by in report[0]["modalities"].items():
            assert by[f"load_{when}"] == load[name]
            peak = max(load[name]) * 8 / (by["tokens"] * report[0]["top_k"])
            assert by["peak"][when]["max"] == pytest.approx(peak, abs=1e-6)
    lost = [0] * 8
    for row in range(len(tokens)):
        if tokens[row] == images.IMAGE:
            place = next(n for n in range(row, -1, -1) if tokens[n] == images.START)
            lost[(row - place - 1) * 8 // images.N_IMAGE] += (chosen[0][row] < 8).sum().item() - (
                computed[0][row, : report[0]["top_k"]] < 8
            ).sum().item()
    bands = report[0]["modalities"]["image"]["bands"]
    assert bands["dropped"] == lost
    assert bands["tokens"] == [4, 0] * 4
    # Two ranks of two sequences: spared and protected buckets, one by one.
    spared = lost = 0
    for rank, expert in itertools.product(range(2), range(8)):
        rows = [row for row in range(2 * width * rank, 2 * width * (rank + 1)) if real[row]]
        kept = {row for row in rows if expert in computed[0][row].tolist()}
        original = {row for row in rows if expert in chosen[0][row].tolist()}
        image = {row for row in rows if tokens[row] == images.IMAGE}
        spared += bool(original & image - kept) and bool(kept - image)
        lost += bool(original - image - kept)
        assert not (original - image - kept and kept & image)
    expected = {"wrong_modality": 0, "spared": spared, "protected_lost": lost}
    (modalities,) = (of for of in meter.observers if isinstance(of, Modalities))
    assert {name: modalities.sums[0].count(name) for name in expected} == expected
    assert spared
    assert lost


class Writes(LogitsProcessor):
    """Makes every generated token the placeholder of an image."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor(self.token), 0.0)


@pytest.mark.parametrize(
    ("family", "cache", "decode", "written"),
    [
        *((family, {}, "constrained", images.IMAGE) for family in images.FAMILIES),
        ("llava", {"use_cache": False}, "unconstrained", None),
        ("llava", {"cache_implementation": "static"}, "unconstrained", None),
        ("qwen3_vl_moe", {"cache_implementation": "static"}, "constrained", images.VIDEO),
    ],
)
def test_a_generation_has_its_images_in_the_prompt(
    family: str, cache: dict[str, Any], decode: str, written: int | None
) -> None:
    """What is generated is text, also a placeholder of an image."""
    model, inputs = images.make(family), images.batch(family)
    knobs = {"modality": "image_first", "decode": decode, "verify": False}
    processors = [] if written is None else [Writes(written)]
    length = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    with capacity_aware(model, "score", 0.5, **knobs) as meter:
        model.generate(**inputs, logits_processor=processors, **length, **cache)
    modalities = meter.summary()["modalities"]
    steps = 2 * len(inputs["input_ids"]) if decode == "constrained" else 0
    assert meter.decode_forwards == 2
    assert modalities["image"]["tokens"] == 3 * images.N_IMAGE
    text = int(inputs["attention_mask"].sum()) - 3 * images.N_IMAGE
    assert modalities["text"]["tokens"] == text + steps
    assert modalities["image"]["drop_rate"] > modalities["text"]["drop_rate"]
    assert meter.proofs()["modality_order"]["passed"]


TEXT, PIECE, ROW_END = range(3)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=9, max_size=9), min_size=1, max_size=4))
def test_a_band_is_a_place_in_a_run_of_image_tokens(kinds: list[list[int]]) -> None:
    tokens = torch.tensor(kinds)
    plain = image_bands(tokens == PIECE).tolist()
    in_rows = image_bands(tokens == PIECE, tokens == ROW_END).tolist()
    for parts, bands in (({PIECE}, plain), ({PIECE, ROW_END}, in_rows)):
        for row, results in zip(kinds, bands, strict=True):
            inside = [kind in parts for kind in row]
            for is_image, run in itertools.groupby(range(9), key=inside.__getitem__):
                places = [place for place in run if row[place] == PIECE]
                if is_image:
                    expected = [n * BANDS // len(places) for n in range(len(places))]
                    assert [results[place] for place in places] == expected


PLACEHOLDER = {"image_token_id": images.IMAGE}
IDS = [1, images.IMAGE, images.IMAGE, 2]


@pytest.mark.parametrize(
    ("fields", "more", "expected"),
    [
        (PLACEHOLDER, {}, [0, 1, 1, 0]),
        ({"video_token_id": 1, "image_token_index": 2}, {}, [1, 0, 0, 1]),
        (PLACEHOLDER, {"types": [1, 0, 0, 2]}, [1, 0, 0, 1]),  # they go before ids
        # a step may be called with the types of the whole prompt: ids say what its tokens are
        (PLACEHOLDER, {"types": [1, 1, 1, 1, 0]}, [0, 1, 1, 0]),
        # nothing behind the prompt is an image, whatever its id
        (PLACEHOLDER, {"prompt_length": 2}, [0, 1, 0, 0]),
    ],
)
def test_image_tokens_are_found(
    fields: dict[str, int], more: dict[str, Any], expected: list[int]
) -> None:
    ids, more = torch.tensor([IDS]), dict(more)
    types = torch.tensor([more.pop("types")]) if "types" in more else None
    call = {"input_ids": ids, "mm_token_type_ids": types}
    image_BS = find_images(SimpleNamespace(**fields), call, ids, **more)
    assert image_BS is not None
    assert image_BS.long().tolist() == [expected]
