"""Run commands in processes of their own, and say what they cost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

from capmoe_eval.errors import UsageError

# A process's peak memory counts what its parent has when it starts it: a small one measures.
_MEASURED: Final = """
import subprocess, sys, time
from resource import RUSAGE_CHILDREN, getrusage
began = time.perf_counter()
status = subprocess.call(sys.argv[1:])
elapsed, spent = time.perf_counter() - began, getrusage(RUSAGE_CHILDREN)
mib = spent.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
print(spent.ru_utime + spent.ru_stime, mib, elapsed)
sys.exit(status)
"""


class Command(NamedTuple):
    """A command of Python."""

    name: str
    words: list[str]  # after ``python``
    expected: str = ""  # it says this if it has read everything


class Spent(NamedTuple):
    """The cost of a command."""

    seconds: float  # of processor time
    memory: float  # MiB, at most
    output: str
    elapsed: float  # seconds from start to end


def spend(command: Command) -> Spent:
    """Run a command, without the network, and return its cost.

    A command that fails, or does not say what is expected, is a UsageError.
    """
    python = [sys.executable, "-c", _MEASURED, sys.executable, *command.words]
    done = subprocess.run(
        python,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
    )
    output, _, numbers = done.stdout.rstrip().rpartition("\n")
    if done.returncode or command.expected not in f"{output}\n":
        last = (done.stderr.strip() or output.strip() or "nothing").splitlines()[-1]
        wanted = f", and not {command.expected!r}" if command.expected else ""
        raise UsageError(f"{command.name}: said {last!r}{wanted}")
    seconds, memory, elapsed = map(float, numbers.split())
    return Spent(seconds, memory, output, elapsed)


def check_room(asked: str, gigabytes: float, place: str | Path, fix: str) -> None:
    """Refuse to write more into a directory than the disk has room for, by a UsageError.

    ``asked`` is the option with its value, as ``--tokens=5``, and ``fix`` what to ask for instead.
    """
    free = shutil.disk_usage(place).free / 1e9
    if gigabytes > free:
        raise UsageError(
            f"{asked}: needs {gigabytes:.1f} GB in {place}, which has {free:.1f}; {fix}"
        )
