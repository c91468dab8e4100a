"""Ranks as processes; one that hangs or fails ends all of them, with its last words."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
CALL = """
import importlib, pathlib, sys
module, name, directory = sys.argv[1:]
getattr(importlib.import_module(module), name)(pathlib.Path(directory))
"""


def run_ranks(
    work: Callable[[Path], object], directory: Path, *, size: int, timeout: float
) -> list[str]:
    """Call a function of a module in that many ranks; return what each wrote to standard output.

    A rank that fails, or all of them if they take too long, ends the test.
    """
    command = [sys.executable, "-c", CALL, work.__module__, work.__name__, str(directory)]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(size)}
    ranks = [
        _started(command, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]
    return _ended(ranks, timeout)


def run_nodes(command: list[str], nodes: int, *, timeout: float) -> list[str]:
    """Run ``torchrun <command>`` on nodes of one rank each, which meet over TCP; as run_ranks."""
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    line += ["--nnodes", str(nodes), "--rdzv-backend", "c10d"]
    line += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    return _ended([_started([*line, *command], {}) for _ in range(nodes)], timeout)


def free_port() -> str:
    """Return a port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _started(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    paths = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]), "OMP_NUM_THREADS": "1"}
    variables, pipe = os.environ | paths | environment, subprocess.PIPE
    return subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe, text=True)


def _ended(ranks: Sequence[subprocess.Popen[str]], timeout: float) -> list[str]:
    deadline = time.monotonic() + timeout
    try:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        failed = [number for number, rank in enumerate(ranks) if rank.poll() != 0]
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)  # torchrun ends its own processes then
        messages = [_last_words(rank) for rank in ranks]
    if failed:
        late = time.monotonic() > deadline
        tails = "\n".join(f"rank {number}:\n{messages[number][1][-3000:]}" for number in failed)
        pytest.fail(f"{f'no end after {timeout:g} s' if late else 'failed'}: {tails}")
    return [out for out, _ in messages]


def _last_words(rank: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return rank.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        rank.send_signal(signal.SIGKILL)
        return rank.communicate()
