"""What grows with cells or records, and what does not."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.evaluation.test_parallel import run_here


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
