"""Benchmark `cells`: how time and memory grow with cells and documents."""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Sequence

import psutil

from capmoe_eval.bench.options import check_names, different_sizes
from capmoe_eval.bench.rounds import CPU, finish, say, target_of
from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.progress import Progress
from capmoe_eval.evaluation.run import run as run_plans
from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.selection import composed
from capmoe_eval.experiment.timings.spread import Target


def run(given: argparse.Namespace) -> None:
    """Run the cells, print how cost and memory grew, and write ``cells.json``."""
    if given.cells < 40:
        raise UsageError(f"--cells={given.cells}: must be at least 40")
    sizes = different_sizes("--documents", given.documents)
    if given.repeats < 2:
        raise UsageError(f"--repeats={given.repeats}: must be at least 2 (one loads the model)")
    check_names(given.model, [given.task])
    with tempfile.TemporaryDirectory() as scratch:
        setting = [f"model={given.model}", f"tasks={given.task}", "method=random", "gamma=1.0"]
        setting += ["device=cpu", f"results_dir={scratch}"]
        seeds = list(range(given.cells + given.repeats))
        say(f"cells: {given.cells} cells of {given.limit} documents")
        grid = [f"limit={given.limit}", f"+grid.seed={seeds[: given.cells]}"]
        many = _compute([*setting, *grid])
        say(f"cells: {', '.join(map(str, sizes))} documents, {given.repeats} times")
        grid = [f"+grid.seed={seeds[given.cells :]}", f"+grid.limit={sizes}"]
        longer = _compute([*setting, *grid])
    finish(
        given,
        CPU,
        [*_by_cells(many), _by_documents(longer, sizes)],
        ("cells", "limit", "model", "task"),
        seconds=many.seconds,
        memory_mib=many.memory,
        documents=longer.documents,
        documents_seconds=longer.seconds,
    )


class _Growth(Progress):
    """Notes time and memory at the end of every cell, instead of showing it."""

    def __init__(self) -> None:
        super().__init__(0, io.StringIO())
        self.seconds: list[float] = []
        self.memory: list[float] = []
        self.documents: list[int] = []
        self._process = psutil.Process()
        self._before = time.perf_counter()

    def finish(self, record: Record) -> None:
        """Note a cell that is written."""
        now = time.perf_counter()
        self.seconds.append(now - self._before)
        self.memory.append(self._process.memory_info().rss / 2**20)
        self.documents.append(record.n)
        self._before = time.perf_counter()


def _compute(overrides: list[str]) -> _Growth:
    growth = _Growth()
    failures = run_plans(plans(composed(overrides)), growth).failures
    if failures:
        cell, reason = failures[0]
        raise UsageError(f"{cell}: {reason}")
    return growth


def _by_cells(growth: _Growth) -> list[Target]:
    """Compare the last fifth of the cells with the second; in the first, things are still built."""
    fifth = len(growth.seconds) // 5
    early, late = slice(fifth, 2 * fifth), slice(-fifth, None)
    cost = statistics.median(growth.seconds[early])
    memory = statistics.median(growth.memory[early])
    times = [spent / cost for spent in growth.seconds[late]]
    held = [mebibytes / memory for mebibytes in growth.memory[late]]
    words = {"cells": len(growth.seconds), "memory": memory}
    return [
        target_of("cells_time", times, words),
        target_of("cells_memory", held, words),
    ]


def _by_documents(growth: _Growth, sizes: Sequence[int]) -> Target:
    """Compare the time that a document adds between sizes of a cell, within each repetition."""
    starts = range(0, len(growth.seconds), len(sizes))
    rounds = [growth.seconds[start : start + len(sizes)] for start in starts]
    n = growth.documents[: len(sizes)]
    if n[-2] == n[-1]:
        raise UsageError(f"--documents={sizes[-1]}: there are only {n[-1]}; take fewer")
    ratios = [
        (spent[-1] - spent[-2]) / (n[-1] - n[-2]) * (n[1] - n[0]) / (spent[1] - spent[0])
        for spent in rounds[1:]
    ]
    return target_of("cells_documents", ratios, {"n": [*n[:2], *n[-2:]]})
