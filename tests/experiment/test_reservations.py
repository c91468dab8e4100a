"""Reservations: one holder, whatever dies when, and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment import reservations
from capmoe_eval.experiment.reservations import (
    NOTICE,
    SILENCE,
    Holder,
    Reservation,
    Watch,
    hold,
    holder_of,
    refuse_others,
    release_all,
    reserve,
    tidy,
)

ELSEWHERE = "00000000"
"""A machine that is not this one."""


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "model/task/score-g1-0123456789.json"


def left(record: Path) -> list[str]:
    return sorted(path.name for path in record.parent.iterdir()) if record.parent.exists() else []


def forged(
    record: Path, pid: int, start: str, system: str = ELSEWHERE, host: str = "node7"
) -> Path:
    """A reservation as another process would have made it."""
    place = reservations._place(record)
    place.mkdir(parents=True)
    file = place / f"node7.{pid}.{start}.{system}.abcdef01"
    file.touch()
    return file


def died(record: Path) -> Path:
    """A reservation of a process of this machine that is no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return forged(record, process.pid, "123", reservations._system())


def test_one_holds_it_and_nothing_stays(record: Path) -> None:
    first = reserve(record, Watch())
    assert first is not None
    with first:
        assert first.held()
        assert str(holder_of(record)).endswith(f":{os.getpid()}")
        assert reserve(record, Watch()) is None
        assert len(left(record)) == 1, "a second attempt leaves nothing"
    assert not first.held()
    assert left(record) == []
    assert holder_of(record) is None
    assert reserve(record, Watch()) is not None


def test_an_empty_one_is_free(record: Path) -> None:
    """As of a process that was killed between the two steps of a release."""
    reservations._place(record).mkdir(parents=True)
    assert reserve(record, Watch()) is not None


def test_a_dead_process_of_this_machine_is_followed_at_once(record: Path) -> None:
    file = died(record)
    temporary = record.with_name(f".{record.name}.123.0a1b2c3d.tmp")
    others = record.with_name(f".{record.name[1:]}.123.0a1b2c3d.tmp")
    for path in (temporary, others):
        path.touch()
    watch = Watch()
    assert watch.live_holder(record) is None
    taken = reserve(record, watch)
    assert taken is not None
    assert taken.held()
    assert not file.exists()
    assert not temporary.exists(), "what it left of the record is removed"
    assert others.exists(), "another record's is not"


def test_another_process_with_its_number_is_not_the_holder(record: Path) -> None:
    forged(record, os.getpid(), "1", reservations._system())
    assert reserve(record, Watch()) is not None


def test_a_living_process_keeps_it_without_a_sign(record: Path) -> None:
    start = reservations._started(os.getpid())
    assert start is not None
    file = forged(record, os.getpid(), start, reservations._system())
    os.utime(file, (0, 0))
    assert reserve(record, Watch()) is None


def test_a_killed_process_that_nobody_has_waited_for_is_dead() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        start = reservations._started(process.pid)
        assert start is not None
        assert reservations._lives(process.pid, start)
        process.kill()
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT) is None:
            pass
        assert not reservations._lives(process.pid, start)


def test_a_process_that_proc_hides_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(reservations, "_started", lambda _: None)
    assert not reservations._lives(os.getpid(), "5"), "it can be asked, and is another"
    monkeypatch.setattr(os, "kill", refuse)
    assert reservations._lives(os.getpid(), "5")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(reservations.time, "monotonic", lambda: now[0])
    yield now


def test_another_machine_is_dead_when_it_was_silent_for_long(
    record: Path, clock: list[float]
) -> None:
    """By this machine's own watch: the time of the file is another clock's."""
    file = forged(record, os.getpid(), "1")
    os.utime(file, (0, 0))
    watch = Watch()
    assert reserve(record, watch) is None, "nothing is known of it yet"
    clock[0] = SILENCE
    assert reserve(record, watch) is None
    os.utime(file, (5, 5))
    clock[0] = SILENCE + 1
    assert reserve(record, watch) is None, "it gave a sign"
    clock[0] = 2 * SILENCE + 1
    assert reserve(record, watch) is None
    clock[0] = 2 * SILENCE + 1.1
    assert str(holder_of(record)) == f"node7:{os.getpid()}"
    assert reserve(record, watch) is not None


def test_who_took_it_over_is_watched_anew(record: Path, clock: list[float]) -> None:
    file = forged(record, 1, "1")
    watch = Watch()
    assert reserve(record, watch) is None
    clock[0] = SILENCE + 1
    file.rename(file.with_name(f"node8.2.1.{ELSEWHERE}.abcdef02"))  # its time is the old one
    assert reserve(record, watch) is None


def test_the_holder_gives_signs(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservations, "BEAT", 0.001)
    one = reserve(record, Watch())
    holder = holder_of(record)
    assert one is not None
    assert holder is not None
    os.utime(holder.file, (0, 0))
    with one:
        deadline = time.monotonic() + 60
        while holder.file.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert holder.file.stat().st_mtime > 0
    threads = [thread for thread in threading.enumerate() if "_renew" in thread.name]
    for thread in threads:
        thread.join(60)
    assert left(record) == [], "no sign comes after the release"


def test_who_lost_it_does_not_remove_the_new_holders(record: Path) -> None:
    one = reserve(record, Watch())
    old = holder_of(record)
    assert one is not None
    assert old is not None
    with one:
        new = old.file.rename(old.file.with_name(f"node8.2.1.{ELSEWHERE}.abcdef02"))
        assert not one.held()
    assert holder_of(record) == Holder(new)


