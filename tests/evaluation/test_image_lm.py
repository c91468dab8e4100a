"""``capmoe-multimodal`` against lm-eval's own ``hf-multimodal``, and what its batches tell."""

import math
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models import hf_vlms, huggingface
from lm_eval.models.hf_vlms import HFMultimodalLM
from PIL import Image

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.lm import CapmoeMultimodalLM
from capmoe_eval.evaluation.loading import load_lm
from capmoe_eval.evaluation.provenance import reader_hash
from capmoe_eval.evaluation.run import run
from capmoe_eval.experiment.cell import ModelId
from capmoe_eval.experiment.record import read_record
from capmoe_eval.routing.registry import create_method
from capmoe_eval.zoo.llava import IMAGE_TOKENS
from capmoe_eval.zoo.tiny import TINY_LLAVA, tiny_llava, tiny_processor
from tests.records import planned

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


def answers(lm: Any) -> list[str]:
    return lm.generate_until(requests(), disable_tqdm=True)


def build(batch_size: Any = 3, **knobs: Any) -> CapmoeMultimodalLM:
    processor = tiny_processor()
    size = {"vocab_size": len(processor.tokenizer), "image_token_id": processor.image_token_id}
    model = tiny_llava(**size)
    return CapmoeMultimodalLM(
        model, tokenizer=processor, batch_size=batch_size, device="cpu", **knobs
    )


class Stock(HFMultimodalLM):
    """lm-eval's own model with a loaded processor, of which it makes nothing."""

    def _create_tokenizer(self, _pretrained: Any, tokenizer: Any, **_: Any) -> None:
        self.processor, self.tokenizer = tokenizer, tokenizer.tokenizer


@pytest.mark.parametrize("size", [1, 3])
def test_the_baseline_is_lm_evals_own_model_and_names_batches(size: int) -> None:
    collator = huggingface.Collator
    lm = build(size)
    texts = answers(lm)
    shown: list[tuple[str, int, int]] = []
    lm.on_progress = lambda *progress: shown.append(progress)
    words = [text.replace("<image>", lm.image_token) for text in QUESTIONS]
    for shuffle in (None, 1):
        lm.route(create_method("score", math.inf, modality="image_first"))
        lm.set_batches(size, shuffle)
        assert answers(lm) == texts
        numbers = [lm.batches["pictures", n] for n in range(len(QUESTIONS))]
        assert sorted(numbers) == [n // size for n in range(len(QUESTIONS))]
        by = lm.meter.summary()["modalities"]
        assert by["image"]["tokens"] == len(QUESTIONS) * IMAGE_TOKENS
        assert by["text"]["tokens"] == sum(len(lm.tok_encode(text)) - 1 for text in words)
        assert shown[-1] == ("requests", len(QUESTIONS), len(QUESTIONS))
    assert (huggingface.Collator, hf_vlms.Collator) == (collator, collator)
    lm.release()
    stock = Stock(lm.model, tokenizer=lm.processor, batch_size=size, device="cpu")
    assert texts == answers(stock)
    assert len(set(texts)) > 1


def test_a_cell_with_images_has_a_record(tmp_path: Path) -> None:
    words = ("model=tiny_llava_olmoe", "tasks=mme", "limit=4", "batch_size=4", "method=score")
    words += ("gamma=0.5", "+grid.modality=[image_first,text_first]", f"results_dir={tmp_path}")
    records = run(planned(*words)).records
    for record in records:
        assert read_record(record.path, tmp_path).content == record.content
        assert record.cell.identity()["task"]["images"] is True
        assert record.load.modalities is not None
        assert record.load.modalities["image"].tokens == record.n * IMAGE_TOKENS == 4 * IMAGE_TOKENS
        for layer in record.layers:
            assert layer.modalities is not None
            apart = zip(*(part.load_after for part in layer.modalities.values()), strict=True)
            assert [sum(pair) for pair in apart] == layer.load_after
        (documents,) = record.documents.values()
        assert documents.images == [0, 0, 1, 1], "two questions to a picture"
        assert record.proofs.modality_order.passed
        assert not record.proofs.broken
    rates = [record.load.modalities["text"].drop_rate for record in records]
    assert rates[0] < rates[1]


def test_a_saved_model_is_loaded_by_the_suite_and_by_lm_eval(tmp_path: Path) -> None:
    ours = build(method="score", gamma=0.5)
    ours.release()
    ours.model.save_pretrained(tmp_path)
    ours.processor.save_pretrained(tmp_path)
    loaded: Any = load_lm(ModelId("mine", str(tmp_path), dtype="float32"), "cpu", 3)
    named = CapmoeMultimodalLM(str(tmp_path), batch_size=3, device="cpu", dtype="float32")
    assert reader_hash(loaded.reader) == reader_hash(named.reader)
    texts = []
    for lm in (ours, loaded, named):
        lm.route(create_method("score", 0.5, modality="image_first"))
        texts.append(answers(lm))
    assert texts[0] == texts[1] == texts[2]
    assert ours.meter.report()["layers"] == named.meter.report()["layers"]
    with pytest.raises(UsageError, match="tokenizer=nowhere: cannot be loaded"):
        CapmoeMultimodalLM(str(tmp_path), tokenizer="nowhere", device="cpu")
