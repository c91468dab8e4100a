"""What a process beside the report's own cannot write must not be missed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import pytest
from capmoe_eval.errors import UsageError

from capmoe_report import report as command


def test_a_process_that_fails_or_is_killed_fails_the_report(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def refuse() -> None:
        raise UsageError("--out=x: is full")

    def ended(*parts: Callable[[], None]) -> int:
        return command._ended(command._start(*parts))

    assert ended(lambda: print("made")) == 0
    assert ended(lambda: sys.exit(2), lambda: print("made, too")) == 0, "one stops no other"
    assert ended(refuse) == 2
    assert ended(lambda: os.kill(os.getpid(), signal.SIGKILL)) == 128 + signal.SIGKILL
    out, err = capfd.readouterr()
    assert out.splitlines() == ["made", "made, too"]
    assert "error: --out=x: is full" in err
    assert "was killed (signal 9)" in err
