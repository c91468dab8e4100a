"""The tests' own way to run ranks: what hangs or fails is said, and nothing is left running."""

from __future__ import annotations

import time

import pytest

from tests.wrapper.parallel.processes import run_ranks


def test_a_hang_ends_in_a_failure() -> None:
    started = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=r"no end after 0.3 s"):
        run_ranks(["-c", "import time; time.sleep(60)"], 2, timeout=0.3)
    assert time.monotonic() - started < 10


def test_a_failure_of_one_rank_ends_all_with_its_last_words() -> None:
    code = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('gone'); time.sleep(60)"
    with pytest.raises(pytest.fail.Exception, match="gone"):
        run_ranks(["-c", code], 2, timeout=30)


def test_what_they_say_comes_back_in_their_order() -> None:
    assert run_ranks(["-c", "import os; print(os.environ['RANK'])"], 2, timeout=30) == [
        "0\n",
        "1\n",
    ]
