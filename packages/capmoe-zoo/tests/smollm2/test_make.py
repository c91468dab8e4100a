"""``make real``: the checkpoint in the user's cache."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.cell import checkpoint
from safetensors.torch import load, save
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

import capmoe_zoo.smollm2.make
from capmoe_zoo.__main__ import ARTEFACT
from capmoe_zoo.smollm2.artefact import zero_biases
from capmoe_zoo.smollm2.compression import compress, decompress
from capmoe_zoo.smollm2.make import ORIGIN, fetch, make


@pytest.fixture
def artefact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an artefact; its checkpoint is a copy of it, its hash the sum of its numbers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(capmoe_zoo.smollm2.make, "fetch", lambda directory: directory / "gguf")
    monkeypatch.setattr("capmoe_zoo.smollm2.artefact.load_base", lambda gguf: ("base", "tokenizer"))

    def assemble(base: str, tokenizer: str, artefact: Path, directory: Path) -> str:
        directory.mkdir()
        shutil.copy(artefact, directory / "model.safetensors")
        return str(int(load(decompress(artefact))["a"].sum()))

    monkeypatch.setattr("capmoe_zoo.smollm2.artefact.assemble", assemble)
    path = tmp_path / "m.xz"
    path.write_bytes(compress(save({"a": torch.ones(3)})))
    return path


def test_a_checkpoint_is_made_once_and_verified(
    artefact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(checkpoint("real:m"))
    make("m", artefact)
    out = capsys.readouterr().out
    assert f"{directory}: written" in out
    assert "weights 3: not as expected (unknown)" in out
    make("m", artefact, record=True)
    assert artefact.with_suffix(".hash").read_text() == "3\n"
    made = (directory / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    make("m", artefact)
    assert capsys.readouterr().out == f"{directory}: is there\nweights 3: as expected\n"
    assert (directory / "model.safetensors").stat().st_mtime_ns == made
    # Another artefact takes its place, and a checkpoint without an origin counts for none.
    artefact.write_bytes(compress(save({"a": torch.ones(4)})))
    make("m", artefact)
    assert "weights 4: not as expected (3)" in capsys.readouterr().out
    for text in ("", (directory / ORIGIN).read_text().replace('"format": 2', '"format": 1')):
        (directory / ORIGIN).write_text(text)
        make("m", artefact)
        assert "written" in capsys.readouterr().out
    assert json.loads((directory / ORIGIN).read_text())["weights"] == "4"
    assert [path.name for path in directory.parent.iterdir()] == ["m"]


def test_the_shipped_artefact_is_what_training_wrote() -> None:
    digest = "65723e616851aa0405e8c2d16501e45ab20753d1b6913af00879c3ecdfcf6791"
    assert hashlib.sha256(decompress(ARTEFACT)).hexdigest() == digest


def test_vllm_finds_a_bias_of_zeros_for_each_of_its_own() -> None:
    """With biases, the same configuration has just these parameters more, of the same shapes."""
    sizes: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 16, "num_experts": 4, "intermediate_size": 8}
    plain, biased = (
        Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, qkv_bias=has_bias))
        for has_bias in (False, True)
    )
    zeros = zero_biases(plain)
    assert not any(zero.any() for zero in zeros.values())
    missing, unexpected = biased.load_state_dict(plain.state_dict() | zeros)
    assert (missing, unexpected) == ([], [])


def test_what_is_missing_is_one_line(
    artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="no such file; take it from the repository"):
        make("m", tmp_path / "none.xz")
    (damaged := tmp_path / "damaged.xz").write_bytes(artefact.read_bytes()[:-8])
    with pytest.raises(UsageError, match=r"damaged\.xz: not compressed by xz, or damaged"):
        make("m", damaged)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(capmoe_zoo.smollm2.make, "fetch", fetch)
    with pytest.raises(UsageError, match=r"pip cannot fetch the base.*No matching distribution"):
        make("m", artefact)
    assert not list((tmp_path / "cache/capmoe_eval/real").iterdir())
