"""Several processes on one directory: every cell is computed once, never by two at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from capmoe_eval.evaluation import run as queue_module
from capmoe_eval.evaluation.run import take_turns
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.datasource import data_source
from capmoe_eval.experiment.files import write_text
from capmoe_eval.experiment.reservations import Reservation, holder_of, reserve
from capmoe_eval.routing.registry import create_method
from tests.records import cell


def grid(root: Path, models: str = "ab", seeds: int = 3, overwrite: bool = False) -> list[CellPlan]:
    source = data_source("miniworld")
    return [
        CellPlan(
            cell(create_method("random", 1.0, seed=seed), model), source, root, overwrite=overwrite
        )
        for seed in range(seeds)
        for model in models
    ]


def name(plan: CellPlan) -> str:
    return f"{plan.cell.model.name}{plan.cell.method.setting('seed')}"


def drain(turns: Iterable[tuple[CellPlan, bool]]) -> list[str]:
    """Compute all; finished cells are in brackets."""
    said = []
    for plan, is_finished in turns:
        if not is_finished:
            assert reserve(plan.path) is None, "it is reserved"
            write_text(plan.path, "ours")
        said.append(f"({name(plan)})" if is_finished else name(plan))
    return said


def strays(root: Path) -> list[Path]:
    return list(root.rglob(".*"))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "POLL", 0.0)


def take(plan: CellPlan) -> Callable[[str | None], None]:
    """Reserve a cell as another process; return what writes its record, if any, and frees it."""
    reservation, held = reserve(plan.path), ExitStack()
    assert reservation is not None
    held.enter_context(reservation)

    def end(text: str | None) -> None:
        if text is not None:
            write_text(plan.path, text)
        held.close()

    return end


def test_a_cell_that_another_computes_is_waited_for(tmp_path: Path) -> None:
    plans, waited = grid(tmp_path, "a"), []
    end = take(plans[1])

    def waiting(cells: Counter[str]) -> None:
        waited.append(dict(cells))
        if len(waited) == 3:
            end("theirs")

    holder = holder_of(plans[1].path)
    assert [(name(plan), finished) for plan, finished in take_turns(plans, waiting)] == [
        *(("a0", False), ("a2", False), ("a1", True)),
    ]
    assert waited == [{holder: 1}] * 3
    assert plans[1].path.read_text() == "theirs"


@pytest.mark.parametrize("text", [None, "theirs"])
def test_what_another_failed_to_compute_is_computed(tmp_path: Path, text: str | None) -> None:
    plans = grid(tmp_path, "a")
    end = take(plans[0])
    computed = drain(take_turns(plans, lambda _: end(text)))
    assert computed == ["a1", "a2", "(a0)" if text else "a0"]


def test_a_record_that_appeared_before_the_reservation_is_not_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the record and the reservation another wrote it and released it."""

    def late(record: Path) -> Reservation | None:
        write_text(record, "theirs")
        return reserve(record)

    monkeypatch.setattr(queue_module, "reserve", late)
    assert drain(take_turns(grid(tmp_path, "a", 2))) == ["(a0)", "(a1)"]
    assert strays(tmp_path) == []


def test_processes_spread_over_the_models(tmp_path: Path) -> None:
    plans = grid(tmp_path, "abc")
    ends = [take(plans[0])]
    with closing(take_turns(plans)) as turns:
        assert name(next(turns)[0]) == "b0"
        ends.append(take(plans[2]))
        assert name(next(turns)[0]) == "b1", "a loaded model stays"
    with closing(take_turns(plans)) as turns:
        assert name(next(turns)[0]) == "b0", "fewest of b are being computed: none"
    for end in ends:
        end(None)


def test_overwriting_computes_each_once(tmp_path: Path) -> None:
    plans = grid(tmp_path, "a", overwrite=True)
    for plan in plans:
        write_text(plan.path, "old")
    end = take(plans[1])
    computed = drain(take_turns(plans, lambda _: end("theirs")))
    assert computed == ["a0", "a2", "(a1)"], "the other's is as new as ours would be"
    assert [plan.path.read_text() for plan in plans] == ["ours", "theirs", "ours"]
    assert drain(take_turns(plans)) == ["a0", "a1", "a2"], "a later command computes all again"
