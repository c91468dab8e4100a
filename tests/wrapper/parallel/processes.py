"""Starting ranks as processes; one that hangs or fails ends all of them, with its last words."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


def run_ranks(
    command: list[str], size: int, *, timeout: float, environment: dict[str, str] | None = None
) -> list[str]:
    """Run ``python <command>`` as that many ranks and return what each wrote to standard output.

    A rank that fails, or all of them if they take too long, ends the test.
    """
    shared = environment or {}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "WORLD_SIZE": str(size)}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return _run([(command, shared | each) for each in own], timeout)


def run_nodes(command: list[str], nodes: int, *, timeout: float) -> list[str]:
    """Run ``torchrun <command>`` on nodes of one rank each, which meet over TCP; as run_ranks."""
    line = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--nnodes", str(nodes)]
    line += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{_free_port()}"]
    return _run([([*line, *command], {})] * nodes, timeout)


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _run(commands: list[tuple[list[str], dict[str, str]]], timeout: float) -> list[str]:
    shared = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env=shared | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, environment in commands
    ]
    deadline = time.monotonic() + timeout
    try:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        failed = [number for number, rank in enumerate(ranks) if rank.poll() != 0]
    finally:
        for rank in ranks:
            rank.terminate()  # torchrun ends its own processes then
        for rank in ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(5)
            rank.kill()
    said = [rank.communicate() for rank in ranks]
    if failed:
        late = time.monotonic() > deadline
        tails = "\n".join(f"rank {number}:\n{said[number][1][-3000:]}" for number in failed)
        pytest.fail(f"{f'no end after {timeout:g} s' if late else 'failed'}: {tails}")
    return [out for out, _ in said]
