"""Values are checked by the types that declare them, in one line of field, value and rule."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import AfterValidator, Field

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.knobs import LARGEST, Count, Seed, check, says

ALL = Annotated[None, Field(description="null for all")]
SHARE = Annotated[float, Field(gt=0, le=1, examples=[0.5])]
FACTORS = Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(strict=False, min_length=1)]
SCOPE = Literal["batch", "sequence"]


def even(number: int) -> int:
    """Refuse an odd number."""
    if number % 2:
        raise ValueError("must be even")
    return number


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        (0, Count, "must be a whole number of at least 1"),
        (1.0, Count, "must be a whole number of at least 1"),
        ("1", Count, "must be a whole number of at least 1"),
        (LARGEST + 1, Count, f"must be a whole number of at least 1; {LARGEST} is the largest"),
        (np.True_, Count, "must be a whole number of at least 1"),
        (-1, Seed, f"must be a whole number from 0 to {2**63 - 1}"),
        (0, Count | ALL, "must be a whole number of at least 1, or null for all"),
        (0, SHARE, "must be a number above 0 and at most 1, for example key=0.5"),
        (True, SHARE, "must be a number above 0 and at most 1, for example key=0.5"),
        (math.inf, Annotated[float, Field(ge=0)], "must be a finite number of at least 0"),
        (3, Annotated[float, Field(ge=0, le=2)], "must be a number from 0 to 2"),
        (None, bool, "must be true or false"),
        ("bach", SCOPE, "did you mean 'batch'? choose one of batch, sequence"),
        (7, SCOPE | ALL, "choose one of batch, sequence, or null for all"),
        ("no", bool | Literal["calibrate"], "must be true or false, or calibrate"),
        ([0, 1.0], list[int], "must be a list, each item of which is a whole number"),
        ([1.0, True], FACTORS, "must be a list, each item of which is a number of at least 0"),
        (3, Annotated[int, AfterValidator(even)], "must be even"),
        ("x", Annotated[str, Field(pattern="^a+$"), says("some a")], "must be some a"),
    ],
)  # fmt: skip
def test_a_refusal_is_the_rule_in_one_line(value: Any, annotation: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        check("key", value, annotation)
    start, _, line = str(error.value).partition(": ")
    assert start.startswith("key=")
    assert line == message


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (1, Count, 1),
        (np.int64(1), Count, 1),
        (LARGEST, Count, LARGEST),
        (None, Count | ALL, None),
        ("auto", Count | Literal["auto"], "auto"),
        (1, SHARE, 1.0),
        (-0.0, Annotated[float, Field(ge=0)], 0.0),
        ([1, 2.5], FACTORS, (1.0, 2.5)),
        ("batch", SCOPE, "batch"),
        (False, bool, False),
    ],
)
def test_a_value_is_as_its_type_has_it(value: Any, annotation: Any, expected: Any) -> None:
    checked = check("key", value, annotation)
    assert repr(checked) == repr(expected)
