"""How a command ends: by signals, by a full disk, by a question, and where many are asked for."""

import errno
import io
import re
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from capmoe_eval.experiment.application import INTERRUPTED, run_command
from capmoe_eval.experiment.datasource import _writable_or_temporary, cache_directory
from capmoe_eval.experiment.files import write_text
from tests.project import run

SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


# A program that gets a signal, and another one while it ends, or whose library swallows the first.
_TWICE = """
import os, signal, sys, time
from pathlib import Path
from capmoe_eval.experiment import application, files

first, second = (getattr(signal, name) for name in sys.argv[1:3])
kind = sys.argv[3]
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # as where nothing is run by nohup
    signal.signal(number, signal.SIG_DFL)

def again():
    print("again", flush=True)
    if kind == "hangs":
        application.GRACE = -1.0
    os.kill(os.getpid(), second)
    if kind == "hangs":
        time.sleep(20)
        print("slept", flush=True)

def command():
    with files.whole_file(Path("file.json")):
        try:
            os.kill(os.getpid(), first)
        except KeyboardInterrupt:
            again()
            if kind == "hidden":
                raise ValueError("of a library")
            raise

application.run_program(lambda: application.run_command(command))
"""


@pytest.mark.parametrize("kind", ["clean", "hidden", "hangs"])
@pytest.mark.parametrize(("first", "second"), [("SIGINT", "SIGTERM"), ("SIGTERM", "SIGHUP")])
def test_a_second_signal_ends_a_hang(first: str, second: str, kind: str, tmp_path: Path) -> None:
    """With the line and the status of the first; a half-written file is removed meanwhile."""
    done = run(sys.executable, "-c", _TWICE, first, second, kind, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("again\n", f"{INTERRUPTED}\n")
    assert done.returncode == SIGNALS[getattr(signal, first)]
    assert kind == "hangs" or not list(tmp_path.iterdir())


def test_no_question(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A yes that is piped in is not taken for an answer to a library's question."""
    piped = io.StringIO("yes\n")
    monkeypatch.setattr(sys, "stdin", piped)
    answers: list[str] = []
    assert run_command(lambda: answers.append(input())) == 2
    assert not answers
    assert "error: a question was asked" in capsys.readouterr().err
    assert sys.stdin is piped
    assert piped.read() == "yes\n"


UNEXPECTED = [
    KeyError("a key"),
    MemoryError(),
    ValueError("two\nlines"),
    ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
]


@pytest.mark.parametrize("error", UNEXPECTED, ids=lambda error: type(error).__name__)
def test_what_nobody_expected_is_one_line_and_a_file(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> int:
        raise error

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_command(fail) == (2 if isinstance(error, OSError) else 1)
    (line,) = capsys.readouterr().err.splitlines()
    (path,) = tmp_path.iterdir()
    kind = type(error).__name__
    assert re.match(rf"error: {kind}: (?!{kind}).+ \(test_application\.py, line \d+\); ", line)
    assert str(path) in line
    text = path.read_text()
    assert "Traceback (most recent call last)" in text
    assert ", in fail\n" in text
    assert text.startswith("capmoe_eval ")
    path.unlink()
    monkeypatch.setenv("CAPMOE_DEBUG", "1")
    run_command(fail)
    *trace, line = capsys.readouterr().err.splitlines()
    assert trace[0] == "Traceback (most recent call last):"
    assert line.startswith("error: ")
    assert not list(tmp_path.iterdir())


# The words of a command, and the module that it imports inside the boundary.
PROGRAMS = {"": "evaluation.run_command", "table": "report.tables.command"}
_BROKEN = """
import runpy, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[0]:
            exec(error)
module, sys.argv, error = sys.argv[1], sys.argv[2:-1], sys.argv[-1]
sys.meta_path.insert(0, Finder())
runpy.run_module(module, run_name="__main__", alter_sys=False)
"""


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("raise RuntimeError('boom')", "error: RuntimeError: boom (<string>, line 1); "),
        (
            "sys.modules['PIL'] = None; import PIL",
            "error: PIL: is not installed; pip install pillow",
        ),
        ("raise KeyboardInterrupt", INTERRUPTED),
    ],
)
def test_each_command_ends_in_one_line(program: str, error: str, said: str, tmp_path: Path) -> None:
    """Also while its libraries are imported, and whatever is wrong with them."""
    words = ["capmoe_eval", f"capmoe_eval.{PROGRAMS[program]}", *program.split(), error]
    done = run(sys.executable, "-c", _BROKEN, *words, cwd=tmp_path, TMPDIR=str(tmp_path))
    (line,) = done.stderr.splitlines()
    assert line.startswith(said)
    assert done.stdout == ""
    assert done.returncode == {"error: R": 1, "error: P": 2}.get(said[:8], 130)
    files = list(tmp_path.iterdir())
    assert [str(path) in line for path in files] == ([True] if "Runtime" in said else [])


FULL = "error: standard output, or a file: cannot"


@pytest.mark.parametrize(
    ("shell", "words", "status", "said"),
    [
        *(("| true", words, 0, "") for words in ("all --published v2", "--help")),
        *((closed, "table2 --published v2", 0, "") for closed in (">&-", "2>&-")),
        *(("> /dev/full", f"{name} --published v2", 2, FULL) for name in ("table1", "all")),
    ],
)
def test_an_output_that_cannot_be_written_is_no_traceback(
    shell: str, words: str, status: int, said: str, tmp_path: Path
) -> None:
    line = [sys.executable, "-m", "capmoe_eval", "table", *words.split()]
    done = run("bash", "-o", "pipefail", "-c", f'exec "$@" {shell}', "bash", *line, cwd=tmp_path)
    assert done.returncode == status
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == (1 if said else 0), done.stderr


@pytest.mark.parametrize("blocked", ["file", "file/below", "/proc/nothing"])
def test_a_cache_that_cannot_be_written_is_done_without(
    blocked: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / blocked))
    _writable_or_temporary.cache_clear()
    place = cache_directory()
    write_text(place / "part", "whole")
    assert cache_directory() == place
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("note: XDG_CACHE_HOME=")
    _writable_or_temporary.cache_clear()
