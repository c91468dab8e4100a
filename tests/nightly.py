"""Cases of a test of which most run in ``.ci/nightly`` alone."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def nightly_but(quick: Collection[object], cases: Iterable[object]) -> list[Any]:
    """Return the cases of a test, of which those of ``quick`` run in ``.ci/run``, the others in
    ``.ci/nightly``."""
    params = [
        pytest.param(case, marks=[] if case in quick else pytest.mark.nightly) for case in cases
    ]
    assert sum(not param.marks for param in params) == len(quick), "a quick case is gone"
    return params
