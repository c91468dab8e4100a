"""Models from checkpoints and from the package: whole, as they were saved, or refused in a line."""

import functools
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.lm import CapmoeLM
from capmoe_eval.evaluation.loading import load_lm
from capmoe_eval.evaluation.provenance import weights_hash
from capmoe_eval.experiment.cell import ModelId
from capmoe_eval.zoo.tiny import tiny_model, tiny_tokenizer


def load(
    pretrained: object, device: str = "cpu", device_map: str | None = None, **fields: Any
) -> CapmoeLM:
    fields = {"dtype": "float32", **fields}
    return load_lm(ModelId("mine", str(pretrained), **fields), device, device_map=device_map)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer = tiny_tokenizer()
    tiny_model("mixtral", vocab_size=len(tokenizer)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return shutil.copytree(checkpoint, tmp_path / "model")


@pytest.mark.parametrize("device_map", [None, "auto"])
def test_a_local_checkpoint_is_the_model_that_was_saved(
    checkpoint: Path, device_map: str | None
) -> None:
    loaded = load(checkpoint, device_map=device_map)
    embedded = load("tiny:mixtral")
    assert weights_hash(loaded.model) == weights_hash(embedded.model)
    tokens = torch.arange(2, 22).view(2, 10)
    assert torch.equal(loaded.model(tokens).logits, embedded.model(tokens).logits)
    assert not loaded.model.training
    assert loaded.tokenizer.encode("a robin") == embedded.tokenizer.encode("a robin")


def test_the_weights_hash_sees_one_changed_value() -> None:
    model = tiny_model("mixtral", vocab_size=64)
    before = weights_hash(model)
    del model.capmoe_weights_hash
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 1e-3
    assert weights_hash(model) != before


@pytest.fixture(name="hub")
def cached_hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The commits of a repository me/mine in the hub's cache, by the names of revisions."""
    cache = tmp_path / "hub"
    commits = {"main": "a" * 40, "v2": "b" * 40}
    repository = cache / "models--me--mine"
    (repository / "refs").mkdir(parents=True)
    for name, commit in commits.items():
        shutil.copytree(checkpoint, repository / "snapshots" / commit)
        (repository / "refs" / name).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return commits | {"b" * 40: "b" * 40}


def test_a_record_names_the_commit_of_the_hub_and_none_of_a_directory(
    hub: dict[str, str], checkpoint: Path
) -> None:
    for revision, commit in hub.items():
        lm = load("me/mine", revision=revision)
        assert lm.origin()["model"]["commit"] == commit
    assert load(checkpoint).origin()["model"]["commit"] is None


def test_a_model_of_a_package_that_is_not_installed_names_it(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((copied / "config.json").read_text()) | {"model_type": "molmo"}
    (copied / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("capmoe_eval.wrapper.checkpoint._architectures", frozenset)
    with pytest.raises(UsageError, match="model_type=molmo: capmoe-zoo is not installed; in a ch"):
        load(copied)


Damage = Callable[[Path], None]


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(directory: Path) -> None:
        file = directory / "model.safetensors"
        stored = load_file(file)
        change(stored)
        save_file(stored, file, metadata={"format": "pt"})

    return damage


def without(part: str) -> Damage:
    def drop(stored: dict[str, torch.Tensor]) -> None:
        for key in [key for key in stored if part in key]:
            del stored[key]

    return tensors(drop)


def config(**changes: object) -> Damage:
    def damage(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def cut(file: str, keep: int) -> Damage:
    return lambda directory: (directory / file).write_bytes((directory / file).read_bytes()[:keep])


WHOLE = r"cannot be loaded \(.*\); get the whole checkpoint again$"
TOKENIZER = r"cannot be loaded \(.*\); set (model\.)?tokenizer=PATH to a whole tokenizer$"
# In the files Mixtral's experts are block_sparse_moe.experts.N.w1, w2 and w3, one by one.
DAMAGES: list[tuple[Damage, str]] = [
    (
        without("layers.1.block_sparse_moe.experts"),
        r"lacks tensors of the model.*\(2: model\.layers\.1\.mlp\.experts\.down_proj, model\.lay",
    ),
    (without("layers.1.block_sparse_moe.experts.3."), r"other shapes.*experts.*\(7, .* for \(8, "),
    (without("gate.weight"), r"lacks tensors.*\(3: model\.layers\.0\.mlp\.gate\.weight"),
    (
        without("layers.1.block_sparse_moe.experts.3.w1."),
        r"lacks parts of tensors.*\(1: model\.layers\.1\.mlp\.experts\.gate_up_proj\); get",
    ),
    (config(num_hidden_layers=4), r"lacks tensors.*model\.layers\.3"),
    (config(num_hidden_layers=2), r"has tensors of layers that the model has no place.*layers\.2"),
    (config(num_local_experts=4), r"has tensors of other shapes.*\(8, .* for \(4, "),
    (config(model_type="mixtrall"), WHOLE),
    (cut("model.safetensors", -30), WHOLE),
    (cut("config.json", 30), WHOLE),
    (cut("tokenizer.json", 100), TOKENIZER),
    (lambda directory: (directory / "tokenizer.json").unlink(), TOKENIZER),
    (lambda directory: (directory / "model.safetensors").unlink(), WHOLE),
]


@pytest.mark.parametrize(("damage", "line"), DAMAGES)
def test_a_checkpoint_that_is_not_whole_is_refused(damage: Damage, line: str, copied: Path) -> None:
    """transformers puts random numbers in the place of what is not there, or a traceback."""
    damage(copied)
    with pytest.raises(UsageError, match=rf"model\.pretrained={copied}: .*{line}") as error:
        load(copied)
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match=rf"^pretrained={copied}: .*{line}"):
        CapmoeLM(str(copied), device="cpu")  # as lm-eval's command line loads it


def test_a_tokenizer_of_more_tokens_than_the_model_embeds_is_refused(copied: Path) -> None:
    """Its text would be an IndexError of torch in the middle of a task."""
    file = copied / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    rows = len(vocabulary)
    vocabulary["otter"] = max(vocabulary.values()) + 1
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(UsageError, match=rf"^tokenizer: has {rows + 1} tokens, .* embeds {rows};"):
        load(copied)


MARKER = """
from pathlib import Path
Path({marker!r}).write_text("")
from transformers import {base} as {name}
"""


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_code_of_a_checkpoint_never_runs(
    part: str, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks on standard input, and a piped yes is an answer."""
    marker = tmp_path / "ran"
    code = functools.partial(MARKER.format, marker=str(marker))
    names: dict[str, str] = {}
    if part == "model":
        classes = {"AutoConfig": "own.MyConfig", "AutoModelForCausalLM": "own.MyModel"}
        config(model_type="mine", auto_map=classes)(copied)
        (copied / "own.py").write_text(code(base="MixtralConfig", name="MyConfig"))
    else:
        names["tokenizer"] = str(tmp_path / "tokenizer")
        (tmp_path / "tokenizer").mkdir()
        settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["own.Mine", None]}}
        (tmp_path / "tokenizer/tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / "tokenizer/own.py").write_text(code(base="PreTrainedTokenizer", name="Mine"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    for loads in (load, functools.partial(CapmoeLM, device="cpu")):
        with pytest.raises(UsageError, match=r"needs code of its own.*--trust_remote_code"):
            loads(str(copied), **names)
    assert not marker.exists(), "code of the checkpoint ran"
