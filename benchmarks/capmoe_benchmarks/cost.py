"""Run a command of Python in a process of its own, and measure its cost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
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
print("", spent.ru_utime + spent.ru_stime, mib, elapsed, status)
"""


class Cost(NamedTuple):
    """The cost of a command, and what it printed."""

    seconds: float  # of processor time
    memory: float  # MiB, at most
    output: str
    elapsed: float  # seconds from start to end


def cost_of(
    name: str,
    words: Sequence[str],
    expected: str = "",
    *,
    status: int = 0,
    python: str = sys.executable,
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
) -> Cost:
    """Run ``python`` with some words, without the network, and return its cost.

    Args:
        name: The command in the error line.
        words: What follows ``python``.
        expected: Part of what the command prints once it has read everything.
        status: The exit status that is expected.
        python: The interpreter.
        folder: The working directory; None for this one.
        environment: Further variables.

    Raises:
        UsageError: If the command ends with another status, or does not print what is expected.
    """
    process = subprocess.run(
        [sys.executable, "-c", _MEASURED, python, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            **(environment or {}),
        },
        stdin=subprocess.DEVNULL,
    )
    output, _, numbers = process.stdout.rstrip().rpartition("\n")
    *costs, ended = numbers.split() or ["0", "0", "0", "-1"]
    if int(ended) != status or expected not in f"{output}\n":
        last = (process.stderr.strip() or output.strip() or "nothing").splitlines()[-1]
        instead = f", and not {expected!r}" if expected else ""
        raise UsageError(f"{name}: said {last!r}{instead}")
    seconds, memory, elapsed = map(float, costs)
    return Cost(seconds, memory, output, elapsed)
