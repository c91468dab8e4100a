"""The tests' own way to run ranks: what hangs or fails is said, and nothing is left running."""

from __future__ import annotations

import os
import sys
import time

import pytest

from tests.wrapper.parallel.processes import run_ranks


def _say() -> None:
    print(os.environ["RANK"])


def _fail() -> None:
    if os.environ["RANK"] == "1":
        sys.exit("gone")
    time.sleep(60)


def test_a_hang_ends_in_a_failure() -> None:
    started = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=r"no end after 0.3 s"):
        run_ranks(time.sleep, 60, size=2, timeout=0.3)
    assert time.monotonic() - started < 30


def test_a_failure_of_one_rank_ends_all_with_its_last_words() -> None:
    with pytest.raises(pytest.fail.Exception, match="gone"):
        run_ranks(_fail, size=2, timeout=30)


def test_what_they_say_comes_back_in_their_order() -> None:
    assert run_ranks(_say, size=2, timeout=30) == ["0\n", "1\n"]
