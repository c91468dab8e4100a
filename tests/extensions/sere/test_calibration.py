"""What the calibration of SERE depends on."""

from __future__ import annotations

import pytest

from capmoe_eval.extensions.sere import SERE
from tests.extensions.calibrations import check_committed, check_knobs


def test_a_calibration_is_of_the_knobs_that_it_depends_on_and_of_no_other() -> None:
    check_knobs(SERE(), {"count_padding", "decode"})


@pytest.mark.slow
def test_committed_calibrations_are_those_of_their_records() -> None:
    check_committed("expert_similarity")
