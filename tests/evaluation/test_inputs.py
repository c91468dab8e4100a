"""One name stands for one set of weights, and one for one set of documents, in a directory."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.run import check_inputs, run
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import ModelId
from capmoe_eval.experiment.datasource import DataSource
from capmoe_eval.experiment.record import Record
from capmoe_eval.routing.registry import create_method
from capmoe_eval.zoo.tiny import tiny_model, tiny_tokenizer
from tests import records

INPUTS = {"weights": "a", "tokenizer": "b", "attention": "sdpa", "fingerprint": "d"}
NEW = "new"


def computed(root: Path, method: str, new: str = "", **fields: Any) -> Record:
    """The record of a method's cell, which is not written, computed with a new input or none."""
    inputs = INPUTS | ({new: NEW} if new else {})
    origin = {"data_fingerprint": inputs.pop("fingerprint"), "model": inputs}
    return records.record(
        records.cell(create_method(method, 1.0), **fields), root, provenance=origin
    )


def check(record: Record, root: Path) -> None:
    check_inputs(root, record.cell, record.capmoe["provenance"])


@pytest.mark.parametrize("field", INPUTS)
def test_another_input_under_the_same_name_is_refused(field: str, tmp_path: Path) -> None:
    first = computed(tmp_path, "baseline")
    first.write()
    check(computed(tmp_path, "score"), tmp_path)
    with pytest.raises(UsageError, match=rf"^{tmp_path}: .*other {field}") as line:
        check(computed(tmp_path, "score", field), tmp_path)
    key = "data.name" if field == "fingerprint" else "model.name"
    for part in (str(first.path), f"now {NEW}", "another results_dir", key, "delete the old"):
        assert part in str(line.value)
    assert "\n" not in str(line.value)


def test_own_results_are_of_the_inputs_of_the_shipped(tmp_path: Path) -> None:
    """Tables mix the two."""
    shipped, mine = tmp_path / "zoo", tmp_path / "local-zoo"
    computed(shipped, "baseline").write()
    check(computed(mine, "score"), mine)
    with pytest.raises(UsageError, match=rf"^{shipped}: .*other weights"):
        check(computed(mine, "score", "weights"), mine)


@pytest.mark.parametrize("field", INPUTS)
def test_the_new_input_is_taken_where_no_record_has_the_old_one(field: str, tmp_path: Path) -> None:
    again, back = computed(tmp_path, "baseline", field), computed(tmp_path, "order")
    computed(tmp_path, "baseline").write()
    check(again, tmp_path)  # it takes the place of the only record
    again.write()
    with pytest.raises(UsageError, match=f"other {field}"):
        check(back, tmp_path)
    again.path.unlink()
    back.write()
    check(back, tmp_path)


def test_backends_have_kernels_of_their_own_and_the_same_weights(tmp_path: Path) -> None:
    computed(tmp_path, "baseline").write()
    engine = {"backend": "vllm", "max_num_batched_tokens": 64}
    check(computed(tmp_path, "score", "attention", **engine), tmp_path)
    with pytest.raises(UsageError, match="has other weights than its results here"):
        check(computed(tmp_path, "score", "weights", **engine), tmp_path)


@pytest.mark.parametrize("field", INPUTS)
def test_a_name_is_of_one_checkpoint_wherever_it_lies(field: str, tmp_path: Path) -> None:
    """Two checkpoints of one name stood in one row of a table, and in its mean."""
    first = computed(tmp_path, "baseline")
    first.write()
    for dtype, is_same in (("float32", True), ("bfloat16", False)):
        model = ModelId(first.cell.model.name, "/elsewhere", dtype=dtype)
        cell = dataclasses.replace(first.cell, model=model, data=field)
        copy = computed(tmp_path, "score").capmoe["provenance"]
        check_inputs(tmp_path, cell, copy)
        other = computed(tmp_path, "score", field).capmoe["provenance"]
        if field == "weights" and is_same:
            with pytest.raises(UsageError, match="model m has other weights than its results here"):
                check_inputs(tmp_path, cell, other)
        else:
            check_inputs(tmp_path, cell, other)


def test_replaced_weights_are_refused_for_other_cells_too(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_tokenizer().save_pretrained(model)

    def save(seed: int) -> None:
        vocabulary = len(tiny_tokenizer())
        tiny_model("mixtral", vocab_size=vocabulary, seed=seed).save_pretrained(model)

    save(0)
    words = ["model=custom", "model.name=mine", f"model.pretrained={model}", "data.root=miniworld"]
    words += ["limit=2", "batch_size=4", "device=cpu", f"results_dir={tmp_path / 'results'}"]
    (first,) = records.planned(*words, "method=baseline", "tasks=obqa")
    (other,) = records.planned(*words, "method=score", "gamma=1.0", "tasks=piqa")
    (record,) = run([first]).records
    save(1)
    assert run([first]).computed == 0, "finished before, by the old weights"
    for asked in ([other], [first, other], [dataclasses.replace(other, overwrite=True)]):
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
    (plan,) = records.planned("tasks=obqa")
    assert TaskLibrary().fingerprint(plan.cell.task, DataSource("hub")) == commit
