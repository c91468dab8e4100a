"""What a run says of the capacities that it applied."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from capmoe_eval.evaluation import progress as progress_module
from capmoe_eval.evaluation.progress import Progress, rounding_warning, summary
from capmoe_eval.experiment.record import Record
from capmoe_eval.routing.registry import create_method
from tests import records


def applied(gamma: float, effective: float | None, **knobs: Any) -> Record:
    method = create_method("score", gamma, **{"ep_size": 8, **knobs})
    return records.record(
        records.cell(method), load={"effective_gamma": effective, "mean_load": 1.125}
    )


@pytest.mark.parametrize(
    ("record", "warned"),
    [
        (applied(0.25, 0.9), True),
        (applied(1.0, 1.12), True),
        (applied(1.0, 1.09), False),
        (applied(1.0, 0.85, rounding="floor"), True),
        (applied(0.0, 0.0), False),
        (applied(9.0, 2.0), False),  # all tokens of a group: with E/K = 2 there are no more
        (applied(1.0, None), False),  # a record from before it was counted
    ],
)
def test_it_warns_where_rounding_moved_the_capacity_by_more_than_a_tenth(
    record: Record, warned: bool
) -> None:
    assert (rounding_warning(record) is not None) is warned


def test_a_run_warns_once() -> None:
    stream = io.StringIO()
    progress = Progress(2, stream)
    for line in ("gamma=0.25: …", "gamma=0.5: …"):
        progress.warn(line, "rounding")
    progress.warn("other")
    assert stream.getvalue() == "warning: gamma=0.25: …\nwarning: other\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("screen", [Terminal(), io.StringIO()])
def test_the_running_cell_is_shown_with_its_total_and_the_time_left(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere than on a terminal it is a line now and then: silence looks like a hang."""
    now = 0.0
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    cell = applied(1.0, 1.0).cell
    progress = Progress(3, screen)
    monkeypatch.setattr(progress_module, "EVERY", 0.01)
    progress.stage("loading zoo …")
    while "loading zoo …" not in screen.getvalue():  # elsewhere once it takes long
        pass
    monkeypatch.setattr(progress_module, "EVERY", 10)
    progress.stage("a mistake ends this soon")
    progress.close()
    for _ in range(2):
        progress.start(cell)
        for done in (10, 20, 30, 40):
            now += 6
            progress.advance("requests", done, 40)
        progress.fail(cell, "boom")
    lines = [re.sub(r" \|.*\| ", ", ", line) for line in re.split("[\r\n]+", screen.getvalue())]
    bars = [line.removeprefix("\x1b[2K") for line in lines if "40 requests" in line]
    assert bars[-1] == f"[2/3] {cell}: 100 %, 40 of 40 requests, 00:00 left (all cells: 2 min)"
    assert f"[1/3] {cell}: 50 %, 20 of 40 requests, 00:12 left" in bars
    assert len(bars) == (8 if screen.isatty() else 4), "elsewhere at most a line in ten seconds"
    assert ("a mistake" in screen.getvalue()) is screen.isatty()


def test_the_table_shows_the_effective_gamma_where_there_is_one() -> None:
    lines = summary([applied(0.25, 0.9), applied(0.25, None)], 2).splitlines()
    first = lines[0].index("effective γ")
    assert [line[first : first + 11].strip() for line in lines[1:3]] == ["0.90", ""]
