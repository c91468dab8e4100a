"""The port against what the remote code computed (``remote_code.py``), on random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import remote_code
import torch
from capmoe_eval.evaluation.lm import CapmoeMultimodalLM
from capmoe_eval.evaluation.loading import load_lm
from capmoe_eval.experiment.cell import ModelId
from capmoe_eval.wrapper.checkpoint import load_checkpoint, load_processor
from capmoe_eval.wrapper.session import capacity_aware
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.evaluation.test_image_lm import requests
from tests.rounding import tolerance
from tests.wrapper.test_modality import Writes
from torch import Tensor
from transformers import AutoModelForImageTextToText

pytestmark = pytest.mark.numeric

PROMPTS = {"alone": slice(1, 2), "batch": slice(0, 3)}
REMOTE = Path(__file__).with_name("remote.safetensors")
"""What the remote code computed, and the names and shapes of its tensors."""


@pytest.fixture(scope="module", autouse=True)
def _gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small MolmoE as the hub has it: its files, its names of tensors, random weights."""
    path = tmp_path_factory.mktemp("molmoe")
    shutil.copytree(remote_code.HUB, path, dirs_exist_ok=True)
    with safe_open(REMOTE, "pt") as file:
        names = json.loads(file.metadata()["names"])
    weights = {name: remote_code.weight(name, tuple(shape)) for name, shape in names.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return load_checkpoint(directory, kind=AutoModelForImageTextToText)


@pytest.fixture(scope="module")
def eager(directory: Path) -> Any:
    """The model with experts whose rounding can be followed."""
    loaded = load_checkpoint(directory, kind=AutoModelForImageTextToText)
    loaded.set_experts_implementation("eager")
    return loaded


def assert_close(logits: Tensor, expected: Tensor, allowed: Tensor) -> None:
    """Compare logits token by token; in none may rounding explain a percent of the largest logit.

    Measured: the tolerance is 7e-5 for half of the tokens and up to 4e-4, the deviation at most a
    tenth of it on four instruction sets.
    """
    assert allowed.max() < 0.01 * expected.abs().max()
    assert ((logits - expected).abs() <= allowed).all()


@pytest.fixture(scope="module")
def processor(directory: Path) -> Any:
    loaded = load_processor("pretrained", str(directory), "main")
    loaded.tokenizer.padding_side = "left"
    return loaded


def asked(processor: Any, which: str) -> dict[str, Tensor]:
    numbers = range(3)[PROMPTS[which]]
    images = [[Image.fromarray(remote_code.picture(number))] for number in numbers]
    texts = [f"{processor.image_token}\n{remote_code.PROMPTS[number]}" for number in numbers]
    return dict(processor(images=images, text=texts, padding="longest", return_tensors="pt"))


def of_remote(which: str) -> dict[str, Tensor]:
    kept = load_file(REMOTE)
    start = f"{which}."
    return {name[len(start) :]: kept[name] for name in kept if name.startswith(start)}


def test_text_has_the_remote_logits(model: Any, eager: Any) -> None:
    remote = of_remote("text")
    assert (remote["input_ids"] >= remote_code.CONFIG["embedding_size"]).any()
    logits = model(input_ids=remote["input_ids"]).logits
    allowed = tolerance(lambda: eager(input_ids=remote["input_ids"]).logits)
    assert_close(logits, remote["logits"], allowed)


@pytest.mark.parametrize("which", PROMPTS)
def test_the_processor_gives_the_remote_inputs(processor: Any, which: str) -> None:
    inputs, remote = asked(processor, which), of_remote(which)
    for name in ("input_ids", "attention_mask", "image_input_idx"):
        assert torch.equal(inputs[name], remote[name].long()), name
    crops = (remote["image_input_idx"] >= 0).any(dim=-1)
    masks = (4 * inputs["image_masks"]).to(torch.int8)
    assert torch.equal(masks[crops], remote["image_masks"][crops])
    sums = inputs["pixel_values"].double().sum(dim=-1).half()
    torch.testing.assert_close(sums[crops], remote["patches"][crops], atol=0.02, rtol=1e-3)


@pytest.mark.parametrize("which", ["alone", pytest.param("batch", marks=pytest.mark.slow)])
def test_images_and_text_and_a_continuation_have_the_remote_logits(
    model: Any, eager: Any, processor: Any, which: str
) -> None:
    inputs, remote = asked(processor, which), of_remote(which)
    logits = model(**inputs).logits[:, :: remote_code.EVERY]
    real = inputs["attention_mask"][:, :: remote_code.EVERY].bool()
    allowed = tolerance(lambda: eager(**inputs).logits[:, :: remote_code.EVERY])
    assert_close(logits[real], remote["logits"][real], allowed[real])
    # It could fail: other pixels, and other marks of padding, give other logits.
    for name, other in (("pixel_values", 0.0), ("image_masks", 1.0)):
        changed = {**inputs, name: torch.full_like(inputs[name], other)}
        off = model(**changed).logits[:, :: remote_code.EVERY] - remote["logits"]
        assert off[real].abs().max() > 0.01, name
    assert remote["continued"].std(dim=1).max() > 0.1  # the steps differ
    allowed = tolerance(lambda: remote_code.continued(eager, inputs))
    assert_close(remote_code.continued(model, inputs), remote["continued"], allowed)


def test_in_bfloat16_a_pixel_that_becomes_minus_one_blanks_nothing(
    directory: Path, model: Any, processor: Any
) -> None:
    inputs = asked(processor, "alone")
    low = load_checkpoint(directory, kind=AutoModelForImageTextToText, dtype=torch.bfloat16)
    pixels = inputs["pixel_values"].bfloat16()
    assert (pixels == -1).flatten(2).any(dim=-1).all(), "no crop has one"
    logits = low(**{**inputs, "pixel_values": pixels}).logits.float()
    exact = model(**inputs).logits
    assert (logits - exact).abs().mean() < 0.1 * exact.abs().mean()


def test_under_a_capacity(model: Any, processor: Any) -> None:
    inputs = asked(processor, "batch")
    stock = model(**inputs).logits
    n_tokens = int((inputs["input_ids"] == model.config.image_token_id).sum())
    with capacity_aware(model, "score", float("inf")) as meter:
        assert torch.equal(model(**inputs).logits, stock)
        assert len(meter.layers) == remote_code.CONFIG["n_layers"]
    # Each of the two pictures of an image has eight bands, whatever its rows.
    bands = [0] * 8
    for row in inputs["input_ids"].tolist():
        for picture in " ".join(map(str, row)).split("41 40")[:2]:  # between an end and a start
            length = picture.split().count("42")
            for place in range(length):
                bands[place * 8 // length] += 1
    dropped = {}
    for modality in ("image_first", "text_first"):
        with capacity_aware(model, "score", 0.5, modality=modality) as meter:
            assert not torch.equal(model(**inputs).logits, stock)
            report = meter.report()
        assert all(proof["passed"] for proof in report["proofs"].values())
        dropped[modality] = report["summary"]["modalities"]["text"]["drop_rate"]
        for layer in report["layers"]:
            image = layer["modalities"]["image"]
            assert image["tokens"] == n_tokens
            assert image["bands"]["tokens"] == bands
    assert dropped["image_first"] < dropped["text_first"]
    assert torch.equal(model(**inputs).logits, stock)


def test_a_misplaced_image_is_refused(model: Any, processor: Any) -> None:
    inputs = asked(processor, "alone")
    inputs["image_input_idx"] = inputs["image_input_idx"] + 1
    with pytest.raises(ValueError, match="image_input_idx: the tokens of the images are not at"):
        model(**inputs)


def test_a_checkpoint_that_is_saved_from_here_is_loaded_again(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    again = load_checkpoint(tmp_path, kind=AutoModelForImageTextToText).state_dict()
    assert again.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}])
def test_it_generates_and_what_it_generates_is_text(
    directory: Path, processor: Any, cache: dict[str, str]
) -> None:
    lm = load_lm(ModelId("molmoe", str(directory), dtype="float32"), "cpu", 2)
    assert isinstance(lm, CapmoeMultimodalLM)
    assert len(lm.generate_until(requests()[:2])) == 2
    lm.release()
    inputs = asked(processor, "batch")
    writes = [Writes(lm.model.config.image_token_id)]
    length = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    knobs = {"modality": "image_first", "decode": "constrained"}
    with capacity_aware(lm.model, "score", 0.5, **knobs) as meter:
        lm.model.generate(**inputs, logits_processor=writes, **length, **cache)
    modalities = meter.summary()["modalities"]
    n_image = int((inputs["input_ids"] == lm.model.config.image_token_id).sum())
    n_text = int(inputs["attention_mask"].sum()) - n_image + 2 * len(inputs["input_ids"])
    assert [modalities[name]["tokens"] for name in ("image", "text")] == [n_image, n_text]
    assert all(proof["passed"] for proof in meter.proofs().values())
