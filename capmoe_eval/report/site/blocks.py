"""The blocks of a page, as values: one template renders them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TypeAlias

from markupsafe import Markup

from capmoe_eval.report.templates import shown

# In a line: plain texts, which are escaped, and elements.


def element(name: str, text: object, **attributes: str) -> Markup:
    """Return an HTML element; the underscore behind an attribute's name is dropped."""
    names = {key: key.rstrip("_").replace("_", "-") for key in attributes}
    texts = "".join(f' {names[key]}="{escape(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{texts}>{{}}</{name}>").format(text)


def link(href: str, text: object) -> Markup:
    """Return a link."""
    return Markup('<a href="{}">{}</a>').format(href, text)


def badge(word: str) -> Markup:
    """Return a verdict or a state, told apart by colour, too."""
    return Markup('<span class="badge {}">{}</span>').format(_kind(word), word)


@functools.cache
def _kind(word: str) -> str:
    return re.sub(r"[^a-z]+", "-", word.lower())


def joined(parts: Iterable[str], between: str = ", ") -> Markup:
    """Return parts in one line."""
    return Markup(between).join(parts)


# Below each other.


@dataclass(frozen=True)
class Prose:
    """A paragraph, with the name of its class."""

    text: str
    look: str = ""


@dataclass(frozen=True)
class Notice:
    """A box for what is wrong or missing, with a list of lines."""

    text: str
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Pairs:
    """A table of names and values."""

    rows: Iterable[tuple[str, str]]


@dataclass(frozen=True)
class DataCell:
    """A cell of a table; one with a number is sorted by it."""

    text: str
    look: str = ""
    value: float | None = None
    title: str = ""
    is_heading: bool = False


def head(text: str, value: float | None = None) -> DataCell:
    """Return the heading of a row."""
    return DataCell(text, value=value, is_heading=True)


def number(text: str, value: float | None) -> DataCell:
    """Return a cell with a number as text, which sorts by the number."""
    return DataCell(text, "number", value)


def numbers(*values: float | None, pattern: str, scale: float = 1.0) -> list[DataCell]:
    """Return cells with numbers in one format."""
    return [number(shown(value, pattern, scale), value) for value in values]


@dataclass(frozen=True)
class DataRow:
    """A row of a table; filters choose it by ``data``."""

    cells: Sequence[DataCell]
    data: Mapping[str, str] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True)
class DataTable:
    """A table in parts, whose headings sort it; else the caption is read to the blind alone."""

    caption: str
    headings: Sequence[str]
    parts: Sequence[Sequence[DataRow]]
    look: str = ""
    is_sortable: bool = True

    @property
    def columns(self) -> list[tuple[str, str]]:
        """The headings, each with the class of its column: of numbers, or none."""
        first = next((row.cells for rows in self.parts for row in rows), ())
        looks = ["number" if "number" in cell.look else "" for cell in first]
        return list(zip(self.headings, looks or [""] * len(self.headings), strict=False))


@dataclass(frozen=True)
class Code:
    """Commands, or lines of a file; folded where there is a summary."""

    lines: str
    summary: str = ""
    look: str = ""
    is_file: bool = False


@dataclass(frozen=True)
class Notes:
    """A list; what was left out stands in red."""

    lines: Sequence[str]
    look: str = ""


@dataclass(frozen=True)
class Drawing:
    """A figure between what stands above it and its caption."""

    title: str
    image: str
    caption: Sequence[Block]
    above: Sequence[Block] = ()
    id: str = ""


@dataclass(frozen=True)
class Filter:
    """A choice among the rows of a page."""

    key: str  # rows are chosen by their data-<key>; those without it always stay
    label: str
    options: Mapping[str, str]  # value of data-<key> → what is shown


@dataclass(frozen=True)
class Filters:
    """The form of a page's filters; the script shows it, without one it would do nothing."""

    choices: Sequence[Filter]
    keeps_baselines: bool = False


@dataclass(frozen=True)
class Section:
    """Blocks under a heading; one with a name is a table that filters may empty."""

    title: str
    blocks: Sequence[Block]
    id: str = ""


@dataclass(frozen=True)
class Folded:
    """Blocks under a summary that opens them."""

    summary: str
    blocks: Sequence[Block]
    look: str = ""


Block: TypeAlias = (
    Prose | Notice | Pairs | DataTable | Code | Notes | Drawing | Filters | Section | Folded
)
"""A part of a page."""
