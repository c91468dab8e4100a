"""Sweeps that are killed at random moments and started again have the records of one that is not.

Every sweep is forked from a server that has imported everything. It ends itself just before a step
on the files of its results directory, or after some seconds; a second one runs beside it.
"""

import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from capmoe_eval.__main__ import main
from capmoe_eval.experiment.application import INTERRUPTED, run_program
from capmoe_eval.experiment.results import read_results
from tests.nightly import nightly_but
from tests.records import undated
from tests.wrapper.parallel.processes import free_port

pytestmark = pytest.mark.slow

GRID = (
    "grid.model=[tiny_olmoe,tiny_mixtral]",
    "grid.method=[score,random]",
    "grid.gamma=[1.0,2.0]",
    *("tasks=obqa", "limit=2", "batch_size=2", "ep_size=2", "device=cpu", "threads=1"),
)
CELLS = 8
STEPS = 25  # of a sweep until it is killed at one, on average
SECONDS = 4.0  # after which it is killed at the latest
OPENS_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [f"capmoe_eval.evaluation.{name}" for name in ("run", "evaluate", "lm", "loading")]
)


def send(*numbers: signal.Signals) -> Callable[[], None]:
    """Return what sends signals to the process itself, one after the other."""
    return lambda: [os.kill(os.getpid(), number) for number in numbers] and None


def limit_files() -> None:
    """Let no file have room for a record of 10 kB, as on a full disk; the log is emptied first.

    The log needs room for the table of a sweep that is about to end, and for the message after it.
    """
    os.ftruncate(sys.stdout.fileno(), 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))


class Fault(NamedTuple):
    """Something that happens to a sweep."""

    strike: Callable[[], None]
    statuses: tuple[int, ...]  # with which the sweep may end then, beside 0
    line: str = ""  # in what it prints then
    ranks: int = 1


FAULTS = {
    "SIGKILL": Fault(send(signal.SIGKILL), (-9,)),
    "SIGTERM": Fault(send(signal.SIGTERM), (128 + signal.SIGTERM,), INTERRUPTED),
    "Ctrl-C": Fault(send(signal.SIGINT), (128 + signal.SIGINT,), INTERRUPTED),
    "Ctrl-C twice": Fault(send(signal.SIGINT, signal.SIGINT), (128 + signal.SIGINT,)),
    "a full disk": Fault(limit_files, (2,), "cannot be written"),
    "SIGKILL of a rank": Fault(send(signal.SIGKILL), (-9,), ranks=2),
}


def sweep(
    root: Path, log: Path, environment: Mapping[str, str], kind: str | None, moment: float
) -> None:
    """Compute the grid; a fault happens before a step on files, or after so many seconds."""
    os.environ.update(environment)
    sys.stdin, sys.stdout = Path(os.devnull).open(), log.open("a", buffering=1)  # noqa: SIM115
    sys.stderr = sys.stdout
    parallel = ["parallel=ep"] if "RANK" in environment else []
    sys.argv = ["capmoe_eval", *GRID, f"results_dir={root}", *parallel]
    if kind is not None:
        strike_at(root, FAULTS[kind].strike, moment)
    run_program(main)


def strike_at(root: Path, strike: Callable[[], None], moment: float) -> None:
    """Have something happen at a step, or after some seconds if the moment is below 0."""
    if moment < 0:
        timer = threading.Timer(-moment, strike)
        timer.daemon = True  # else a sweep that has ended waits for its fault
        timer.start()
        return
    left = int(moment)

    def step(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "open"):
            return
        if not left or not str(arguments[0]).startswith(str(root)):
            return
        if event == "open" and not arguments[2] & OPENS_TO_WRITE:
            return
        left -= 1
        if not left:
            strike()

    sys.addaudithook(step)


def start(
    folder: Path, ranks: int, kind: str | None = None, moment: float = 0
) -> list[BaseProcess]:
    """Start a sweep, or its ranks, of which the last has the fault.

    The folder has results, a cache of the user, and what sweeps print, with a fault apart.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = []
    log = folder / ("log" if kind is None else "log-of-victims")
    for rank in range(ranks):
        environment = {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        if ranks > 1:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
            environment |= address | {name: str(value) for name, value in numbers.items()}
        fault = kind if rank == ranks - 1 else None
        words = (folder / "results", log, environment, fault, moment)
        processes.append(FORKS.Process(target=sweep, args=words))
        processes[-1].start()
    return processes


def left(folder: Path) -> tuple[dict[str, Any], set[str]]:
    """Return the records by their paths, and the names of all files."""
    root, broken = folder / "results", list[str]()
    results = read_results(root, broken)
    assert broken == []
    records = {str(r.path.relative_to(root)): undated(r.content) for r in results}
    return records, {str(path.relative_to(root)) for path in root.rglob("*")}


def ended(processes: list[BaseProcess]) -> list[int]:
    """Return the statuses of processes; ranks that outlive a killed one are killed, as by srun."""
    processes[-1].join(300)
    for process in processes:
        process.join(60)
        process.kill()
        process.join()
    return [int(process.exitcode or 0) for process in processes]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What a run of one process leaves, and one of two ranks."""
    contents = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp(f"undisturbed{ranks}")
        assert ended(start(folder, ranks)) == [0] * ranks, (folder / "log").read_text()
        contents[ranks] = left(folder)
        assert len(contents[ranks][0]) == CELLS
    return contents


@pytest.mark.parametrize("kind", nightly_but(("SIGKILL", "a full disk"), FAULTS))
def test_nothing_is_lost_or_wrong(kind: str, undisturbed: dict[int, Any], tmp_path: Path) -> None:
    fault, draws = FAULTS[kind], random.Random(kind)
    for _ in range(4):
        by_steps = draws.random() < 0.7
        moment = 1 + draws.expovariate(1 / STEPS) if by_steps else -draws.uniform(0, SECONDS)
        victim = start(tmp_path, fault.ranks, kind, moment)
        beside = [] if fault.ranks > 1 else start(tmp_path, 1)
        status = ended(victim)[-1]
        printed = (tmp_path / "log-of-victims").read_text()
        assert status in (0, *fault.statuses), printed
        assert status <= 0 or fault.line in printed
        # Some sweeps are alone with what the victim left, others are killed with it.
        if beside and draws.random() < 0.5:
            beside[0].kill()
        assert not beside or ended(beside)[0] in (0, -9)
    assert ended(start(tmp_path, fault.ranks)) == [0] * fault.ranks
    assert left(tmp_path) == undisturbed[fault.ranks]
