"""Grids: the finished is skipped, the failed reported, and what cannot go on is stopped."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capmoe_eval.errors import UnwritableError, UsageError
from capmoe_eval.evaluation import evaluate as evaluation
from capmoe_eval.evaluation import loading
from capmoe_eval.evaluation.run import run
from capmoe_eval.evaluation.run_command import execute
from capmoe_eval.experiment.cell import Cell, ModelId
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.results import record_paths
from tests import records


def plan(root: Path, method: str, model: str = "tiny_olmoe") -> CellPlan:
    words = (f"model={model}", f"method={method}", "gamma=1.0", "ep_size=1", "tasks=obqa")
    more = ("limit=2", "batch_size=4", "device=cpu", f"results_dir={root}")
    (each,) = records.planned(*words, *more)
    return each


def grid(root: Path) -> list[CellPlan]:
    return [plan(root, name) for name in ("baseline", "order", "score")]


@pytest.fixture
def wrap(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have something called before ``load_lm`` or ``evaluate``, and with what it returned."""

    def replace(module: Any, name: str, before: Any, after: Any = lambda _: None) -> None:
        plain = getattr(module, name)

        def call(first: Any, *args: object, **kwargs: object) -> object:
            before(first)
            value = plain(first, *args, **kwargs)
            after(value)
            return value

        monkeypatch.setattr(module, name, call)

    return replace


def fail_with(error: Exception, matches: Callable[[Any], bool] = lambda _: True) -> Any:
    def before(cell: Any) -> None:
        if matches(cell):
            raise type(error)(*error.args)  # anew: it would keep the frames that it passed

    return before


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
    assert run([dataclasses.replace(grid(tmp_path)[0], overwrite=True)]).computed == 1


FAMILIES = ("olmoe", "mixtral", "qwen3_moe")


def test_a_model_is_loaded_once_and_gone_before_the_next(tmp_path: Path, wrap: Any) -> None:
    loaded: list[weakref.ref[object]] = []

    def alone(_: object) -> None:
        assert [alive() for alive in loaded] == [None] * len(loaded), "in memory twice"

    wrap(loading, "load_lm", alone, lambda lm: loaded.append(weakref.ref(lm.model)))
    error = RuntimeError("an error holds the frames that it passed")
    wrap(evaluation, "evaluate", fail_with(error, lambda cell: cell.model.name == "tiny_mixtral"))
    gc.disable()  # what frees the model is no chance
    try:
        both = ("baseline", "score")
        summary = run([plan(tmp_path, name, f"tiny_{f}") for name in both for f in FAMILIES])
    finally:
        gc.enable()
    assert (summary.computed, len(summary.failures), len(loaded)) == (4, 2, 3)


def test_a_failed_cell_does_not_stop_the_others(
    tmp_path: Path, wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("boom\nsecond line")
    wrap(evaluation, "evaluate", fail_with(error, lambda cell: cell.method.name == "order"))
    summary = run(grid(tmp_path))
    assert [record.method for record in summary.records] == ["baseline", "score"]
    ((cell, reason),) = summary.failures
    assert cell == "tiny_olmoe obqa order-g1"
    assert re.fullmatch(r"RuntimeError: boom second line \(test_run\.py, line \d+\)", reason)
    monkeypatch.undo()
    assert run(grid(tmp_path)).computed == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_same_command_computes_failed_cells_alone_unless_it_overwrites(
    tmp_path: Path, wrap: Any, capsys: pytest.CaptureFixture[str], overwrite: bool
) -> None:
    wrap(loading, "load_lm", fail_with(RuntimeError("boom")))
    cell = dataclasses.replace(plan(tmp_path, "score"), overwrite=overwrite)
    assert execute([cell]) == 1
    lines = capsys.readouterr().err
    assert "CAPMOE_DEBUG=1 stops at the first failure" in lines
    assert ("The same command computes the failed cells again" in lines) != overwrite


class UncompletedJobError(RuntimeError):
    """Submitit raises it from a signal's handler; the next cell would run into the limit."""


UncompletedJobError.__module__ = "submitit.core.utils"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (UncompletedJobError("Job not requeued"), UncompletedJobError),
        *(
            (OSError(number, os.strerror(number)), UnwritableError)
            for number in (errno.ENOSPC, errno.EIO)
        ),
    ],
)
def test_the_end_of_a_job_or_of_the_disk_is_no_failed_cell(
    error: Exception, raised: type[Exception], tmp_path: Path, wrap: Any
) -> None:
    evaluated: list[Cell] = []
    wrap(evaluation, "evaluate", lambda cell: (evaluated.append(cell), fail_with(error)(cell)))
    with pytest.raises(raised):
        run(grid(tmp_path))
    assert len(evaluated) == 1


def test_a_model_that_cannot_be_loaded_is_tried_once(tmp_path: Path, wrap: Any) -> None:
    tried: list[ModelId] = []
    no_memory = fail_with(RuntimeError("no memory"), lambda model: model.name == "tiny_mixtral")
    wrap(loading, "load_lm", lambda model: (tried.append(model), no_memory(model)))
    large = [plan(tmp_path, name, "tiny_mixtral") for name in ("baseline", "score")]
    summary = run([*large, *grid(tmp_path)[:1]])
    reasons = [reason.partition(" (")[0] for _, reason in summary.failures]
    assert reasons == ["RuntimeError: no memory"] * 2
    assert [model.name for model in tried] == ["tiny_mixtral", "tiny_olmoe"]


def test_a_damaged_record_is_named_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = grid(tmp_path)
    records.record(plans[2].cell, tmp_path).write()
    path = plans[2].path
    path.write_bytes(path.read_bytes()[:-500])
    monkeypatch.setattr(loading, "load_lm", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(UsageError, match=f"^{path}: not a whole record.*; move it away"):
        run(plans)
    assert path.stat().st_size > 0


def test_samples_are_kept_beside_the_record(tmp_path: Path) -> None:
    words = ("model=tiny_olmoe", "tasks=obqa", "limit=2", "log_samples=true")
    (plan,) = records.planned(*words, f"results_dir={tmp_path}")
    (record,) = run([plan]).records
    assert plan.samples is not None
    lines = [json.loads(line) for line in plan.samples.read_text("utf-8").splitlines()]
    (documents,) = record.documents.values()
    assert [line["acc_norm"] for line in lines] == documents.correct
    assert [line["doc_id"] for line in lines] == [0, 1]
    assert lines[0].keys() >= {"task", "doc", "target", "arguments", "resps", "filtered_resps"}
    assert record_paths(tmp_path) == [plan.path], "no reader takes them for a record"
    run([plan])
    plan.samples.unlink()
    missing = records.planned(*words[:1], "tasks=piqa", *words[2:], f"results_dir={tmp_path}")
    line = r"^log_samples=true: .* obqa .* is finished without this file; .*tasks= of the others"
    for plans in ([plan], [plan, *missing]):
        with pytest.raises(UsageError, match=line):
            run(plans)
