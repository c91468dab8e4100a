"""Grids: the finished is skipped, the failed reported, and a kill leaves whole records."""

from __future__ import annotations

import dataclasses
import errno
import gc
import os
import random
import re
import shutil
import signal
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from capmoe_eval.errors import UnwritableError, UsageError
from capmoe_eval.evaluation import evaluate as evaluate_module
from capmoe_eval.evaluation import loading
from capmoe_eval.evaluation import run as run_module
from capmoe_eval.evaluation.run import Outcome, run
from capmoe_eval.evaluation.summary import SHOWN
from capmoe_eval.experiment import record as record_module
from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.experiment.configuration import Placement, Plan
from capmoe_eval.experiment.datasource import data_source
from capmoe_eval.experiment.files import write_bytes
from capmoe_eval.experiment.record import SCHEMA, read_record
from capmoe_eval.experiment.results import record_paths
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from tests.processes import command

OBQA = TaskId("obqa", "openbookqa", "allenai/openbookqa", "acc_norm", 0)


def plan(root: Path, method: Method, *, model: str = "tiny:olmoe", **changes: object) -> Plan:
    name = model.replace(":", "_").replace("/", "_")
    cell = Cell(ModelId(name, model, dtype="float32"), method, OBQA, 4, 2, "synthetic")
    return dataclasses.replace(
        Plan(cell, data_source("synthetic"), root, Placement("cpu")),
        **changes,  # type: ignore[arg-type]
    )


def grid(root: Path) -> list[Plan]:
    return [plan(root, create_method(name, 1.0)) for name in ("baseline", "order", "score")]


def test_finished_cells_are_skipped_and_kept_as_they_are(tmp_path: Path) -> None:
    first = run(grid(tmp_path))
    assert (first.computed, len(first.records), first.failures) == (3, 3, [])
    before = {record.path: record.path.stat().st_mtime_ns for record in first.records}
    missing = first.records[1].path
    missing.unlink()
    second = run(grid(tmp_path))
    assert (second.computed, len(second.records)) == (1, 3)
    after = {record.path: record.path.stat().st_mtime_ns for record in second.records}
    assert {path for path in before if before[path] != after[path]} == {missing}


def test_of_many_records_the_first_are_kept() -> None:
    outcome = Outcome()
    for number in random.Random(0).sample(range(200), 200):
        outcome.add(number, number)  # type: ignore[arg-type]
    assert outcome.records == list(range(SHOWN)) and outcome.finished == 200


def test_overwrite_computes_again(tmp_path: Path) -> None:
    run(grid(tmp_path)[:1])
    again = run([dataclasses.replace(grid(tmp_path)[0], overwrite=True)])
    assert again.computed == 1


def test_the_end_of_a_job_is_no_failed_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submitit raises it from a signal's handler; the next cell would run into the limit."""

    class UncompletedJobError(RuntimeError):
        __module__ = "submitit.core.utils"

    def ended(*_: object, **__: object) -> None:
        raise UncompletedJobError("Job not requeued because: timed-out too many times.")

    monkeypatch.setattr("capmoe_eval.evaluation.evaluate.evaluate", ended)
    with pytest.raises(UncompletedJobError):
        run(grid(tmp_path))


def test_a_model_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []
    load_lm = loading.load_lm

    def counting(model: ModelId, *args: object, **kwargs: object) -> object:
        loads.append(model.name)
        return load_lm(model, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "load_lm", counting)
    methods = [create_method("baseline"), create_method("score", 1.0)]
    mixed = [plan(tmp_path, m, model=f"tiny:{f}") for m in methods for f in ("olmoe", "mixtral")]
    assert run(mixed).computed == 4
    assert loads == ["tiny_olmoe", "tiny_mixtral"]


def test_a_model_is_gone_before_the_next_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[weakref.ref[object]] = []
    load_lm = loading.load_lm

    def watching(model: ModelId, *args: object, **kwargs: object) -> object:
        assert [alive() for alive in loaded] == [None] * len(loaded), "in memory twice"
        lm = load_lm(model, *args, **kwargs)  # type: ignore[arg-type]
        loaded.append(weakref.ref(lm.model))
        return lm

    def failing(cell: Cell, *args: object, **kwargs: object) -> object:
        if cell.model.name == "tiny_mixtral":
            raise RuntimeError("an error holds the frames that it passed")
        return evaluate(cell, *args, **kwargs)  # type: ignore[arg-type]

    evaluate = evaluate_module.evaluate
    monkeypatch.setattr(evaluate_module, "evaluate", failing)
    monkeypatch.setattr(loading, "load_lm", watching)
    families = ("olmoe", "mixtral", "qwen3_moe")
    gc.disable()  # what frees the model is no chance
    try:
        outcome = run(
            [plan(tmp_path, create_method("score", 1.0), model=f"tiny:{f}") for f in families]
        )
    finally:
        gc.enable()
    assert (outcome.computed, len(outcome.failures), len(loaded)) == (2, 1, 3)


