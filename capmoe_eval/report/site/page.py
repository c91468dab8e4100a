"""The frame of a page, its addresses, and the words that several pages share."""

from __future__ import annotations

import functools
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Final
from urllib.parse import quote

from capmoe_eval.experiment.names import NO_GAMMA, NO_LIMIT, method_title, metric_title
from capmoe_eval.experiment.packs import file_with
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.site.blocks import (
    Block,
    Code,
    Filter,
    Notice,
    Prose,
    element,
    joined,
    link,
)
from capmoe_eval.report.site.inventory import Brief
from capmoe_eval.report.templates import render
from capmoe_eval.routing.registry import method_names

GENERATOR: Final = "capmoe-eval report"
"""Marks the pages that this package wrote, and may delete."""

STYLE: Final = "site/assets/site.css"
SCRIPT: Final = "site/assets/site.js"

OVERVIEW: Final = "index.html"
TABLES: Final = "site/tables.html"
MEANS: Final = "site/means.html"
FIGURES: Final = "site/figures.html"
IMAGES: Final = "site/images.html"
EFFICIENCY: Final = "site/efficiency.html"
CLAIMS: Final = "site/claims.html"
SOURCES: Final = "site/sources.html"
RECORDS: Final = "site/records.html"
CELLS: Final = "site/cells"

_NAVIGATION: Final = (OVERVIEW, TABLES, FIGURES, IMAGES, EFFICIENCY, CLAIMS, RECORDS)


@dataclass(frozen=True)
class Address:
    """The path of a page below the directory of the report, and this directory."""

    page: str
    out: Path = field(default_factory=Path)

    def to(self, page: str) -> str:
        """Return the relative address of another page."""
        return _relative(page, posixpath.dirname(self.page) or ".")

    def to_record(self, record: Brief) -> str:
        """Return the relative address of a record's page, or of its file where it has none."""
        return (
            self.to(cell_path(record)) if record.has_page else self.to_file(file_with(record.path))
        )

    def to_file(self, path: Path) -> str:
        """Return the relative address of a file anywhere on the disk."""
        here = (self.out / self.page).parent
        try:
            return quote(Path(os.path.relpath(path, here)).as_posix())
        except ValueError:  # another drive
            return path.resolve().as_uri()

    def files(self, lead: str, stem: Path, formats: Mapping[str, str]) -> list[Block]:
        """Return links to the files of a stem that are there; formats have a text by suffix."""
        paths = {stem.with_name(f"{stem.name}.{suffix}"): text for suffix, text in formats.items()}
        links = [link(self.to_file(path), text) for path, text in paths.items() if path.is_file()]
        return [Prose(joined([lead, *links], " "), "files")] if links else []


@functools.lru_cache(maxsize=65536)  # the pages of a directory lead to the same ones
def _relative(page: str, folder: str) -> str:
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


def render_page(address: Address, title: str, profile: str, blocks: Iterable[Block]) -> str:
    """Return a page of the site."""
    names = {page: Path(page).stem.title() for page in _NAVIGATION} | {OVERVIEW: "Overview"}
    return render(
        "page.html",
        generator=GENERATOR,
        title=title,
        profile=profile,
        style=address.to(STYLE),
        script=address.to(SCRIPT),
        navigation=[(names[page], address.to(page), page == address.page) for page in names],
        blocks=blocks,
    )


def without_places(
    pages: Iterable[tuple[str, str]], places: Iterable[Path]
) -> Iterator[tuple[str, str]]:
    """Yield pages by path; what lies below a place is named without the directories above it.

    A place below the working directory is named from there, any other by its last part alone.
    Relative addresses, which links are, stay.
    """
    here, names = Path.cwd(), dict[str, str]()
    for place in places:
        for form in (place.absolute(), place.resolve()):
            inside = form.is_relative_to(here)
            name = form.relative_to(here).as_posix() if inside else f"…/{form.name}"
            if form.name:  # not the root, which is above all
                names[escape(form.as_posix())] = escape(name)
    longest_first = sorted(names, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w./…-])({'|'.join(map(re.escape, longest_first))})(?![\w.-])")
    for path, text in pages:
        yield path, pattern.sub(lambda match: names[match[1]], text)


# Prose that several pages share.


def left_out(lines: Sequence[str], singular: str, plural: str) -> list[Block]:
    """Return the box of the files that cannot be read, if there are any."""
    subject = f"1 file {singular}" if len(lines) == 1 else f"{len(lines)} files {plural}"
    return [Notice(f"{subject} left out everywhere:", lines)] if lines else []


def missing(
    singular: str, plural: str, commands: Sequence[str], count: int | None = None
) -> list[Block]:
    """Return the commands that measure what is missing, if anything is; ``count`` is of these."""
    number = len(commands) if count is None else count
    subject = f"1 {singular} is" if number == 1 else f"{number} {plural} are"
    summary = f"{subject} missing: the commands that measure them"
    return [Code("\n".join(commands), summary)] if number else []


def unwritten(lead: str, command: str, profile: str) -> Notice:
    """Return the box with the command that writes what is not there."""
    text = element("code", f"capmoe-eval {command} profile={profile}")
    return Notice(joined([lead, text], " "))


def strong(lines: Iterable[str]) -> list[Block]:
    """Return paragraphs that stand out."""
    return [Prose(element("strong", line)) for line in lines]


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a key by which fig2 comes before fig12."""
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(p), "") if p.isdecimal() and p.isascii() else (1, 0, p) for p in parts]


GAMMA_ORDER: Final = {NO_LIMIT: 1e9, NO_GAMMA: -1}
"""The numbers that texts of γ without one sort by."""


def gamma_order(text: str) -> float:
    """Return the number that a text of γ sorts by: words come behind the numbers."""
    if text in GAMMA_ORDER:
        return float(GAMMA_ORDER[text])
    words, number = re.fullmatch(r"(\D*)(.*)", text).groups()  # type: ignore[union-attr]
    if words:  # such as adaptive0.05, by its budget
        return 1e6 + float(number) if number else 2e6
    return float(number)


def method_name(method: str) -> str:
    """Return the printed name of a method, behind its name as a selection metric if it has one."""
    title, metric = method_title(method), metric_title(method)
    return title if title == metric else f"{metric} ({title})"


def name_filter(key: str, label: str, names: Iterable[str]) -> Filter:
    """Return a choice among names, in alphabetical order."""
    return Filter(key, label, {name: name for name in sorted(set(names))})


def method_filter(methods: Iterable[str]) -> Filter:
    """Return a choice among methods, in the order of their titles."""
    present, order = set(methods), list(method_names())
    names = sorted(present, key=lambda n: (order.index(n) if n in order else len(order), n))
    return Filter("method", "Method", {name: method_name(name) for name in names})


def gamma_filter(texts: Iterable[str]) -> Filter:
    """Return a choice among texts of γ, by their size."""
    words = {NO_LIMIT: f"{NO_LIMIT} (no limit)", NO_GAMMA: f"{NO_GAMMA} (none)"}
    ordered = sorted(set(texts), key=gamma_order)
    return Filter("gamma", "γ", {text: words.get(text, text) for text in ordered})
