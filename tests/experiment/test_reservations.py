"""Reservations: one holder, whatever dies when, and nothing left behind."""

import dataclasses
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from capmoe_eval.evaluation.run import reserving
from capmoe_eval.experiment import reservations
from capmoe_eval.experiment.reservations import hold, holder_of, reserve, reserved, tidy
from tests.records import planned

HERE = f"{socket.gethostname()}:{os.getpid()}"
KILLED = """\
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from capmoe_eval.experiment.reservations import reserve
record = Path(sys.argv[1])
kept = reserve(record)
record.with_name(f".{record.name}.{os.getpid()}.0a1b2c3d.tmp").touch()
print("held", flush=True)
signal.pause()
"""


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "model/task/score-g1-0123456789.json"


def left(record: Path) -> list[str]:
    return sorted(path.name for path in record.parent.iterdir())


def holding(record: Path) -> subprocess.Popen[str]:
    """Another process, which holds a record until it is killed."""
    words = [sys.executable, "-c", KILLED, str(record)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_one_holds_it_and_nothing_stays(record: Path) -> None:
    first = reserve(record)
    assert first is not None
    with first:
        assert holder_of(record) == HERE
        assert reserved([record.parent, record.parent / "nowhere"]) == {record}
        assert reserve(record) is None
        assert len(left(record)) == 1, "a second attempt leaves nothing"
    assert left(record) == []
    assert holder_of(record) is None
    assert reserve(record) is not None


def test_another_process_holds_it_until_it_is_killed(record: Path) -> None:
    with holding(record) as process:
        others = record.with_name(f".{record.name[1:]}.123.0a1b2c3d.tmp")
        others.touch()
        assert reserve(record) is None
        assert holder_of(record) == f"{socket.gethostname()}:{process.pid}"
        tidy([record.parent])
        assert reserve(record) is None, "what is held stays"
        process.send_signal(signal.SIGSTOP)
        assert reserve(record) is None, "also of a process that stands still"
        process.kill()
    assert reserved([record.parent]) == {record}
    taken = reserve(record)
    assert taken is not None
    with taken:
        assert holder_of(record) == HERE
    assert left(record) == [others.name], "what it left of the record is removed, and no other"


def test_an_interrupted_one_leaves_nothing(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Path) -> None:
        assert len(left(record)) == 1
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(reservations, "remove_temporaries", interrupted)
        reserve(record)
    assert left(record) == []
    plan = dataclasses.replace(planned("tasks=[obqa]", "limit=2")[0], root=record.parents[2])
    with pytest.raises(KeyboardInterrupt), reserving([plan]):
        kept = reserve(plan.path)  # before its block begins
        assert kept is not None
        raise KeyboardInterrupt
    assert left(plan.path) == []


def test_who_waits_says_for_whom_once(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on when the file is free: nothing that was computed is given up."""
    monkeypatch.setattr(reservations, "NOTICE", 0.01)
    warned: list[str] = []
    with holding(record) as process:

        def warn(line: str) -> None:
            warned.append(line)
            process.kill()

        with hold(record, warn):
            assert holder_of(record) == HERE
    assert warned == [f"waiting for {socket.gethostname()}:{process.pid}, which holds {record}"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_where_there_are_no_locks_the_file_is_the_lock(
    record: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    first = reserve(record)
    assert first is not None
    with first:
        assert holder_of(record) == HERE
        assert reserve(record) is None
    assert left(record) == []


def test_a_file_is_held_by_one_at_a_time(record: Path) -> None:
    """Also between the removal of a lock's file and the next who makes it."""
    inside, most = [], []

    def work(_: int) -> None:
        with hold(record):
            inside.append(None)
            most.append(len(inside))
            inside.pop()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(40)))
    assert most == [1] * 40
    assert left(record) == []
