"""What grows with cells or records, and what does not."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import pytest
import torch

from capmoe_eval.experiment.results import each_record
from capmoe_eval.results.frames import load_frame
from capmoe_eval.routing.registry import create_method
from tests.evaluation.test_parallel import run_here
from tests.records import cell, record

DOCUMENTS = 2000


def written(root: Path, records: int) -> Path:
    for seed in range(records):
        of = cell(create_method("random", 1.0, seed=seed))
        record(of, root, [seed % 2] * DOCUMENTS).write()
    return root


def peak(root: Path) -> int:
    """Return the most bytes that a frame of all records takes."""
    tracemalloc.start()
    frame = load_frame(root)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(frame) == len(list(root.rglob("random*.json")))
    return peak_bytes


def test_a_frame_holds_rows_and_no_records(tmp_path: Path) -> None:
    few, many = written(tmp_path / "few", 10), written(tmp_path / "many", 40)
    load_frame(few)  # what is imported and built once does not count
    tracemalloc.start()
    records = list(each_record(few, broken=[]))
    of_record = tracemalloc.get_traced_memory()[0] / len(records)
    tracemalloc.stop()
    assert (peak(many) - peak(few)) / 30 < of_record / 4


@pytest.mark.slow
def test_no_tensor_of_a_cell_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of eight cells leaves as many tensors as one of two."""
    words = ["model=tiny_olmoe", "tasks=obqa", "limit=2", "method=random", "gamma=1.0"]

    def tensors(*seeds: int) -> int:
        grid = f"+grid.seed=[{','.join(map(str, seeds))}]"
        assert run_here(monkeypatch, *words, grid, f"results_dir={tmp_path}") == 0
        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    assert tensors(0, 1) >= tensors(*range(2, 10))
