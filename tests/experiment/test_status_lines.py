"""A long command says what it is doing, and a short one nothing."""

from __future__ import annotations

import io

from capmoe_eval.experiment.status_lines import StatusLines


def test_lines_are_sparse() -> None:
    now, stream = [100.0], io.StringIO()
    say = StatusLines("advise", stream, lambda: now[0])
    for second in range(13):
        now[0] = 100.0 + second
        say(f"step {second}")
    assert stream.getvalue() == "advise: step 5, 5 s\nadvise: step 10, 10 s\n"
