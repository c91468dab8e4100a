"""The frame of a page, its addresses, and the tables and filters that the script works on."""

from __future__ import annotations

import functools
import os
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

from capmoe_eval.record import Record
from capmoe_eval.site.markup import Child, Markup, element, join

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

    def link(self, page: str, text: str) -> dict[str, str]:
        """Return a link to another page, as templates show it."""
        return {"href": self.to(page), "text": text}

    def link_to_file(self, path: Path, text: str) -> dict[str, str]:
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


def frame(address: Address, title: str, profile: str, *body: Child) -> str:
    """Return a whole page.

    Args:
        address: Where it will be.
        title: Its heading.
        profile: What the report is about.
        body: Its content below the heading.
    """
    links = [
        element(
            "a",
            name,
            href=address.to(page),
            aria_current="page" if page == address.page else None,
        )
        for page, name in _NAVIGATION
    ]
    whole_title = f"{title} · capmoe_eval, profile {profile}"
    head = element(
        "head",
        Markup('<meta charset="utf-8">'),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="generator", content=GENERATOR),
        element("title", whole_title),
        element("link", rel="stylesheet", href=address.to(STYLE)),
        element("script", "", src=address.to(SCRIPT), defer=True),
    )
    content = element(
        "body",
        element("a", "Skip to the content", class_="skip", href="#content"),
        element(
            "header",
            element("p", element("strong", "capmoe_eval"), f" profile {profile}", class_="brand"),
            element("nav", links, aria_label="Pages"),
        ),
        Markup("\n"),
        element("main", element("h1", title), Markup("\n"), body, id="content", tabindex="-1"),
    )
    return f'<!DOCTYPE html>\n<html lang="en">\n{head}\n{content}\n</html>\n'


@dataclass(frozen=True)
class Heading:
    """A column of a sortable table.

    Attributes:
        text: Its heading.
        numeric: Whether it is aligned as a number is.
    """

    text: str
    numeric: bool = False


def sortable(
    caption: Child,
    headings: Sequence[Heading],
    bodies: Iterable[Child],
    *after: Child,
    wraps: bool = True,
) -> Markup:
    """Return a table whose headings are buttons that sort it; without a script, plain headings.

    Args:
        caption: What the table is.
        headings: Its columns.
        bodies: For each block of rows, the rows. A cell with ``data-value`` is sorted by that
            number, another by its text.
        after: What stands below it.
        wraps: Whether texts may break into lines.
    """
    heads = [
        element("th", h.text, scope="col", class_="number" if h.numeric else None) for h in headings
    ]
    table = element(
        "table",
        element("caption", caption),
        Markup("\n"),
        element("thead", element("tr", heads)),
        [join("\n", element("tbody", body)) for body in bodies],
        class_="sortable" if wraps else "sortable lines",
    )
    return join(
        element(
            "div",
            table,
            class_="wide",
            tabindex="0",
            role="region",
            aria_label="Table, scrolls sideways",
        ),
        *after,
    )


def rows(found: Iterable[Markup]) -> Markup:
    """Return table rows, each on a line of its own."""
    return Markup("".join(f"\n{row}" for row in found))


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


def filters(found: Sequence[Filter], keeps_baselines: bool = False) -> Markup:
    """Return the form of a page's filters; the script shows it, without one it would do nothing.

    Args:
        found: The filters.
        keeps_baselines: Whether to offer that baselines stay, whatever method and γ are chosen.
    """
    fields = []
    for one in found:
        choices = [element("option", "all", value="")]
        choices += [element("option", text, value=value) for value, text in one.options.items()]
        select = element("select", choices, id=f"filter-{one.key}", name=one.key)
        fields.append(
            element("p", element("label", one.label, for_=f"filter-{one.key}"), Markup(" "), select)
        )
    if keeps_baselines:
        box = element(
            "input", type="checkbox", id="filter-baselines", name="baselines", checked=True
        )
        label = element("label", "keep the baselines", for_="filter-baselines")
        fields.append(element("p", box, Markup(" "), label))
    return element(
        "form",
        fields,
        element("p", element("button", "Show all", type="reset")),
        element("p", class_="shown", role="status"),
        class_="filters",
        aria_label="Filters",
        hidden=True,
    )


def notice(*children: Child) -> Markup:
    """Return a box for what is wrong or missing."""
    return element("div", *children, class_="notice", role="note")


def badge(word: str) -> Markup:
    """Return a verdict, told apart by colour, too."""
    return element("span", word, class_=f"badge {re.sub(r'[^a-z]+', '-', word.lower())}")


def pairs(found: Iterable[tuple[str, Child]]) -> Markup:
    """Return a table of names and values."""
    lines = [
        _known_pair(name, value) if type(value) is str else _pair(name, value)
        for name, value in found
    ]
    return element("table", element("tbody", rows(lines)), class_="pairs")


def _pair(name: str, value: Child) -> Markup:
    return element("tr", element("th", name, scope="row"), element("td", value))


# Most records were computed by the same versions. Texts alone: markup that equals one is no text.
_known_pair = functools.lru_cache(maxsize=65536)(_pair)


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a key by which fig2 comes before fig12."""
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(p), "") if p.isdecimal() and p.isascii() else (1, 0, p) for p in parts]
