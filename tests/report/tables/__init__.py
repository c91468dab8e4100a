"""Tables as the tests read them."""

from typing import Any

import pandas as pd


def cell(table: pd.DataFrame, line: int, column: int = 0) -> Any:
    """A cell by the numbers of its row and column."""
    return table[table["line"] == line].iloc[column]


def measured(table: pd.DataFrame) -> pd.DataFrame:
    """The cells that have numbers."""
    return table[table["status"] == "measured"]
