"""The frame of a page, and its addresses."""

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
from capmoe_eval.report.site.inventory import Brief
from capmoe_eval.report.templates import render

GENERATOR: Final = "capmoe_eval.site"
"""Marks the pages that this package wrote, and may delete."""

STYLE: Final = "site/assets/site.css"
SCRIPT: Final = "site/assets/site.js"

OVERVIEW: Final = "index.html"
TABLES: Final = "site/tables.html"
FIGURES: Final = "site/figures.html"
IMAGES: Final = "site/images.html"
EFFICIENCY: Final = "site/efficiency.html"
SERVING: Final = "site/serving.html"
CLAIMS: Final = "site/claims.html"
RECORDS: Final = "site/records.html"
CELLS: Final = "site/cells"

_NAVIGATION: Final = (
    (OVERVIEW, "Overview"),
    (TABLES, "Tables"),
    (FIGURES, "Figures"),
    (IMAGES, "Images"),
    (EFFICIENCY, "Efficiency"),
    (SERVING, "Serving"),
    (CLAIMS, "Claims"),
    (RECORDS, "Records"),
)

Link: TypeAlias = dict[str, str]
"""The target of a link (``href``), and its text."""


@dataclass(frozen=True)
class Address:
    """The path of a page below the directory of the report, and this directory."""

    page: str
    out: Path = field(default_factory=Path)

    def to(self, page: str) -> str:
        """Return the relative link to another page."""
        return _link(page, posixpath.dirname(self.page) or ".")

    def link(self, page: str, text: str) -> Link:
        """Return a link to another page, as templates show it."""
        return {"href": self.to(page), "text": text}

    def to_record(self, record: Brief) -> str:
        """Return the relative link to a record's page, or to its file where it has none."""
        return self.to(cell_path(record)) if record.has_page else self.to_file(record.path)

    def link_to_file(self, path: Path, text: str) -> Link:
        """Return a link to a file anywhere on the disk, as templates show it."""
        return {"href": self.to_file(path), "text": text}

    def files(self, stem: Path, formats: Mapping[str, str]) -> list[Link]:
        """Return links to the files of a stem that are there; formats have a text by suffix."""
        paths = {stem.with_name(f"{stem.name}.{suffix}"): text for suffix, text in formats.items()}
        return [self.link_to_file(path, text) for path, text in paths.items() if path.is_file()]

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


def cell_path(record: Record | Brief) -> str:
    """Return the path of a record's page; names of models and tasks become file names."""
    return f"{CELLS}/{_slug(record.model)}/{_slug(record.task)}/{record.digest}.html"


def list_path(record: Brief) -> str:
    """Return the path of the list of a record's model and task, where there are many records."""
    return f"{posixpath.dirname(cell_path(record))}/index.html"


def _slug(name: str) -> str:
    """Return a name that is safe in a path; the digest in the file name tells equal ones apart."""
    return re.sub(r"[^A-Za-z0-9_-]|^-", "_", name)[:80] or "_"


def render_page(template: str, address: Address, title: str, profile: str, **values: object) -> str:
    """Return a page of the site, with what the template of its content shows."""
    navigation = [(name, address.to(page), page == address.page) for page, name in _NAVIGATION]
    return render(
        f"{template}.html",
        generator=GENERATOR,
        title=title,
        profile=profile,
        style=address.to(STYLE),
        script=address.to(SCRIPT),
        navigation=navigation,
        **values,
    )


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a key by which fig2 comes before fig12."""
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(p), "") if p.isdecimal() and p.isascii() else (1, 0, p) for p in parts]
