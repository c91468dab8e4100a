"""The types of a filled table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.layout import PaperTable

ALPHA = 0.05
"""A paired test is significant where its p, corrected for the table's tests, is below this."""


@dataclass(frozen=True)
class Published:
    """The number that the paper prints for the same, ours minus it, and the z of this difference.

    Both are in the entry's units; z is None where our standard error is not known.
    """

    value: float
    difference: float
    z: float | None = None


@dataclass
class PairedTest:
    """The mean difference to the baseline over the same documents, in the entry's units.

    ``p`` is two-sided, of the test alone; ``corrected`` is that after Holm's correction for all
    tests of the table, None until it is filled.
    """

    effect: float
    p: float
    corrected: float | None = None

    @property
    def verdict(self) -> Literal["better", "worse"] | None:
        """The direction of a significant difference to the baseline, or None."""
        if self.corrected is None or not self.corrected < ALPHA or not self.effect:
            return None
        return "better" if self.effect > 0 else "worse"


@dataclass(frozen=True)
class Entry:
    """One number of a table, in its display units (percent, where the layout says so).

    It is finite, or a ValueError: a failed run is a :class:`Missing`, never a NaN.
    """

    value: float
    stderr: float | None = None  # one standard error, or None where it is not known
    seeds: tuple[int, ...] = ()  # averaged; empty for a deterministic method or a derived entry
    documents: int | None = None  # number of those evaluated, or None where it is not known
    published: Published | None = None
    test: PairedTest | None = None  # with the same model's baseline
    untested: str = ""  # why there is no test where there should be
    quartiles: tuple[float, float] | None = None  # of timings whose median is the value
    # What it was taken from, of several seeds the lowest first.
    records: tuple[Record, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not math.isfinite(self.value) or not math.isfinite(self.stderr or 0.0):
            raise ValueError(f"an entry must be finite, got {self.value} ± {self.stderr}")


@dataclass(frozen=True)
class Missing:
    """An entry that nobody has measured yet, and the shell command that measures it."""

    command: str


@dataclass(frozen=True)
class Text:
    """A cell of words, such as the name of a metric."""

    text: str


Cell: TypeAlias = Entry | Missing | Text
"""A cell of a column."""


@dataclass(frozen=True)
class Row:
    """One line: the labels that name it, one cell per column, and what it is of in a filter.

    The keys of its model and method, and its γ as shown, are empty in a table that is not of
    evaluations.
    """

    labels: tuple[str, ...]
    entries: tuple[Cell, ...]
    model: str = ""
    method: str = ""
    gamma: str = ""


@dataclass(frozen=True)
class Block:
    """Rows that are compared with each other, set apart by rules in print."""

    rows: tuple[Row, ...]

    def best(self, column: int, decimals: int) -> frozenset[int]:
        """Return the indices of the rows with the highest value in a column.

        Values are compared as printed, to so many decimals, so that of two equal-looking numbers
        never only one is marked. Of fewer than two entries none is best.
        """
        printed = {
            index: round(entry.value, decimals)
            for index, row in enumerate(self.rows)
            if isinstance(entry := row.entries[column], Entry)
        }
        if len(printed) < 2:
            return frozenset()
        highest = max(printed.values())
        return frozenset(index for index, value in printed.items() if value == highest)


@dataclass(frozen=True)
class Table:
    """A whole table, ready to be rendered.

    Its name is the stem of the files it is written to; the caption says what the numbers are, with
    their unit; notes are sentences printed below.
    """

    name: str
    title: str
    caption: str
    label_headings: tuple[str, ...]
    columns: tuple[str, ...]
    blocks: tuple[Block, ...]
    decimals: int = 1
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        layout: PaperTable,
        label_headings: Iterable[str],
        columns: Iterable[str],
        blocks: Iterable[Sequence[Row]],
        notes: Iterable[str] = (),
        decimals: int = 1,
        **named: str,
    ) -> Table:
        """Return a table of a layout; ``named`` are the texts for the places in its title."""
        return cls(
            layout.key,
            layout.title.format(**named),
            layout.caption,
            tuple(label_headings),
            tuple(columns),
            tuple(Block(tuple(rows)) for rows in blocks),
            decimals,
            tuple(notes),
        )

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows, in order."""
        return tuple(row for block in self.blocks for row in block.rows)

    @property
    def _cells(self) -> Iterator[Cell]:
        return (cell for row in self.rows for cell in row.entries)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All numbers, row by row."""
        return tuple(cell for cell in self._cells if isinstance(cell, Entry))

    @property
    def columns_of_words(self) -> tuple[bool, ...]:
        """For each column, True if it has words rather than numbers."""
        return tuple(
            any(isinstance(row.entries[index], Text) for row in self.rows)
            for index in range(len(self.columns))
        )

    @property
    def missing(self) -> tuple[Missing, ...]:
        """All entries that nobody has measured yet, row by row."""
        return tuple(cell for cell in self._cells if isinstance(cell, Missing))

    @property
    def missing_commands(self) -> tuple[str, ...]:
        """The commands that fill the missing entries, each once, in order."""
        return tuple(dict.fromkeys(cell.command for cell in self.missing))
