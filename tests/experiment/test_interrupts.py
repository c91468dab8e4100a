"""A second signal, at whatever moment, changes neither the line nor the status of the first."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from capmoe_eval.experiment.interrupts import INTERRUPTED

# A program that gets a signal, and another one at a point of its end.
PROGRAM = """
import atexit, os, signal, sys, threading
from pathlib import Path

first, second = (getattr(signal, name) for name in sys.argv[1:3])
point = sys.argv[3]
signal.signal(signal.SIGINT, signal.default_int_handler)  # as where no test is run by nohup
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)


def again(kill=os.kill, process=os.getpid()):
    print("again", flush=True)
    kill(process, second)


def then(function):
    def called(*arguments, **names):
        again()
        return function(*arguments, **names)
    return called


class Global:
    def __del__(self, again=again):
        again()


if point == "last exit function":
    atexit.register(again)  # the first that is registered is called last

from capmoe_eval.experiment import application, files, interrupts

def command():
    os.kill(os.getpid(), first)


if point == "temporary file":
    Path.unlink = then(Path.unlink)
    whole = command
    def command():
        with files.whole_file(Path("file.json")) as file:
            whole()
elif point == "cleanup":
    interrupted = command
    def command():
        try:
            interrupted()
        finally:
            again()
elif point == "error of a library":
    told = command
    def command():
        try:
            told()
        except KeyboardInterrupt:
            again()
            raise ValueError("stopped")
elif point == "line":
    sys.stderr.write = then(sys.stderr.write)
elif point == "exit":
    interrupts.sys = type("", (), {"exit": then(sys.exit), "exc_info": sys.exc_info,
                                   "stderr": sys.stderr})
elif point == "threads":
    def late():
        threading.main_thread().join()
        again()
    threading.Thread(target=late).start()
elif point == "exit function":
    whole_command = command
    def command():
        atexit.register(again)
        whole_command()
elif point == "module":
    kept = Global()


def main():
    status = application.run_command(command)
    if point == "return":
        again()
    sys.exit(status)


application.run_program(main)
"""
POINTS = [
    *("cleanup", "temporary file", "error of a library", "line", "return", "exit", "threads"),
    *("exit function", "last exit function", "module"),
]


def run(place: Path, *words: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", program, *words]
    return subprocess.run(line, cwd=place, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(("first", "second"), [("SIGINT", "SIGTERM"), ("SIGTERM", "SIGHUP")])
def test_the_second_signal_changes_nothing(
    first: str, second: str, point: str, tmp_path: Path
) -> None:
    done = run(tmp_path, first, second, point)
    assert set(done.stdout.splitlines()) == {"again"}, "it came"
    assert (done.stderr, done.returncode) == (f"{INTERRUPTED}\n", 128 + getattr(signal, first))
    assert not list(tmp_path.iterdir()), "a temporary file is left"


def test_what_a_library_swallowed_comes_again(tmp_path: Path) -> None:
    """Such as in a destructor; the status is that of the first signal."""
    swallowed = PROGRAM.replace(
        "application.run_program(main)",
        """
def command():
    try:
        os.kill(os.getpid(), first)
    except KeyboardInterrupt:
        pass
    again()
    print("not reached")
application.run_program(main)""",
    )
    done = run(tmp_path, "SIGTERM", "SIGINT", "none", program=swallowed)
    assert (done.stdout, done.stderr, done.returncode) == ("again\n", f"{INTERRUPTED}\n", 143)


@pytest.mark.parametrize(
    "point", ["cleanup", "return", pytest.param("threads", marks=pytest.mark.slow)]
)
def test_an_end_that_takes_long_is_cut_short(point: str, tmp_path: Path) -> None:
    """With the same line and status."""
    hangs = PROGRAM.replace(
        "    kill(process, second)\n",
        "    interrupts.GRACE = -1\n    kill(process, second)\n    threading.Event().wait(50)\n",
    )
    done = run(tmp_path, "SIGTERM", "SIGINT", point, program=hangs)
    assert (done.stdout, done.stderr, done.returncode) == ("again\n", f"{INTERRUPTED}\n", 143)


@pytest.mark.parametrize("point", ["exit", "threads", "exit function", "last exit function"])
def test_a_signal_after_the_work_is_none(point: str, tmp_path: Path) -> None:
    finished = PROGRAM.replace("    os.kill(os.getpid(), first)", "    pass", 1)
    done = run(tmp_path, "SIGTERM", "SIGINT", point, program=finished)
    assert (done.stdout, done.stderr, done.returncode) == ("again\n", "", 0)