def test_threads_are_those_of_a_models_own_cells(tmp_path: Path) -> None:
    """A number that one model's cells name is not that of the next model, which names none."""
    before = torch.get_num_threads()
    plans = [
        plan(tmp_path, create_method("baseline"), placement=Placement("cpu", threads=before + 1)),
        plan(tmp_path, create_method("baseline"), model="tiny:mixtral"),
        plan(tmp_path, create_method("score", 1.0), placement=Placement("cpu", threads=before + 2)),
    ]
    try:
        used = [r.provenance.threads for r in run(plans).records]
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(before)
    assert used == [before + 1, before, before + 2]


def test_a_failed_cell_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = evaluate_module.evaluate

    def failing(cell: Cell, *args: object, **kwargs: object) -> object:
        if cell.method.name == "order":
            raise RuntimeError("boom\nsecond line")
        return evaluate(cell, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(evaluate_module, "evaluate", failing)
    outcome = run(grid(tmp_path))
    assert [record.method for record in outcome.records] == ["baseline", "score"]
    ((cell, reason),) = outcome.failures
    assert (cell, reason) == ("tiny_olmoe obqa order-g1", "RuntimeError: boom second line")
    monkeypatch.undo()
    assert run(grid(tmp_path)).computed == 1


def test_a_model_that_cannot_be_loaded_fails_its_cells_once(tmp_path: Path) -> None:
    absent = [
        plan(tmp_path, m, model="/no/model")
        for m in (create_method("baseline"), create_method("score", 1))
    ]
    outcome = run([*absent, *grid(tmp_path)[:1]])
    assert [record.method for record in outcome.records] == ["baseline"]
    assert len(outcome.failures) == 2
    assert "model.pretrained=/no/model: cannot be loaded" in outcome.failures[0][1]
    with pytest.raises(UsageError, match=r"model\.pretrained=/no/model"):
        run(absent)


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda text: text[: len(text) // 2], "not a whole record"),
        (lambda text: "[]", "no record of this suite"),
        (
            lambda text: text.replace(f'"schema": {SCHEMA}', '"schema": 99'),
            f"schema 99, this version reads {SCHEMA}",
        ),
        (lambda text: text.replace('"proofs"', '"prooofs"'), "field 'capmoe.proofs' is missing"),
        (lambda text: text.replace('"digest": "', '"digest": "0'), "its cell has digest"),
        (
            lambda text: text.replace('"gamma": 1.0', '"gamma": -1.0'),
            "capmoe.cell.: cannot be read",
        ),
    ],
)
def test_a_damaged_record_is_named_before_anything_is_computed(
    damage: Callable[[str], str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = grid(tmp_path)
    run(plans[2:])
    path = plans[2].path
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    monkeypatch.setattr(
        run_module._Work, "records", lambda *_: pytest.fail("something was computed")
    )
    with pytest.raises(UsageError, match=line) as error:
        run(plans)
    assert str(path) in str(error.value) and "delete it" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_record_of_other_documents_is_not_taken(tmp_path: Path) -> None:
    plans = grid(tmp_path)[:1]
    run(plans)
    record = read_record(plans[0].path)
    record.capmoe["provenance"]["data_fingerprint"] = "0123"
    record.write()
    with pytest.raises(UsageError, match="computed from other documents"):
        run(plans)
    assert run([dataclasses.replace(plans[0], overwrite=True)]).computed == 1


def test_other_weights_under_the_same_name_are_not_mixed_in(tmp_path: Path) -> None:
    plans = grid(tmp_path)
    run(plans[:1])
    record = read_record(plans[0].path)
    record.capmoe["provenance"]["model"]["weights"] = "0123"
    record.write()
    with pytest.raises(UsageError, match="other weights than its results here"):
        run(plans)
    assert not plans[1].path.exists()


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    (one,) = grid(tmp_path)[:1]
    one.path.parent.mkdir(parents=True)
    stray = one.path.with_name(f".{one.path.name}.999999999.abcd_123.tmp")
    stray.write_text("{")
    os.utime(stray, (0, 0))
    run([one])
    assert [path.name for path in one.path.parent.iterdir()] == [one.path.name]


def test_damaged_documents_give_one_line_before_a_model_is_loaded(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(hub / "allenai/openbookqa", tmp_path / "data/allenai/openbookqa")
    (file,) = tmp_path.glob("data/allenai/openbookqa/**/test*.parquet")
    file.write_bytes(file.read_bytes()[:-20])
    monkeypatch.setattr(run_module._Work, "records", lambda *_: pytest.fail("a model was loaded"))
    damaged = plan(tmp_path / "results", create_method("baseline"))
    with pytest.raises(UsageError, match="task=openbookqa: ") as error:
        run([dataclasses.replace(damaged, source=data_source(str(tmp_path / "data")))])
    assert "\n" not in str(error.value)


def test_an_unwritable_directory_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"results_dir=.*file/results: cannot be written"):
        run(grid(tmp_path / "file/results"))


def test_a_full_disk_stops_everything_and_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, evaluated = evaluate_module.evaluate, []

    def counting(cell: Cell, *args: object, **kwargs: object) -> object:
        evaluated.append(cell.method.name)
        return evaluate(cell, *args, **kwargs)  # type: ignore[arg-type]

    def full(path: Path, data: bytes) -> None:
        if path.name.startswith("order"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_bytes(path, data)

    monkeypatch.setattr(evaluate_module, "evaluate", counting)
    monkeypatch.setattr(record_module, "write_bytes", full)
    with pytest.raises(UnwritableError, match=r"results_dir=.*: cannot be written .No space left"):
        run(grid(tmp_path))
    assert evaluated == ["baseline", "order"], "what cannot be kept is not computed"
    assert not list(tmp_path.rglob("*.tmp"))
    (kept,) = record_paths(tmp_path)
    assert read_record(kept, tmp_path).method == "baseline"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_under_an_evaluation_stops_everything(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = []

    def failing(cell: Cell, *_: object, **__: object) -> object:
        evaluated.append(cell)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(evaluate_module, "evaluate", failing)
    with pytest.raises(UnwritableError, match="cannot be written"):
        run(grid(tmp_path))
    assert len(evaluated) == 1


@pytest.mark.slow
def test_a_killed_sweep_leaves_whole_records_and_continues(tmp_path: Path) -> None:
    words = [
        *("-m", "model=tiny_olmoe", "limit=2", "tasks=obqa,piqa", "ep_size=2", "batch_size=4"),
        *("method=baseline,order,reverse_order,score,expert_drop", "gamma=1.0,2.0"),
        f"results_dir={tmp_path / 'results'}",
    ]
    process = command(*words, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("results/[!.]*/*/*.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    whole = sorted(tmp_path.glob("results/*/*/*.json"))
    assert 3 <= len(whole) < 16, "the kill came in the middle"
    for path in whole:
        read_record(path)
    times = {path: path.stat().st_mtime_ns for path in whole}
    started = time.time()
    out, _ = command(*words, cwd=tmp_path).communicate()
    # baseline and expert_drop have no γ: 2 tasks × (2 + 3 methods × 2 γ) cells.
    assert f"{16 - len(whole)} computed, {len(whole)} finished before, 0 failed" in out
    assert len(list(tmp_path.glob("results/*/*/*.json"))) == 16
    assert times == {path: path.stat().st_mtime_ns for path in whole}
    assert [p.name for p in tmp_path.iterdir()] == ["results"], "Hydra left something behind"
    temporary = [path for path in tmp_path.rglob("*.tmp") if path.stat().st_mtime > started]
    assert not temporary, "the second run left a temporary file"


@pytest.mark.slow
def test_two_processes_share_the_cells_without_being_told_how(tmp_path: Path) -> None:
    words = [
        *("-m", "limit=4", "tasks=obqa,piqa", "model=tiny_olmoe,tiny_mixtral"),
        *("method=order,score", "gamma=1.0,2.0"),
        *("ep_size=2", "batch_size=4", "results_dir=results"),
    ]
    both = [command(*words, cwd=tmp_path) for _ in range(2)]
    said = [process.communicate(timeout=600) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    counted = r"(\d+) computed, (?:(\d+) by other processes, )?(\d+) finished before, 0 failed"
    counts = [[int(n or 0) for n in re.search(counted, out).groups()] for out, _ in said]  # type: ignore[union-attr]
    assert sum(computed for computed, _, _ in counts) == 16, "each cell once"
    assert all(sum(count) == 16 for count in counts), "each process has all records"
    assert len(list(tmp_path.glob("results/*/*/*.json"))) == 16
    left = [path.name for path in tmp_path.glob("results/*/*/.*")]
    assert left == []
    for (out, err), (_, others, _) in zip(said, counts, strict=True):
        assert out.count("results/tiny_") == 16
        assert len(re.findall(r": computed by \S+", err)) == others
