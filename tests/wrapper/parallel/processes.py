"""Starting ranks as processes; one that hangs or fails ends all of them, with its last words."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


def run_ranks(
    command: list[str], size: int, *, timeout: float, environment: dict[str, str] | None = None
) -> list[str]:
    """Run ``python <command>`` as that many ranks and return what each wrote to standard output.

    A rank that fails, or all of them if they take too long, ends the test.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | (environment or {})
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    shared |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
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
            rank.kill()
    said = [rank.communicate() for rank in ranks]
    if failed:
        late = time.monotonic() > deadline
        tails = "\n".join(f"rank {number}:\n{said[number][1][-3000:]}" for number in failed)
        pytest.fail(f"{f'no end after {timeout:g} s' if late else 'failed'}: {tails}")
    return [out for out, _ in said]
