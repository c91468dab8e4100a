"""Sweeps that are killed and restarted, as few as show every kind; and what the judge finds."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from capmoe_eval.bench.chaos import benchmark, faults
from capmoe_eval.bench.chaos.disturbance import Disturbance, Starter, Story, _twice
from capmoe_eval.bench.chaos.judge import Reference
from capmoe_eval.bench.chaos.sweep import Sweep, watch
from capmoe_eval.experiment.interrupts import INTERRUPTED
from capmoe_eval.experiment.record import read_record
from capmoe_eval.experiment.timings.schema import read_evaluation
from tests.bench.test_commands import bench

RECORD = Path(__file__).parents[2] / "results/zoo/zoo_olmoe/obqa"


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """Two directories with the same two records."""
    roots = tmp_path / "one", tmp_path / "other"
    for root in roots:
        place = root / "zoo_olmoe/obqa"
        place.mkdir(parents=True)
        for path in sorted(RECORD.glob("*.json"))[:2]:
            shutil.copy(path, place)
        (root / "inputs.json").write_text("{}")
    return roots


def lose(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def say_something_else(path: Path) -> None:
    record = read_record(path)
    record.content["results"]["openbookqa"]["acc,none"] = 0.123
    record.write()


def computed_later(path: Path) -> None:
    record = read_record(path)
    record.capmoe["provenance"] |= {"date": "2030-01-01T00:00:00+00:00", "seconds": 99.0}
    record.write()


def leave(name: str) -> Callable[[Path], object]:
    return lambda path: path.with_name(name).write_text("")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda _: None, ""),
        (computed_later, ""),
        (lose, "lost"),
        (cut, "wrong"),
        (say_something_else, "wrong"),
        (leave(".x.json.12.abcdefgh.tmp"), "strays"),
        (leave(".host.12.34.abcdefgh.candidate"), "strays"),
        (lambda path: path.with_name(".x.json.reservation").mkdir(), "strays"),
        (lambda path: (path.parents[2] / "inputs.json").write_text("{ }"), "wrong"),
    ],
)
def test_the_judge_finds_what_is_wrong(
    both: tuple[Path, Path], change: Callable[[Path], object], found: str
) -> None:
    root, other = both
    change(min(other.glob("*/*/*.json")))
    verdict = Reference(root).judge(other)
    named = [name for name in ("lost", "wrong", "strays") if getattr(verdict, name)]
    assert named == ([found] if found else [])
    assert verdict.compared == 2 - (found == "lost")


def test_a_record_of_another_cell_is_a_stray(both: tuple[Path, Path]) -> None:
    root, other = both
    next(iter(root.glob("*/*/*.json"))).unlink()
    verdict = Reference(root).judge(other)
    assert (len(verdict.strays), verdict.lost, verdict.wrong) == (1, (), ())


def _wait() -> None:
    """Wait for a signal; `signal.pause` would miss one that comes just before it."""
    while True:
        time.sleep(0.01)


def _until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        watch(0.01)
    pytest.fail("it does not happen")


def test_a_sweep_says_what_it_does_and_how_it_ended(tmp_path: Path) -> None:
    """A terminal, a step on files that it stands still before, and Ctrl-C."""

    def work() -> int:
        print("loading tiny_olmoe …", end="", flush=True)
        (tmp_path / "one").touch()
        print("\r\x1b[2K[1/2] tiny_olmoe obqa score-g1 …", end="", flush=True)
        (tmp_path / "two").touch()
        print("\r\x1b[2K[1/2] tiny_olmoe obqa score-g1: 25.0, 1 s", flush=True)
        _wait()
        return 0

    sweep = Sweep(work, tmp_path, pause_at=2)
    assert sweep.stage == "starting"
    _until(lambda: sweep.paused)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert (sweep.computing, sweep.stage) == ("tiny_olmoe obqa score-g1", "writing")
    sweep.go_on()
    assert sweep.stage == "computing"
    _until(lambda: sweep.computing is None)
    assert (tmp_path / "two").exists() and sweep.stage == "writing"
    sweep.control_c()
    _until(lambda: sweep.status is not None)
    assert sweep.status == 70 and "KeyboardInterrupt" in sweep.text


def test_a_cell_that_two_compute_is_noticed(tmp_path: Path) -> None:
    def work() -> int:
        print("[1/2] tiny_olmoe obqa score-g1 …", flush=True)
        _wait()
        return 0

    sweeps = [Sweep(work, tmp_path) for _ in range(2)]
    _until(lambda: all(sweep.computing for sweep in sweeps))
    assert _twice(sweeps) == 1 and _twice(sweeps[:1]) == 0
    for sweep in sweeps:
        sweep.end()


class _Least(random.Random):
    """Draws the first step."""

    def random(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("status", "line", "documented"),
    [(143, INTERRUPTED, True), (143, "Traceback", False), (1, INTERRUPTED, False)],
)
def test_an_end_that_is_not_as_documented_is_noted(
    tmp_path: Path, status: int, line: str, documented: bool
) -> None:
    def told_to_end() -> int:
        def end(*_: object) -> None:
            print(line, flush=True)
            os._exit(status)

        signal.signal(signal.SIGTERM, end)
        (tmp_path / "file").touch()
        return 0

    works = iter((told_to_end, lambda: 0))  # one process after the other

    def start(pause_at: int | None, rank: int, port: int) -> Sweep:
        return Sweep(next(works), tmp_path, pause_at=pause_at)

    term = faults.FAULTS["term"]
    one = {"processes": 1, "kills": 1, "missing": lambda: 1.0}
    steps = Disturbance(term, Starter(start, 1.0), draws=_Least(0), **one).run()  # type: ignore[arg-type]
    story: Story | None = None
    while story is None:
        try:
            next(steps)
            watch(0.01)
        except StopIteration as end:
            story = end.value
    assert [(kill.stage, kill.at_step) for kill in story.kills] == [("writing", True)]
    assert (story.restarts, story.failed, story.early) == (1, [], 0)
    assert bool(story.otherwise) is not documented


@pytest.mark.slow
def test_chaos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kills of forks; a disk cannot be mounted here, so files are limited."""

    def refused(_: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(benchmark, "Disk", refused)
    kinds = ["kill", "term", "disk"]
    status, content = bench(tmp_path, "chaos", "--kills", "6", "--seed", "4", "--kinds", *kinds)
    assert status == 0
    found = read_evaluation(tmp_path / "chaos.json").faults
    assert {kind: each.kills for kind, each in found.items()} == dict.fromkeys(kinds, 2)
    for faults_ in found.values():
        assert faults_.problems == 0, faults_
        assert faults_.compared == 8 * faults_.directories
        assert sum(faults_.stages.values()) == 2
    # Which kills leave something to do depends on how busy the machine is.
    assert sum(each.restarts for each in found.values()) >= 1
    assert "as no disk can be mounted" in found["disk"].about
    assert [target["met"] for target in content["targets"]] == [False, True, True, True]
    assert list(tmp_path.iterdir()) == [tmp_path / "chaos.json"]
