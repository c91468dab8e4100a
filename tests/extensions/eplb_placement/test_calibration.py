"""What the calibration of a placement depends on, and which placement follows from it."""

from __future__ import annotations

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.extensions.eplb_placement.calibration import experts_of_ranks
from capmoe_eval.routing.registry import create_method
from tests.extensions.calibrations import check_committed, check_knobs


def test_a_calibration_is_of_the_knobs_that_it_depends_on_and_of_no_other() -> None:
    method = create_method("score", 1.0, ep_size=2, granularity="device", placement="eplb")
    check_knobs(method, {"count_padding", "decode"})


def test_experts_go_by_falling_load_to_the_rank_with_the_lowest_load() -> None:
    assert experts_of_ranks([9, 8, 1, 1], 2).tolist() == [[0, 3], [1, 2]]
    with pytest.raises(UsageError, match=r"^placement=eplb: the calibration saw no token under"):
        experts_of_ranks([0, 0], 2)


@pytest.mark.slow
def test_committed_calibrations_are_those_of_their_records() -> None:
    check_committed("expert_loads")
