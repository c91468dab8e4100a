"""One name stands for one set of weights, and one for one set of documents, in a directory."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.run import check_inputs, run
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.experiment.configuration import CellPlan, DeviceConfig
from capmoe_eval.experiment.datasource import DataSource, data_source
from capmoe_eval.experiment.record import Record
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.zoo.tiny import tiny_model, tiny_tokenizer

OBQA = TaskId("obqa", "openbookqa", "allenai/openbookqa", "acc_norm", 0)
PIQA = TaskId("piqa", "piqa", "baber/piqa", "acc_norm", 0)


def plan(
    root: Path, pretrained: str, method: Method, task: TaskId = OBQA, **changes: Any
) -> CellPlan:
    cell = Cell(ModelId("mine", pretrained, dtype="float32"), method, task, 4, 2, "miniworld")
    return dataclasses.replace(
        CellPlan(cell, data_source("miniworld"), root, DeviceConfig("cpu", threads=1)), **changes
    )


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Record:
    root = tmp_path_factory.mktemp("computed")
    (record,) = run([plan(root, "tiny:olmoe", create_method("baseline"))]).records
    return record


def variant(
    record: Record, root: Path, *, method: Method | None = None, **provenance: object
) -> Record:
    """The record as another cell's, or computed with something else (``model.weights=…``)."""
    content = copy.deepcopy(record.content)
    cell = dataclasses.replace(record.cell, method=method or record.cell.method)
    content["capmoe"] |= {"cell": cell.identity(), "digest": cell.digest}
    for name, value in provenance.items():
        *parents, last = name.split("__")
        part = content["capmoe"]["provenance"]
        for parent in parents:
            part = part[parent]
        part[last] = value
    return Record.of(content, cell.path(root))


def write(record: Record) -> Record:
    record.write()
    return record


def check(record: Record, root: Path) -> None:
    check_inputs(root, record.cell, record.capmoe["provenance"])


DECISIVE = {
    "weights": {"model__weights": "0123"},
    "tokenizer": {"model__tokenizer": "0123456789abcdef"},
    "attention": {"model__attention": "eager"},
    "fingerprint": {"data_fingerprint": "0123"},
}


@pytest.mark.parametrize("field", DECISIVE)
def test_another_input_under_the_same_name_is_refused(
    field: str, computed: Record, tmp_path: Path
) -> None:
    first = write(variant(computed, tmp_path))
    other = variant(computed, tmp_path, method=create_method("score", 1.0), **DECISIVE[field])
    with pytest.raises(UsageError, match=rf"^{tmp_path}: .*other {field}") as line:
        check(other, tmp_path)
    (new,) = DECISIVE[field].values()
    key = "data.name" if field == "fingerprint" else "model.name"
    for part in (str(first.path), f"now {new}", "another results_dir", key, "delete the old"):
        assert part in str(line.value)
    assert "\n" not in str(line.value)


def test_own_results_are_of_the_inputs_of_the_shipped(computed: Record, tmp_path: Path) -> None:
    """Tables mix the two."""
    shipped, mine = tmp_path / "zoo", tmp_path / "local-zoo"
    write(variant(computed, shipped))
    other = variant(computed, mine, method=create_method("score", 1.0), **DECISIVE["weights"])
    with pytest.raises(UsageError, match=rf"^{shipped}: .*other weights"):
        check(other, mine)
    check(variant(computed, mine, method=create_method("score", 1.0), threads=7), mine)


@pytest.mark.parametrize("field", DECISIVE)
def test_the_new_input_is_taken_where_no_record_has_the_old_one(
    field: str, computed: Record, tmp_path: Path
) -> None:
    first = write(variant(computed, tmp_path))
    again = variant(computed, tmp_path, **DECISIVE[field])
    check(again, tmp_path)  # it takes the place of the only record
    write(again)
    back = variant(computed, tmp_path, method=create_method("order", 1.0))
    with pytest.raises(UsageError, match=f"other {field}"):
        check(back, tmp_path)
    first.path.unlink()
    write(back)
    check(back, tmp_path)


def test_replaced_weights_are_refused_for_other_cells_too(tmp_path: Path) -> None:
    model, root = tmp_path / "model", tmp_path / "results"
    tiny_tokenizer().save_pretrained(model)

    def save(seed: int) -> None:
        vocabulary = len(tiny_tokenizer())
        tiny_model("mixtral", vocab_size=vocabulary, seed=seed).save_pretrained(model)

    save(0)
    first = plan(root, str(model), create_method("baseline"))
    other = plan(root, str(model), create_method("score", 1.0), PIQA)
    (record,) = run([first]).records
    save(1)
    assert run([first]).computed == 0, "finished before, by the old weights"
    for asked in (
        [other],
        [first, other],
        [dataclasses.replace(other, overwrite=True)],
    ):
        with pytest.raises(UsageError, match="model mine has other weights than its results here"):
            run(asked)
        assert not other.path.exists()
    record.path.unlink()
    assert run([other]).computed == 1


def test_the_commit_of_a_hubs_dataset_is_its_fingerprint(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As datasets keeps what it once read from the hub; that one cannot be reached."""
    commit = "0123456789" * 4
    here = datasets.load_dataset(str(hub / "allenai/openbookqa"), "main", cache_dir=tmp_path / "a")
    kept = Path(here["test"].cache_files[0]["filename"]).parent
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "b")
    shutil.copytree(kept, tmp_path / f"b/allenai___openbookqa/main/0.0.0/{commit}")
    assert TaskLibrary().fingerprint(OBQA, DataSource("hub")) == commit