def test_a_file_of_unknown_name_is_a_holder_that_gives_no_sign(
    record: Path, clock: list[float]
) -> None:
    place = reservations._place(record)
    place.mkdir(parents=True)
    (place / "note.txt").touch()
    watch = Watch()
    assert reserve(record, watch) is None
    assert str(holder_of(record)) == "note.txt"
    clock[0] = SILENCE + 1
    assert reserve(record, watch) is not None


def test_a_rename_that_is_tried_twice_is_no_failure(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over NFS, where the answer to the first attempt may be lost."""
    rename = Path.rename

    def twice(path: Path, target: Path) -> Path:
        rename(path, target)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", twice)
    one = reserve(record, Watch())
    assert one is not None
    assert one.held()
    with one:
        pass
    died(record)
    assert reserve(record, Watch()) is not None


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        reserve(tmp_path / "file/task/record.json", Watch())


def test_only_what_the_dead_left_is_removed(record: Path, tmp_path: Path) -> None:
    task = record.parent
    dead = died(record)
    old = forged(task / "old.json", 1, "1")
    os.utime(old, (0, 0))
    empty = task / ".empty.json.reservation"
    empty.mkdir()
    candidate = task / f".{dead.name}.candidate"
    candidate.mkdir()
    kept = [
        forged(task / "recent.json", 1, "1").parent,
        task / f".node7.1.1.{ELSEWHERE}.abcdef01.candidate",
        task / ".x.json.1.0a1b2c3d.tmp",
    ]
    kept[1].mkdir()
    kept[2].touch()
    with ExitStack() as stack:
        own = reserve(record.with_name("own.json"), Watch())
        assert own is not None
        stack.enter_context(own)
        tidy([task, tmp_path / "nowhere"])
        assert own.held()
        assert set(task.iterdir()) == {*kept, reservations._place(task / "own.json")}


def test_what_an_interrupt_left_of_this_process_is_removed(record: Path) -> None:
    """It came between the reservation and the block that releases it."""
    assert reserve(record, Watch()) is not None
    candidate = record.with_name(f".{reservations._own_name()}.candidate")
    candidate.mkdir()
    others = forged(record.with_name("theirs.json"), 1, "1")
    release_all([record.parent, record.parent / "nowhere"])
    assert left(record) == [others.parent.name]


def test_of_two_that_find_the_same_dead_holder_one_wins(record: Path) -> None:
    died(record)
    first: list[Reservation | None] = []

    class Slow(Watch):
        def dead(self, holder: Holder) -> bool:
            first.append(reserve(record, Watch()))
            return super().dead(holder)

    assert reserve(record, Slow()) is None
    assert first[0] is not None
    assert first[0].held()


def test_of_two_that_find_nobody_one_wins(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[Reservation | None] = []
    occupy = reservations._occupy

    def slow(own: Path) -> None:
        monkeypatch.setattr(reservations, "_occupy", occupy)
        first.append(reserve(record, Watch()))
        occupy(own)

    monkeypatch.setattr(reservations, "_occupy", slow)
    assert reserve(record, Watch()) is None
    assert first[0] is not None
    assert first[0].held()
    assert len(left(record)) == 1


def _contend(record: Path, start: object, won: object, names: list[str]) -> None:
    watch = Watch()
    start.wait()  # type: ignore[attr-defined]
    for name in names:
        if reserve(record.with_name(name), watch) is not None:
            won.put(name)  # type: ignore[attr-defined]
    start.wait()  # type: ignore[attr-defined] # who ended is dead, and would be followed


@pytest.mark.parametrize("stale", [False, True])
def test_of_several_at_once_one_gets_it(record: Path, stale: bool) -> None:
    """Free, or of a dead process: two that find the same do not both win."""
    names = [f"{number}.json" for number in range(40)]
    if stale:
        for name in names:
            forged(record.with_name(name), 2**22 + 1, "1", reservations._system())
    context = multiprocessing.get_context("fork")
    start, won = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_contend, args=(record, start, won, names)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    winners = [won.get(timeout=60) for _ in names]
    for process in processes:
        process.join(60)
    assert sorted(winners) == sorted(names)
    assert won.empty()


# Files that are held while they are written.


def test_a_file_is_held_by_one_at_a_time(record: Path) -> None:
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


def test_what_a_dead_process_holds_is_taken_over(record: Path) -> None:
    died(record)
    with hold(record):
        assert holder_of(record) is not None
    assert left(record) == []


def test_who_waits_says_for_whom_once(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on when the file is free: nothing that was computed is given up."""
    now, warned = [0.0], []
    file = forged(record, os.getpid(), str(reservations._started(os.getpid())), _here())

    def sleep(_: float) -> None:
        now[0] += 1.0
        if now[0] > 10 * NOTICE:
            file.unlink()

    monkeypatch.setattr(reservations.time, "sleep", sleep)
    monkeypatch.setattr(reservations.time, "monotonic", lambda: now[0])
    with hold(record, warned.append):
        pass
    assert warned == [f"waiting for node7:{os.getpid()}, which holds {record}"]


def _here() -> str:
    return reservations._system()


def test_what_is_no_reservation_is_refused_and_left_alone(record: Path) -> None:
    place = reservations._place(record)
    place.parent.mkdir(parents=True)
    place.write_text("mine")
    for refused in (
        lambda: reserve(record, Watch()),
        lambda: hold(record).__enter__(),
        lambda: refuse_others([record.parent, record.parent / "nowhere"]),
    ):
        with pytest.raises(UsageError, match=r"is no reservation of this suite.*delete it") as line:
            refused()
        assert str(line.value).startswith(f"{place}: ")
        assert "\n" not in str(line.value)
    assert left(record) == [place.name]
    assert place.read_text() == "mine"
