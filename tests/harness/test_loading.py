from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from capmoe_eval.cell import ModelId
from capmoe_eval.errors import UsageError
from capmoe_eval.harness.loading import Placement, load_lm
from capmoe_eval.harness.provenance import provenance, weights_hash
from capmoe_eval.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer = tiny_tokenizer()
    tiny_model("mixtral", vocab_size=len(tokenizer)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("device_map", [None, "auto"])
def test_a_local_checkpoint_is_the_model_that_was_saved(
    checkpoint: Path, device_map: str | None
) -> None:
    loaded = load_lm(
        ModelId("mine", str(checkpoint), dtype="float32"), Placement("cpu", device_map), 2
    )
    embedded = load_lm(ModelId("tiny", "tiny:mixtral", dtype="float32"), Placement("cpu"), 2)
    assert weights_hash(loaded.model) == weights_hash(embedded.model)
    tokens = torch.arange(2, 22).view(2, 10)
    assert torch.equal(loaded.model(tokens).logits, embedded.model(tokens).logits)
    assert not loaded.model.training
    assert loaded.tokenizer.encode("a robin") == embedded.tokenizer.encode("a robin")


def test_the_dtype_is_the_one_asked_for(checkpoint: Path) -> None:
    lm = load_lm(ModelId("mine", str(checkpoint), dtype="bfloat16"), Placement("cpu"), 2)
    assert provenance(lm.model)["model"]["dtype"] == "bfloat16"


def test_the_weights_hash_sees_one_changed_value() -> None:
    model = tiny_model("mixtral", vocab_size=64)
    before = weights_hash(model)
    del model.capmoe_weights_hash
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 1e-3
    assert weights_hash(model) != before


@pytest.mark.parametrize(
    ("model", "placement", "line"),
    [
        (ModelId("m", "tiny:olmo"), Placement("cpu"), "did you mean 'tiny:olmoe'"),
        (ModelId("m", "tiny:olmoe", dtype="int8"), Placement("cpu"), "dtype=int8: choose one of"),
        (ModelId("m", "tiny:olmoe"), Placement("cuda:99"), "device=cuda:99: not usable here"),
        (
            ModelId("m", "./nothing"),
            Placement("cpu"),
            r"model\.pretrained=\./nothing: .*no such dir",
        ),
        (ModelId("m", "tiny:olmoe", tokenizer="./no"), Placement("cpu"), r"model\.tokenizer=\./no"),
    ],
)
def test_what_cannot_be_loaded_gives_one_line(
    model: ModelId, placement: Placement, line: str
) -> None:
    with pytest.raises(UsageError, match=line) as error:
        load_lm(model, placement, 1)
    assert "\n" not in str(error.value)


def test_too_little_memory_gives_one_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", no_memory)
    with pytest.raises(UsageError, match="set device_map=auto to spread it") as error:
        load_lm(ModelId("mine", str(checkpoint)), Placement("cpu"), 2)
    assert "\n" not in str(error.value)


def test_threads_are_a_setting() -> None:
    before = torch.get_num_threads()
    try:
        load_lm(ModelId("m", "tiny:mixtral", dtype="float32"), Placement("cpu", threads=2), 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
