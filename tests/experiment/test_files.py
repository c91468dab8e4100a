import os
import socket
import stat
from pathlib import Path

import pytest

from capmoe_eval.errors import UnwritableError, writing
from capmoe_eval.experiment import files as atomic


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep/file.json"
    atomic.write_text(path, "old")

    def fail(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        atomic.write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]


# What is not a plain path: links, devices, descriptors, and what is refused.


def test_a_link_stays_and_the_file_that_it_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target = tmp_path / "there/file.json"
    target.write_text("old")
    before = target.stat().st_ino
    link = tmp_path / "link.json"
    link.symlink_to("there/file.json")
    (tmp_path / "chain").symlink_to(link)
    atomic.write_text(tmp_path / "chain", "new")
    assert (tmp_path / "chain").is_symlink()
    assert link.is_symlink()
    assert target.read_text() == "new" == atomic.read_bytes(link).decode()
    assert target.stat().st_ino != before, "replaced, whole"
    assert [path.name for path in target.parent.iterdir()] == ["file.json"]


def test_a_device_is_neither_read_nor_replaced() -> None:
    """Also for root, who may replace it; one that is read may have no end."""
    device = Path(os.devnull)
    with pytest.raises(OSError):
        atomic.read_bytes(Path("/dev/zero"))
    before = device.stat()
    for write in (atomic.check_file, writing_text):
        with pytest.raises(UnwritableError, match="no regular file"):
            write("json", device)
    assert (device.stat().st_ino, device.stat().st_rdev) == (before.st_ino, before.st_rdev)


def special(kind: str, path: Path) -> None:
    if kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    else:
        os.mkfifo(path)


@pytest.mark.parametrize("kind", ["directory", "loop", "fifo", "socket"])
def test_other_kinds_are_neither_written_nor_read(kind: str, tmp_path: Path) -> None:
    """And not waited for, as the other end of a pipe would be."""
    path, link = tmp_path / "here", tmp_path / "link"
    special(kind, path)
    link.symlink_to(path)
    before = {each: each.lstat().st_ino for each in tmp_path.iterdir()}
    for name in (path, link):
        for write in (atomic.check_file, writing_text):
            with pytest.raises(UnwritableError, match=rf"^json={name}: cannot be wri") as refused:
                write("json", name)
            assert "\n" not in str(refused.value)
        with pytest.raises(OSError):
            atomic.read_bytes(name)
    assert {each: each.lstat().st_ino for each in tmp_path.iterdir()} == before


def writing_text(field: str, path: Path) -> None:
    with writing(field, path):
        atomic.write_text(path, "new")


# Names, directories, and other file systems.


@pytest.mark.parametrize("below", ["a" * 256, "file/below"])
def test_a_path_that_cannot_be_leaves_no_directory(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "new/deep" / below / "file.json"
    if below.startswith("file"):
        path = tmp_path / below / "file.json"
    with pytest.raises(UnwritableError, match="cannot be written"):
        atomic.check_file("json", path)
    with pytest.raises(UnwritableError, match="cannot be written"):
        writing_text("json", path)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_the_name_of_a_new_file_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename is lost in a power failure if its directory was not written."""
    synced, fsync = [], os.fsync

    def note(number: int) -> None:
        names = [path.name for path in tmp_path.iterdir()]
        synced.append((stat.S_ISDIR(os.fstat(number).st_mode), names))
        fsync(number)

    monkeypatch.setattr(os, "fsync", note)
    atomic.write_text(tmp_path / "file.json", "whole")
    assert [is_directory for is_directory, _ in synced] == [False, True]
    assert synced[1][1] == ["file.json"]
