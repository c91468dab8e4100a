"""Ranks are started once for all tests that look at what they computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.wrapper.parallel.processes import run_ranks

Launch = Callable[[int], tuple[Path, list[str]]]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Return a function from a number of ranks to their directory and what each of them said."""
    known: dict[int, tuple[Path, list[str]]] = {}

    def start(size: int) -> tuple[Path, list[str]]:
        if size not in known:
            directory = tmp_path_factory.mktemp("ranks")
            command = ["-m", "tests.wrapper.parallel.worker", str(directory)]
            known[size] = directory, run_ranks(command, size, timeout=180)
        return known[size]

    return start
