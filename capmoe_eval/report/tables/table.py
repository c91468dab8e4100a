"""A filled table: its numbers with what they were taken from, and its cells in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.layout import PaperTable

ALPHA: Final = 0.05
"""A paired test is significant where its p, corrected for the table's tests, is below this."""
_MARKS: Final = {"better": "▲", "worse": "▼", None: ""}


@dataclass(frozen=True)
class PrintedNumber:
    """The number that the paper prints for the same, ours minus it, and the z of this difference.

    Both are in the entry's units; z is None where our standard error is not known.
    """

    value: float
    difference: float
    z: float | None = None


@dataclass
class PairedTest:
    """The mean difference to the baseline over the same documents, in the entry's units.

    It is better above 0, or below where ``lower_is_better``. ``p`` is two-sided, of the test alone;
    ``corrected`` is that after Holm's correction for all tests of the table, None until it is
    filled.
    """

    effect: float
    p: float
    corrected: float | None = None
    lower_is_better: bool = False

    @property
    def verdict(self) -> Literal["better", "worse"] | None:
        """The direction of a significant difference to the baseline, or None."""
        if self.corrected is None or not self.corrected < ALPHA or not self.effect:
            return None
        return "better" if (self.effect > 0) != self.lower_is_better else "worse"


class EntryPart(NamedTuple):
    """The number of one source: an entry is that of one, or the mean of several."""

    column: str  # where it stands in the table
    value: float  # in the entry's units
    source: Record | Path  # a path is of a file of timings


@dataclass(frozen=True)
class Entry:
    """One number of a table, in its display units (percent, where the layout says so).

    It is finite, or a ValueError: a failed run is a :class:`Missing`, never a NaN.
    """

    value: float
    stderr: float | None = None  # one standard error, or None where it is not known
    seeds: tuple[int, ...] = ()  # averaged; empty for a deterministic method or a derived entry
    documents: int | None = None  # number of those evaluated, or None where it is not known
    published: PrintedNumber | None = None
    test: PairedTest | None = None  # with the same model's baseline
    untested: str = ""  # why there is no test where there should be
    quartiles: tuple[float, float] | None = None  # of timings whose median is the value
    # What it was taken from, by column, of several seeds the lowest first.
    parts: tuple[EntryPart, ...] = field(default=(), compare=False, repr=False)

    @property
    def truncated(self) -> int:
        """The documents of all its columns whose prompts were truncated."""
        counts = {
            part.column: part.source.truncated.documents
            for part in self.parts
            if isinstance(part.source, Record) and part.source.truncated
        }
        return sum(counts.values())

    def __post_init__(self) -> None:
        if not math.isfinite(self.value) or not math.isfinite(self.stderr or 0.0):
            raise ValueError(f"an entry must be finite, got {self.value} ± {self.stderr}")


@dataclass(frozen=True)
class Missing:
    """An entry that nobody has measured yet, and the shell command that measures it, if known."""

    command: str


@dataclass(frozen=True)
class CellText:
    """A cell of words, such as the name of a metric."""

    text: str


TableCell: TypeAlias = Entry | Missing | CellText


@dataclass(frozen=True)
class Row:
    """One row: its labels, one cell per column, and what a page filters it by.

    A page filters by the keys of the model and the method, and by γ as shown; these are empty in a
    table that is not of evaluations.
    """

    labels: tuple[str, ...]
    entries: tuple[TableCell, ...]
    model: str = ""
    method: str = ""
    gamma: str = ""


class CellInWords(NamedTuple):
    """A cell as every format shows it; without a value it has words, or is missing."""

    words: str = ""
    command: str | None = None
    value: str = ""
    best: bool = False
    mark: str = ""
    cut: str = ""  # the mark of truncated prompts
    stderr: str = ""
    quartiles: str = ""
    origin: Sequence[str] = ()  # seeds, documents and paired test
    printed: str = ""  # a printed number, our difference to it with its z, and both together
    difference: str = ""
    published: str = ""


class RowInWords(NamedTuple):
    """A row, its labels without those that repeat the row above, and its cells."""

    row: Row
    labels: list[str]
    entries: list[CellInWords]


