"""Packed records are the same records: to every reader, and after a kill between any two steps."""

import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from capmoe_eval import load_frame
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment import packs
from capmoe_eval.experiment.files import write_bytes
from capmoe_eval.experiment.packs import SUFFIX, pack_path, record_bytes
from capmoe_eval.experiment.record import read_record
from capmoe_eval.experiment.reservations import reserve
from capmoe_eval.experiment.results import loose_paths, read_results, record_paths, stored
from capmoe_eval.results import packing
from capmoe_eval.results.packing import main, pack, pack_idle, unpack
from capmoe_eval.routing.registry import create_method
from tests import records as made
from tests.conftest import Shell
from tests.records import record_of

METHODS = [create_method("score", gamma, ep_size=2) for gamma in (0.5, 1.0, 1.5)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three records of each of two tasks."""
    for task in ("obqa", "rte"):
        for method in METHODS:
            record_of(method, task=task, root=tmp_path).write()
    return tmp_path


@pytest.fixture
def obqa(root: Path) -> Path:
    """The pack of three records."""
    return pack(root)[0]


def contents(root: Path) -> dict[Path, bytes]:
    """The bytes of every record, as they are read."""
    return {path: record_bytes(path) for path in record_paths(root)}


def test_packed_records_are_what_they_were(root: Path) -> None:
    before, frame, records = contents(root), load_frame(root), read_results(root, [])
    files = pack(root)
    assert sorted(root.rglob("*")) == [root / "m", *(root / f"m/{t}{SUFFIX}" for t in TASKS)]
    assert contents(root) == before
    assert load_frame(root).equals(frame)
    for again, record in zip(read_results(root, []), records, strict=True):
        for name in ("path", "content", "cell", "layers", "documents", "load", "proofs"):
            assert getattr(again, name) == getattr(record, name)
        assert not again.path.exists()
        assert pack_path(record.path).exists()
    assert pack(root) == []
    assert unpack(root) == files
    assert {path: path.read_bytes() for path in loose_paths(root)} == before


TASKS = ("obqa", "rte")


class KilledError(BaseException):
    """What no code handles by accident."""


STEPS = (
    *((Path, name) for name in ("mkdir", "touch", "unlink", "rmdir", "rename", "replace")),
    (os, "fsync"),
)


def done_before_kill(work: Callable[[], object], number: int) -> bool:
    """Do some work, but no step on the file system after the first few; return if it was done."""
    steps = iter(range(number))

    def limited(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            if next(steps, None) is None:
                raise KilledError
            return original(*arguments, **options)

        return step

    with pytest.MonkeyPatch.context() as patch, suppress(KilledError):
        for place, name in STEPS:
            patch.setattr(place, name, limited(getattr(place, name)))
        work()
        return True
    return False


@pytest.mark.parametrize("work", [pack, unpack])
def test_a_kill_between_any_two_steps_loses_nothing(
    root: Path, tmp_path_factory: pytest.TempPathFactory, work: Callable[[Path], object]
) -> None:
    """Also one record that was computed again, and one that is in the pack alone."""
    pack(root)
    record_of(METHODS[0], [1.0] * 4, root=root).write()
    before = {path.relative_to(root): data for path, data in contents(root).items()}
    for number in range(1000):
        copy = tmp_path_factory.mktemp("killed")
        shutil.copytree(root, copy, dirs_exist_ok=True)
        done = done_before_kill(lambda place=copy: work(place), number)
        for again in (lambda _: None, pack):
            again(copy)
            assert {path.relative_to(copy): d for path, d in contents(copy).items()} == before
        assert loose_paths(copy) == []
        if done:
            assert number > 10
            return
    pytest.fail("never done")


def test_what_another_process_computes_again_stays(root: Path) -> None:
    path = record_of(METHODS[0], root=root).path
    reservation = reserve(path)
    assert reservation is not None
    with reservation:
        pack(root)
        assert loose_paths(root) == [path]
        record_of(METHODS[0], [1.0] * 4, root=root).write()
    assert read_record(path, root).value == 1.0
    pack(root)
    assert loose_paths(root) == []
    assert read_record(path, root).value == 1.0


def test_a_broken_record_beside_a_pack_is_named_and_stays(
    root: Path, obqa: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record_paths(root)[0]
    path.parent.mkdir()
    path.write_text("{")
    assert pack(root) == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: not packed: {path}: not a whole record")
    assert made.broken(root) == [line.removeprefix("warning: not packed: ")]
    path.unlink()
    assert read_record(path, root).value == 0.75


def in_two_frames(data: bytes) -> bytes:
    """The pack as earlier versions wrote it: its first line is compact, and a frame of its own."""
    with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
        head, lines = stream.read().split(b"\n", 1)
    compact = json.dumps(json.loads(head), separators=(",", ":")).encode() + b"\n"
    body = b"".join(pa.Codec("zstd").compress(part, asbytes=True) for part in (compact, lines))
    return body + packs._seal(body)


def test_a_pack_of_an_earlier_version_is_read(root: Path, obqa: Path) -> None:
    before, frame, now = contents(root), load_frame(root), obqa.read_bytes()
    obqa.write_bytes(in_two_frames(now))
    assert contents(root) == before
    assert load_frame(root).equals(frame)
    record_of(METHODS[0], root=root).write()
    assert pack(root) == [obqa]  # packed again, it is as this version writes it
    assert obqa.read_bytes() == now


def damaged(data: bytes) -> list[bytes]:
    draw = random.Random(0)
    flipped = []
    for _ in range(100):
        copy = bytearray(data)
        place = draw.randrange(8 * len(data))
        copy[place // 8] ^= 1 << place % 8
        flipped.append(bytes(copy))
    return [b"", data[:-1], data[: len(data) // 2], data + b"\n", data + data, *flipped]


def test_a_damaged_pack_has_one_line_wherever_it_is_read(root: Path, obqa: Path) -> None:
    path, whole = record_paths(root)[0], obqa.read_bytes()
    record_of(create_method("baseline"), root=root).write()
    for data in damaged(whole):
        obqa.write_bytes(data)
        with pytest.raises(UsageError) as error:
            read_record(path, root)
        line = str(error.value)
        assert line.startswith(f"{obqa}: truncated, or changed after it was written (")
        assert line.endswith("; restore it, or delete it to compute its cells anew")
        assert made.broken(root) == [line]
        assert len(read_results(root, [])) == 4
        assert stored(root, path) == (path, root)
        with pytest.raises(UsageError, match="restore it"):
            pack(root)
    obqa.write_bytes(whole)
    assert len(read_results(root, [])) == 7


def test_a_pack_in_another_place_is_refused(root: Path, obqa: Path) -> None:
    other = shutil.copy(obqa, obqa.with_name(f"piqa{SUFFIX}"))
    assert made.broken(root) == [f"{other}: the pack of another place, which is m/obqa"]


def test_the_end_of_a_run_packs_many_files_where_nobody_computes(root: Path) -> None:
    assert pack_idle(root) == []
    for gamma in range(2, 12):
        record_of(create_method("score", float(gamma)), root=root).write()
    other = reserve(record_of(METHODS[0], task="rte", root=root).path)
    assert other is not None
    with other:
        assert pack_idle(root) == []
    assert pack_idle(root) == [root / f"m/obqa{SUFFIX}"]


@pytest.mark.parametrize(
    ("words", "line"),
    [([], "2 files packed; 6 records in ."), (["--unpack"], "0 files unpacked; 6 records in .")],
)
def test_the_command_packs(root: Path, shell: Shell, words: list[str], line: str) -> None:
    assert shell.cwd == root
    status, out, _ = shell(*words, "results_dir=.", main=main)
    assert (status, line in out) == (0, True)


def test_a_record_written_while_packing_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = record_of(METHODS[0], [1.0] * 4, root=root)

    def write(file: Path, data: bytes) -> None:
        write_bytes(file, data)
        again.write()

    monkeypatch.setattr(packing, "write_bytes", write)
    pack(root)
    assert loose_paths(root) == [again.path]
    assert read_record(again.path, root).value == 1.0
