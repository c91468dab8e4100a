"""The frame of a page, its addresses, and the filters that the script works on."""

from __future__ import annotations

import functools
import os
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import quote

from capmoe_eval.experiment.record import Record

GENERATOR: Final = "capmoe_eval.site"
"""Marks the pages that this package wrote, and may delete."""

STYLE: Final = "site/assets/site.css"
SCRIPT: Final = "site/assets/site.js"

OVERVIEW: Final = "index.html"
TABLES: Final = "site/tables.html"
FIGURES: Final = "site/figures.html"
EFFICIENCY: Final = "site/efficiency.html"
CLAIMS: Final = "site/claims.html"
RECORDS: Final = "site/records.html"
CELLS: Final = "site/cells"

_NAVIGATION: Final = (
    (OVERVIEW, "Overview"),
    (TABLES, "Tables"),
    (FIGURES, "Figures"),
    (EFFICIENCY, "Efficiency"),
    (CLAIMS, "Claims"),
    (RECORDS, "Records"),
)

Link: TypeAlias = dict[str, str]
"""Where a link leads (``href``), and its text."""


@dataclass(frozen=True)
class Address:
    """Where a page is, and how others are reached from it.

    Attributes:
        page: Its path below the directory of the report, with forward slashes.
        out: The directory of the report.
    """

    page: str
    out: Path = field(default_factory=Path)

    def to(self, page: str) -> str:
        """Return the relative link to another page."""
        return _link(page, posixpath.dirname(self.page) or ".")

    def link(self, page: str, text: str) -> Link:
        """Return a link to another page, as templates show it."""
        return {"href": self.to(page), "text": text}

    def link_to_file(self, path: Path, text: str) -> Link:
        """Return a link to a file anywhere on the disk, as templates show it."""
        return {"href": self.to_file(path), "text": text}

    def to_file(self, path: Path) -> str:
        """Return the relative link to a file anywhere on the disk."""
        here = (self.out / self.page).parent
        try:
            return quote(Path(os.path.relpath(path, here)).as_posix())
        except ValueError:  # another drive
            return path.resolve().as_uri()


@functools.lru_cache(maxsize=65536)  # the pages of a directory lead to the same ones
def _link(page: str, folder: str) -> str:
    return quote(posixpath.relpath(page, folder))


def cell_path(record: Record) -> str:
    """Return the path of a record's page; names of models and tasks become file names."""
    return f"{CELLS}/{_slug(record.model)}/{_slug(record.task)}/{record.cell.digest}.html"


def _slug(name: str) -> str:
    """Return a name that is safe in a path; the digest in the file name tells equal ones apart."""
    return re.sub(r"[^A-Za-z0-9_-]|^-", "_", name)[:80] or "_"


@dataclass(frozen=True)
class Frame:
    """What stands around the content of every page.

    Attributes:
        address: Where the page will be.
        title: Its heading.
        profile: What the report is about.
    """

    address: Address
    title: str
    profile: str
    generator: str = GENERATOR

    @property
    def style(self) -> str:
        """Link to the stylesheet."""
        return self.address.to(STYLE)

    @property
    def script(self) -> str:
        """Link to the script."""
        return self.address.to(SCRIPT)

    @property
    def navigation(self) -> list[tuple[str, str, bool]]:
        """Name of and link to each page of the navigation, and whether it is this one."""
        here = self.address
        return [(name, here.to(page), page == here.page) for page, name in _NAVIGATION]


@dataclass(frozen=True)
class Filter:
    """A choice among the rows of a page.

    Attributes:
        key: Rows are chosen by their ``data-<key>``; those without it always stay.
        label: What is chosen.
        options: Value of ``data-<key>`` → what is shown.
    """

    key: str
    label: str
    options: Mapping[str, str]


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a key by which fig2 comes before fig12."""
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(p), "") if p.isdecimal() and p.isascii() else (1, 0, p) for p in parts]
