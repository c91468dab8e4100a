"""Table 1's gaps by the number of sequences that share a capacity."""

from __future__ import annotations

import io

import pytest

from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.replication.grouping import grouping
from capmoe_eval.report.replication.picture import draw_gaps
from tests.paper.fabricate import evidence, record

RIGHT = {"score": 9, "random": 6, "reverse_order": 5, "order": 3}


def answers(right: int) -> tuple[int, ...]:
    return (1,) * right + (0,) * (10 - right)


def at_home() -> list[Record]:
    return [record(method, 1.0, answers(right)) for method, right in RIGHT.items()]


def on_one_rank(size: int) -> list[Record]:
    """Score alone stands out."""
    right = RIGHT | {"random": 3, "reverse_order": 3}
    return [
        record(method, 1.0, answers(n), ep_size=1, cell={"batch_size": size})
        for method, n in right.items()
    ]


def test_gaps_are_found_for_each_number_of_sequences() -> None:
    printed, two, many = grouping(evidence(*at_home(), *on_one_rank(64)))
    # Table 1 prints means of 61.1, 53.1, 52.0 and 51.8; these follow from its nine tasks.
    assert [gap.effect for gap in printed.gaps] == [8.12, 1.09, 0.19]
    assert [gap.effect for gap in two.gaps] == pytest.approx([30, 10, 20])
    assert [gap.effect for gap in many.gaps] == pytest.approx([60, 0, 0])
    assert two.distance == pytest.approx((21.88 + 8.91 + 19.81) / 3, abs=0.01)
    assert many.distance == pytest.approx((51.88 + 1.09 + 0.19) / 3, abs=0.01)
    assert (printed.distance, two.sequences, many.sequences) == (None, 2, 64)


def test_rows_without_records_are_left_out() -> None:
    assert len(grouping(evidence(*at_home()[:3]))) == 1
    assert [row.sequences for row in grouping(evidence(*on_one_rank(16)))] == [None, 16]


def test_the_picture_has_a_line_for_each_gap_and_each_printed_one() -> None:
    figure = draw_gaps(grouping(evidence(*at_home(), *on_one_rank(4))))
    [legend] = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["score − random", "random − reverse order", "reverse order − order"]
    figure.savefig(io.BytesIO())
