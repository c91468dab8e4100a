"""The directory loads as the hub does, with the types of the real data, and is written once."""

import hashlib

import datasets
import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.datasource import data_source
from capmoe_eval.experiment.record import read_record
from capmoe_eval.experiment.results import record_paths
from capmoe_eval.zoo import hub as hub_module
from capmoe_eval.zoo import sets
from capmoe_eval.zoo.hub import embedded_hub, ready, write_documents
from capmoe_eval.zoo.sets import documents
from tests.conftest import REPOSITORY

SETS = documents("miniworld")
CONFIGS = [
    (path, config)
    for path, configs in SETS.items()
    for config in configs
    if path != "cais/mmlu" or config in {"anatomy", "world_religions"}
]


def digest(directory):
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(("path", "config"), CONFIGS)
def test_datasets_loads_every_row(hub, path, config):
    loaded = datasets.load_dataset(str(hub / path), config)
    assert {split: rows.to_list() for split, rows in loaded.items()} == SETS[path][config]


@pytest.mark.real_data
@pytest.mark.parametrize(("path", "config"), CONFIGS)
def test_splits_and_types_are_those_of_the_real_data(hub, real_hub, path, config):
    generated = datasets.load_dataset(str(hub / path), config)
    real = datasets.load_dataset(str(real_hub / path), config)
    assert {split: rows.features for split, rows in generated.items()} == {
        split: rows.features for split, rows in real.items()
    }


def test_it_is_written_once(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = embedded_hub("miniworld")
    assert directory.parent == tmp_path / "capmoe_eval"
    assert digest(directory) == digest(hub)
    monkeypatch.setattr(hub_module, "write_documents", None)
    assert embedded_hub("miniworld") == directory


def test_only_mini_worlds_have_other_seeds_and_these_need_another_package(monkeypatch):
    for name in ("pictures_w8", "miniworld_w", "miniworld_w08"):
        with pytest.raises(UsageError, match="no such directory"):
            data_source(name)
    monkeypatch.setattr(sets, "load_entry_points", lambda _group: {})
    with pytest.raises(UsageError, match="miniworld_w8: capmoe-zoo, which generates it, is not"):
        ready(data_source("miniworld_w8"))


def test_fingerprints_are_those_of_the_committed_records():
    """Of text: pictures take half a minute to write, and their tests ask for them."""
    root = REPOSITORY / "results/zoo"
    paths = [*record_paths(root, "zoo_olmoe"), *record_paths(root, "zoo_icl_olmoe")]
    fingerprints = {
        (record.cell.data, record.cell.task.dataset): record.provenance.data_fingerprint
        for record in (read_record(path, root) for path in paths)
    }
    assert len(fingerprints) > 10
    for (data, dataset), fingerprint in fingerprints.items():
        assert ready(data_source(data)).fingerprint(dataset) == fingerprint, dataset


def test_datasets_does_not_mix_up_two_directories(hub, tmp_path):
    """It keys its cache by names alone; see the module."""
    fewer = {"baber/piqa": {"default": {"train": SETS["baber/piqa"]["default"]["train"][:3]}}}
    write_documents(tmp_path, fewer, title="fewer")
    lengths = [
        len(datasets.load_dataset(str(root / "baber/piqa"), split="train"))
        for root in (hub, tmp_path, hub)
    ]
    assert lengths == [64, 3, 64]


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    def fail(directory, *_, **__):
        (directory / "half").write_text("half", encoding="utf-8")
        raise OSError("no space left")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hub_module, "write_documents", fail)
    with pytest.raises(OSError, match="no space left"):
        embedded_hub("miniworld")
    assert list((tmp_path / "capmoe_eval").iterdir()) == []
