import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.report.tables.table import Entry, Missing, PairedTest, Row, RowBlock, Table


def column(*values: float | None) -> RowBlock:
    entries = [Missing("run") if value is None else Entry(value) for value in values]
    return RowBlock(tuple(Row((str(i),), (entry,)) for i, entry in enumerate(entries)))


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ((45.6, 47.8, 47.2), {1}),
        ((47.8, 45.6, 47.8), {0, 2}),
        ((47.84, 47.76, 45.6), {0, 1}),  # both print 47.8
        ((47.84, 47.86), {1}),  # 47.8 and 47.9
        ((None, 45.6, 45.0), {1}),
        ((None, -3.0, -1.0), {2}),
    ],
)
def test_highest_printed_values_are_best(values: tuple[float | None, ...], best: set[int]) -> None:
    assert column(*values).best(0, decimals=1) == best
    opposite = column(*(None if value is None else -value for value in values))
    assert dataclasses.replace(opposite, lower_is_better=True).best(0, decimals=1) == best


def test_fewer_bits_are_better() -> None:
    more, fewer = (PairedTest(effect, 0.01, 0.02, lower_is_better=True) for effect in (0.1, -0.1))
    assert (more.verdict, fewer.verdict) == ("worse", "better")


@pytest.mark.parametrize("values", [(), (45.6,), (None, None), (45.6, None)])
def test_nothing_is_best_where_nothing_was_compared(values: tuple[float | None, ...]) -> None:
    assert column(*values).best(0, decimals=1) == frozenset()


@given(st.lists(st.none() | st.floats(0, 100), min_size=2, max_size=6), st.integers(0, 3))
def test_best_are_what_prints_highest(values: list[float | None], decimals: int) -> None:
    best = column(*values).best(0, decimals)
    printed = {i: float(f"{v:.{decimals}f}") for i, v in enumerate(values) if v is not None}
    assert best <= printed.keys()
    if len(printed) > 1:
        assert {i for i, v in printed.items() if v == max(printed.values())} == best


@pytest.mark.parametrize(("value", "stderr"), [(math.nan, None), (math.inf, 1.0), (1.0, math.nan)])
def test_entry_refuses_what_is_no_number(value: float, stderr: float | None) -> None:
    with pytest.raises(ValueError, match="finite"):
        Entry(value, stderr)


def test_missing_commands_are_listed_once_and_in_order() -> None:
    rows = [
        Row((), (Missing("second"), Missing("second"), Entry(1.0))),
        Row((), (Missing("first"), Missing("second"), Missing("third"))),
    ]
    blocks = (RowBlock((rows[0],)), RowBlock((rows[1],)))
    table = Table("t", "T", "", (), ("a", "b", "c"), blocks)
    assert table.missing_commands == ("second", "first", "third")
