from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capmoe_eval.experiment import files as atomic


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep/file.json"
    atomic.write_text(path, "old")

    def fail(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        atomic.write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]


def test_a_written_file_is_as_readable_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    atomic.write_text(tmp_path / "ours", "ü")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "ours")]
    assert modes[0] == modes[1]
    assert (tmp_path / "ours").read_bytes() == "ü".encode()


def stray(directory: Path, name: str, days: float) -> Path:
    path = directory / name
    path.write_text("half")
    then = time.time() - days * 24 * 60 * 60
    os.utime(path, (then, then))
    return path


def test_what_dead_writers_left_is_removed_after_a_day(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        dead = process.pid
    old = stray(tmp_path, f".score-g1-0123456789.json.{dead}.abcd_123.tmp", 1.1)
    without = stray(tmp_path, ".score-g1-0123456789.json.abcd_123.tmp", 1.1)
    kept = [
        stray(tmp_path, f".score-g1-0123456789.json.{dead}.abcd_124.tmp", 0.9),
        stray(tmp_path, f".score-g1-0123456789.json.{os.getpid()}.abcd_123.tmp", 1.1),
        stray(tmp_path, "score.json", 9),
        stray(tmp_path, ".mine.tmp", 9),
    ]
    assert set(atomic.remove_strays([tmp_path, tmp_path / "nowhere"])) == {old, without}
    assert set(tmp_path.iterdir()) == set(kept)


def test_a_temporary_file_says_who_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    monkeypatch.setattr(os, "fsync", lambda _: names.extend(p.name for p in tmp_path.iterdir()))
    atomic.write_text(tmp_path / "file.json", "whole")
    (name,) = names
    found = atomic._TEMPORARY.fullmatch(name)
    assert found is not None and found["pid"] == str(os.getpid())
    atomic.write_text(tmp_path / "file.json", "page", durable=False)
    assert names == [name], "nobody waits for the disk"
