"""What a run says of the capacities that it applied."""

from __future__ import annotations

from typing import Any

import pytest

from capmoe_eval.evaluation.progress import rounding_warning
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
