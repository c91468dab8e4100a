"""``capmoe-multimodal`` against lm-eval's own ``hf-multimodal``, and what its batches tell."""

from __future__ import annotations

from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models import hf_vlms, huggingface
from lm_eval.models.hf_vlms import HFMultimodalLM
from PIL import Image

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.image_lm import CapmoeMultimodalLM
from capmoe_eval.evaluation.loading import Placement, load_lm
from capmoe_eval.evaluation.provenance import reader_hash
from capmoe_eval.experiment.cell import ModelId
from capmoe_eval.routing.method import Method
from capmoe_eval.zoo.pictures.model import IMAGE_TOKENS
from capmoe_eval.zoo.synthetic.models import TINY_LLAVA, tiny_llava
from capmoe_eval.zoo.synthetic.tokenizer import tiny_processor

LLAVA = ModelId("tiny_llava", f"tiny:{TINY_LLAVA}", dtype="float32")
COLOURS = ["red", "green", "blue", "white", "black"]
QUESTIONS = [
    "<image> Is it red? Answer:",
    "<image> Is the whole of the picture green, and not only a part of it? Answer:",
    "Look: <image> Blue? Answer:",
    "<image> White, or black? Answer:",
    "<image> Answer:",
]
SETTINGS = {"until": ["\n\n"], "max_gen_toks": 4, "do_sample": False}


def requests() -> list[Instance]:
    pictures = [Image.new("RGB", (40 + 8 * n, 64), colour) for n, colour in enumerate(COLOURS)]
    return [
        Instance(
            "generate_until", {}, (text, SETTINGS, {"visual": [picture]}), 0, ("pictures", n, 1)
        )
        for n, (text, picture) in enumerate(zip(QUESTIONS, pictures, strict=True))
    ]


def build(batch_size: int = 3, **knobs: Any) -> CapmoeMultimodalLM:
    processor = tiny_processor()
    size = {"vocab_size": len(processor.tokenizer), "image_token_id": processor.image_token_id}
    return CapmoeMultimodalLM(
        tiny_llava(**size), tokenizer=processor, batch_size=batch_size, device="cpu", **knobs
    )


class Stock(HFMultimodalLM):
    """lm-eval's own model with a loaded processor, of which it makes nothing."""

    def _create_tokenizer(self, _pretrained: Any, tokenizer: Any, **_: Any) -> None:
        self.processor, self.tokenizer = tokenizer, tokenizer.tokenizer


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_baseline_is_lm_evals_own_model(batch_size: int) -> None:
    ours = build(batch_size)
    answers = ours.generate_until(requests(), disable_tqdm=True)
    ours.release()
    stock = Stock(ours.model, tokenizer=ours.processor, batch_size=batch_size, device="cpu")
    assert answers == stock.generate_until(requests(), disable_tqdm=True)
    assert len(set(answers)) > 1


def test_images_and_text_are_counted_and_pads_are_not() -> None:
    lm = build(method="score", gamma=0.5, modality="image_first")
    rows: list[int] = []
    lm.on_rows = rows.append
    lm.generate_until(requests(), disable_tqdm=True)
    by = lm.meter.summary()["modalities"]
    assert by["image"]["tokens"] == len(QUESTIONS) * IMAGE_TOKENS
    words = [text.replace("<image>", lm.image_token) for text in QUESTIONS]
    assert by["text"]["tokens"] == sum(len(lm.tok_encode(text)) - 1 for text in words)
    assert by["image"]["drop_rate"] > by["text"]["drop_rate"]
    proofs = lm.meter.proofs()
    assert proofs["pads_take_no_slot"]["passed"] and proofs["modality_order"]["passed"]
    assert rows == [3, 2]


def test_the_priority_reaches_the_model() -> None:
    lm = build(len(QUESTIONS), method="score", gamma=0.25)
    rates = []
    for modality in ("image_first", "uniform", "text_first"):
        lm.route(Method("score", gamma=0.25, modality=modality))
        lm.generate_until(requests(), disable_tqdm=True)
        rates.append(lm.meter.summary()["modalities"]["text"]["drop_rate"])
    assert rates == sorted(rates) and rates[0] < rates[1] < rates[2]


@pytest.mark.parametrize("shuffle", [None, 1])
def test_every_document_names_its_batch(shuffle: int | None) -> None:
    lm = build(2)
    plain = lm.generate_until(requests(), disable_tqdm=True)
    lm.route(Method("baseline"))
    lm.set_batches(2, shuffle)
    assert lm.generate_until(requests(), disable_tqdm=True) == plain
    numbers = [lm.batches["pictures", n] for n in range(len(QUESTIONS))]
    assert sorted(numbers) == [0, 0, 1, 1, 2]
    assert (huggingface.Collator, hf_vlms.Collator) == (lm_collator, lm_collator)


lm_collator = huggingface.Collator


def test_text_is_asked_as_of_any_model() -> None:
    lm = build(method="score", gamma=0.5)
    pair = Instance("loglikelihood", {}, ("A bird has", " feathers"), 0, ("text", 0, 1))
    assert len(lm.loglikelihood([pair], disable_tqdm=True)) == 1
    report = lm.meter.report()
    assert "modalities" not in report["summary"] and report["summary"]["dropped"] > 0
    prompt = Instance("generate_until", {}, ("A bird has", SETTINGS), 0, ("text", 0, 1))
    assert len(lm.generate_until([prompt], disable_tqdm=True)) == 1


def test_likelihoods_behind_images_are_refused() -> None:
    lm = build()
    visual = {"visual": [Image.new("RGB", (64, 64))]}
    pair = Instance("loglikelihood", {}, ("<image> It is", " red", visual), 0, ("mine", 0, 1))
    with pytest.raises(UsageError, match="task=mine: it asks for log-likelihoods of text behind"):
        lm.loglikelihood([pair])


def test_an_automatic_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="batch_size=auto: lm-eval does not search it"):
        build("auto")  # type: ignore[arg-type]


def test_a_model_that_reads_images_is_loaded_with_its_processor() -> None:
    lm = load_lm(LLAVA, Placement("cpu"), 2)
    assert isinstance(lm, CapmoeMultimodalLM) and lm.quiet
    assert lm.reader.tokenizer is lm.tokenizer
    assert type(load_lm(ModelId("m", "tiny:olmoe"), Placement("cpu"), 2)).__name__ == "CapmoeLM"


def test_the_hash_of_a_processor_is_that_of_its_images_too() -> None:
    processor = tiny_processor()
    known = reader_hash(processor)
    del processor.capmoe_hash
    assert known != reader_hash(processor.tokenizer)
    before = processor.image_processor.image_std
    try:
        processor.image_processor.image_std = [0.9] * 3
        assert reader_hash(processor) != known
    finally:
        processor.image_processor.image_std = before
        del processor.capmoe_hash
    assert reader_hash(processor) == known