@dataclass(frozen=True)
class RowBlock:
    """Rows that are compared with each other, set apart by rules in print."""

    rows: tuple[Row, ...]
    lower_is_better: bool | None = False  # None: no entry is marked as best

    def best(self, column: int, decimals: int) -> frozenset[int]:
        """Return the indices of the rows with the best value in a column.

        Values are compared as printed, to so many decimals, so that of two equal-looking numbers
        never only one is marked. Of fewer than two entries none is best.
        """
        printed = {
            index: round(entry.value, decimals)
            for index, row in enumerate(self.rows)
            if isinstance(entry := row.entries[column], Entry)
        }
        if len(printed) < 2 or self.lower_is_better is None:
            return frozenset()
        best = (min if self.lower_is_better else max)(printed.values())
        return frozenset(index for index, value in printed.items() if value == best)

    def in_words(self, decimals: int) -> list[RowInWords]:
        """Return the rows as every format shows them."""
        rows: list[RowInWords] = []
        columns = range(len(self.rows[0].entries) if self.rows else 0)
        by_column = [self.best(column, decimals) for column in columns]
        for index, row in enumerate(self.rows):
            above = self.rows[index - 1].labels if index else [""] * len(row.labels)
            both = zip(row.labels, above, strict=True)
            labels = ["" if label == previous else label for label, previous in both]
            cells = zip(row.entries, by_column, strict=True)
            texts = [_in_words(cell, index in best, decimals) for cell, best in cells]
            rows.append(RowInWords(row, labels, texts))
        return rows


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
    blocks: tuple[RowBlock, ...]
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
        title, lower = layout.title.format(**named), getattr(layout, "lower_is_better", False)
        rows = tuple(RowBlock(tuple(block), lower) for block in blocks)
        headings = tuple(label_headings), tuple(columns)
        return cls(layout.key, title, layout.caption, *headings, rows, decimals, tuple(notes))

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows, in order."""
        return tuple(row for block in self.blocks for row in block.rows)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All numbers, row by row."""
        return tuple(c for row in self.rows for c in row.entries if isinstance(c, Entry))

    @property
    def missing(self) -> tuple[Missing, ...]:
        """All entries that nobody has measured yet, row by row."""
        return tuple(c for row in self.rows for c in row.entries if isinstance(c, Missing))

    @property
    def missing_commands(self) -> tuple[str, ...]:
        """The commands that fill the missing entries, each once, in order."""
        return tuple(dict.fromkeys(cell.command for cell in self.missing if cell.command))

    @property
    def columns_of_words(self) -> tuple[bool, ...]:
        """For each column, True if it has words rather than numbers."""
        cells = [row.entries for row in self.rows]
        columns = range(len(self.columns))
        return tuple(any(isinstance(row[n], CellText) for row in cells) for n in columns)


def _in_words(cell: TableCell, best: bool, decimals: int) -> CellInWords:
    if isinstance(cell, CellText):
        return CellInWords(words=cell.text)
    if isinstance(cell, Missing):
        return CellInWords(command=cell.command)
    low, high = cell.quartiles or (0.0, 0.0)
    test, origin = cell.test, []
    if cell.seeds:
        origin.append(f"seeds {', '.join(map(str, cell.seeds))}")
    if cell.documents is not None:
        origin.append(f"{cell.documents:,} documents")
    if test is not None and test.corrected is not None:
        effect = f"{_signed(test.effect, decimals)} to the baseline"
        origin.append(f"{effect}, p = {test.p:.2g}, corrected {test.corrected:.2g}")
    if cell.truncated:
        origin.append(f"prompts of {cell.truncated:,} documents truncated")
    if cell.untested:
        origin.append(f"no paired test: {cell.untested}")
    words = CellInWords(
        value=f"{cell.value:.{decimals}f}",
        best=best,
        mark=_MARKS[test.verdict if test else None],
        cut="§" if cell.truncated else "",
        stderr="" if cell.stderr is None else f"{cell.stderr:.{decimals}f}",
        quartiles=f"({low:.{decimals}f}–{high:.{decimals}f})" if cell.quartiles else "",
        origin=origin,
    )
    if cell.published is None:
        return words
    printed = f"{cell.published.value:.{decimals}f}"
    gap = [_signed(cell.published.difference, decimals)]
    gap += [] if cell.published.z is None else [_signed(cell.published.z, 1)]
    published = f"{printed} ({', z '.join(gap)})"
    return words._replace(printed=printed, difference=", ".join(gap), published=published)


def _signed(number: float, decimals: int) -> str:
    text = f"{abs(number):.{decimals}f}"
    return f"{'−' if number < 0 else '+'}{text}" if float(text) else text
