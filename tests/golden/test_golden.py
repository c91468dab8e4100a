"""The committed records give the numbers of the golden files, value by value."""

import re

import numpy as np
import pandas as pd
import pytest

from capmoe_eval.report.figures.catalogue import figures
from tests.golden import FOLDER, KINDS, drawn, framed, read
from tests.satellites import NEEDS_METHODS

_NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?|(?<=[\[ ])-?\d+(?=[,\]])")


def differences(golden: pd.DataFrame, now: pd.DataFrame) -> list[str]:
    """Where two frames differ beyond the last digits, in which machines differ: a line a cell."""
    assert sorted(golden) == sorted(now)
    assert len(golden) == len(now)
    return [
        f"row {line}, {name}: {old!r}, now {new!r} ({golden.iloc[line, :4].to_dict()})"
        for name in golden
        for line, (old, new) in enumerate(zip(golden[name], now[name], strict=True))
        if not _alike(old, new)
    ]


def _alike(old: object, new: object) -> bool:
    if old == new or isinstance(old, str) != isinstance(new, str):
        return old == new
    if not isinstance(old, str) or not isinstance(new, str):
        return bool(np.isclose(old, new, rtol=1e-8, atol=1e-9, equal_nan=True))  # type: ignore[call-overload]
    numbers = [np.array(_NUMBER.findall(text), dtype=float) for text in (old, new)]
    return _NUMBER.sub("0", old) == _NUMBER.sub("0", new) and np.allclose(*numbers, atol=2e-6)


@NEEDS_METHODS
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_records_give_the_golden_numbers(kind: str) -> None:
    assert differences(read(FOLDER / f"{kind}.csv"), framed(KINDS[kind]())) == []


@pytest.mark.slow
def test_every_figure_is_drawn_from_its_golden_numbers() -> None:
    names = [name for name, spec in figures().items() if spec.package.startswith("capmoe_eval")]
    assert drawn(FOLDER / "figures.csv") == names


def test_a_number_that_changes_is_a_difference() -> None:
    golden = pd.DataFrame({"shown": ["**61.2**▲", "[0.123456, 2]"], "value": [61.2, np.nan]})
    digits = pd.DataFrame({"shown": ["**61.2**▲", "[0.123457, 2]"], "value": [61.2 + 1e-9, np.nan]})
    assert differences(golden, digits) == []
    for line, name, other in (
        (0, "shown", "61.2▲"),
        (1, "shown", "[0.123466, 2]"),
        (0, "value", 61.21),
    ):
        changed = golden.copy()
        changed.loc[line, name] = other
        assert len(differences(golden, changed)) == 1
