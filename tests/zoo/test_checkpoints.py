"""The shipped weights are bit for bit those that were trained, and damaged ones are refused."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.zoo import WEIGHTS, checkpoints
from capmoe_eval.zoo.checkpoints import copy_checkpoint, trained_model

SHIPPED = {
    "deepseek_v2": "29899ddac0de0efe18023736f49c3a6c9c4839a8ac2457515714d517f3347ed3",
    "llava_olmoe": "b01e70cefe0043154b65e078bc4bccf10b32c2315e731262381328820ebbebcc",
    "mixtral": "f393e22b1dcbd0ad8827173504d0fe690a0f238821078be95bf48a00bd3cc4ec",
    "olmoe": "f19add36d0d86926ead8bac01fb86b7185be2a14836e2824e1ffe6991893f1d0",
    "qwen2_moe": "c70c1d8575f94fd943d4c980be01f8779051c661c1792d572bafd1683b5fe6b4",
}
"""SHA-256 of the safetensors files that training wrote."""


@pytest.mark.parametrize(("name", "digest"), SHIPPED.items())
def test_the_shipped_weights_are_those_that_were_trained(
    name: str, digest: str, tmp_path: Path
) -> None:
    assert copy_checkpoint(WEIGHTS / name, tmp_path) == tmp_path
    assert hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest() == digest
    files = {"config.json", "generation_config.json", "model.safetensors"}
    assert {file.name for file in tmp_path.iterdir()} == files


def test_weights_are_whole_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "WEIGHTS", tmp_path)
    directory = shutil.copytree(WEIGHTS / "mixtral", tmp_path / "mixtral")
    packed = directory / "model.safetensors.xz"
    (scratch := tmp_path / "scratch").mkdir()
    whole = copy_checkpoint(directory, scratch) / "model.safetensors"
    packed.write_bytes(packed.read_bytes()[:-30])
    with pytest.raises(UsageError, match=r"mixtral: cannot be loaded .*whole checkpoint"):
        trained_model("mixtral")
    shutil.copy(whole, directory)  # trained here, it goes before what is shipped
    assert trained_model("mixtral").config.model_type == "mixtral"
    (directory / whole.name).unlink()
    packed.unlink()
    with pytest.raises(UsageError, match=r"no weights in .*`capmoe-eval train mixtral` makes them"):
        trained_model("mixtral")
