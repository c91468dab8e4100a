"""Benchmark `scale`: time and memory of what reads a results directory, over its records."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from capmoe_eval.bench.child import Command, Spent, check_room, spend
from capmoe_eval.bench.options import different_sizes
from capmoe_eval.bench.rounds import CPU, finish, say, target_of
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.configuration import Plan, plans
from capmoe_eval.experiment.files import write_bytes
from capmoe_eval.experiment.record import Record, relabelled
from capmoe_eval.experiment.results import each_record
from capmoe_eval.experiment.selection import composed
from capmoe_eval.experiment.timings.spread import Target

_SMALL: Final = 3000  # sizes up to it are measured several times
_QUEUED: Final = 30_000  # of more cells the queue is not timed: it costs as much as all readers
_GAMMAS: Final = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5)
_PROFILE: Final = "profile=zoo"

# A frame, and what an index of the records would cost: one file that holds it, and a look at every
# record's time.
_FRAME: Final = """
import json, os, sys, time
from capmoe_eval import load_frame
from capmoe_eval.experiment.results import record_paths
clock = time.process_time
frame = load_frame(sys.argv[1])
told, began = {"rows": len(frame)}, clock()
frame.to_parquet(sys.argv[2]); told["write"] = clock() - began; began = clock()
import pandas; assert len(pandas.read_parquet(sys.argv[2])) == len(frame)
told["read"] = clock() - began; began = clock()
paths = record_paths(__import__("pathlib").Path(sys.argv[1]))
told["list"] = clock() - began; began = clock()
for path in paths: os.stat(path)
told["look"] = clock() - began
told["bytes"] = os.path.getsize(sys.argv[2])
print(json.dumps(told))
"""
# Every cell of a grid of which nothing is finished: reserved, and released as it is.
_QUEUE: Final = """
import sys
from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.queue import Queue
from capmoe_eval.experiment.selection import composed
print(sum(turn.reservation is not None for turn in Queue(plans(composed(sys.argv[1:])))))
"""


def run(given: argparse.Namespace) -> None:
    """Make the records, time what reads them, print the costs and write ``scale.json``."""
    sizes = different_sizes("--records", given.records)
    bases = _bases(given.results)
    whole = len(bases) * len(_GAMMAS)  # cells of a grid
    different_sizes("--records", [whole * math.ceil(size / whole) for size in sizes])
    lengths = [record.path.stat().st_size for record in itertools.chain(*bases.values())]
    needed = 1.3 * sizes[-1] * statistics.fmean(lengths) / 1e9
    check_room(f"--records={sizes[-1]}", needed, tempfile.gettempdir(), "take fewer, or set TMPDIR")
    counts: list[int] = []
    spent: dict[str, list[Spent]] = {}
    index: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="capmoe-scale-") as scratch:
        root = Path(scratch, "results/zoo")
        tables = _copy_tables(given.results, root)
        for size in (0, *sizes):  # 0: one record of each model and task, for what a start costs
            words = _grid(size, len(bases), root)
            cells = plans(composed(words))
            say(f"scale: {len(cells):,} records")
            _make(cells, bases)
            counts.append(len(cells))
            repeats = given.repeats if size <= _SMALL else 1
            commands = list(_commands(words, root, len(cells), tables))
            with ThreadPoolExecutor(given.jobs) as pool:
                tries = [list(pool.map(spend, commands)) for _ in range(repeats)]
            for command, one in zip(commands, map(min, zip(*tries, strict=True)), strict=True):
                spent.setdefault(command.name, []).append(one)
                say(f"  {command.name}: {one.seconds:.1f} s, {one.memory:.0f} MiB")
            index[str(len(cells))] = json.loads(spent["frame"][-1].output)
            shutil.rmtree(root.parent / "site", ignore_errors=True)
            shutil.rmtree(root.parent / "queue", ignore_errors=True)
    finish(
        given,
        CPU,
        list(_targets(counts, spent)),
        ("repeats", "jobs"),
        records=counts,
        others=tables,
        bytes={"median": statistics.median(lengths), "mean": statistics.fmean(lengths)},
        seconds={name: [one.seconds for one in all_] for name, all_ in spent.items()},
        memory_mib={name: [one.memory for one in all_] for name, all_ in spent.items()},
        index=index,
    )


def _bases(results: Path) -> dict[tuple[str, str], list[Record]]:
    """Return a directory's text records by model and task, for those with all tasks of Table 2."""
    config = composed([_PROFILE, "experiment=table2"])
    models, tasks = list(config.profile.replicate), list(config.tasks)
    found: dict[tuple[str, str], list[Record]]
    found = {key: [] for key in itertools.product(models, tasks)}
    for record in each_record(results, broken=[]):
        if (key := (record.model, record.task)) in found:
            found[key].append(record)
    lacking = next((key for key, records in found.items() if not records), None)
    if lacking:
        model, task = lacking
        raise UsageError(
            f"--results={results}: has no record of model={model} tasks={task}; name the results "
            "of the embedded models"
        )
    return found


def _copy_tables(results: Path, root: Path) -> int:
    """Copy the finished records of Table 2; return their number."""
    planned = plans(composed([_PROFILE, "experiment=table2", f"results_dir={results}"]))
    copied = [plan for plan in planned if plan.path.is_file()]
    for plan in copied:
        write_bytes(plan.cell.path(root), plan.path.read_bytes(), durable=False)
    return len(copied)


def _grid(records: int, directories: int, root: Path) -> list[str]:
    """Return the command line of a grid of at least so many cells; a larger one contains it."""
    config = composed([_PROFILE])
    gammas = _GAMMAS if records else _GAMMAS[:1]
    seeds = range(max(1, math.ceil(records / directories / len(gammas))))
    return [
        _PROFILE,
        "method=random",
        f"results_dir={root}",
        f"+grid.model=[{','.join(config.profile.replicate)}]",
        f"+grid.tasks=[{','.join(config.tasks)}]",
        f"+grid.gamma=[{','.join(map(str, gammas))}]",
        f"+grid.seed=[{','.join(map(str, seeds))}]",
    ]


def _make(cells: Sequence[Plan], bases: dict[tuple[str, str], list[Record]]) -> None:
    """Write the records that are missing; each is made of one of its model and task, in turn."""
    turn = {key: itertools.cycle(found) for key, found in bases.items()}
    for plan in cells:
        base = next(turn[plan.cell.model.name, plan.cell.task.name])
        if not plan.path.exists():
            made = relabelled(base, base.path.read_bytes(), plan.cell)
            write_bytes(plan.path, made, durable=False)


def _commands(words: list[str], root: Path, records: int, tables: int) -> Iterator[Command]:
    """Yield the commands, of which no two write the same file."""
    all_, out = records + tables, root.parent
    place = [_PROFILE, f"results_dir={root}"]
    finished = f"0 computed, {records} finished before, 0 failed"
    yield Command("run", ["-m", "capmoe_eval", *words], finished)
    queue = [word for word in words if not word.startswith("results_dir=")]
    queue.append(f"results_dir={out / 'queue'}")
    if records <= _QUEUED:
        yield Command("queue", ["-c", _QUEUE, *queue], f"{records}\n")
    frame = ["-c", _FRAME, str(root), f"{out}/frame.parquet"]
    yield Command("frame", frame, f'"rows": {all_},')
    table = ["-m", "capmoe_eval.tables", "table2", f"--out={out / 'tables'}", *place]
    yield Command("tables", table, "written: ")
    site = ["-m", "capmoe_eval.site", f"--out={out / 'site'}", *place]
    yield Command("site", site, f"profile zoo: {all_} records")


def _targets(counts: Sequence[int], spent: dict[str, list[Spent]]) -> Iterator[Target]:
    """Yield the growth of each command's cost of a record, and the memory that a record adds."""
    abouts = {
        "run": "the start of a run that finds all cells finished",
        "queue": "giving out every cell of a run",
        "frame": "load_frame",
        "site": "the site",
    }
    for name, about in abouts.items():
        sizes = counts[: len(spent[name])]
        if len(sizes) < 3:
            continue
        first, last = sizes[1], sizes[-1]
        costs = [
            (one.seconds - spent[name][0].seconds) / (count - counts[0])
            for one, count in zip(spent[name][1:], sizes[1:], strict=True)
        ]
        words = {"command": name, "about": about, "n": (first, last)}
        times = (1000 * costs[0], 1000 * costs[-1])
        yield target_of("scale_cost", [costs[-1] / costs[0]], {**words, "ms": times})
        memory = spent[name][-1].memory
        added = (memory - spent[name][1].memory) / (last - first)
        yield target_of("scale_memory", [1024 * added], {**words, "memory": memory})
    few, many = (spent["tables"][at].seconds for at in (1, -1))
    sizes = (counts[1], counts[-1])
    yield target_of("scale_tables", [many / few], {"n": sizes, "seconds": many})
