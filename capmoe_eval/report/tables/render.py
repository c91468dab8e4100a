"""A table as Markdown, LaTeX, CSV and HTML: the same table, the same bytes."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

from capmoe_eval.experiment.files import write_text
from capmoe_eval.experiment.names import NO_GAMMA, NO_LIMIT
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.tables.table import Cell, Entry, Missing, Published, Table, Text
from capmoe_eval.report.templates import render

_MARKS: Final = {"better": "▲", "worse": "▼", None: ""}
_SUFFIXES: Final = (
    *("", " stderr", " low", " high", " published", " difference", " z"),
    *(" effect", " p", " p corrected"),
)
"""Endings of a number's columns in CSV, in their order; the first two are always there."""

View: TypeAlias = dict[str, Any]
"""A row or a cell in words, see :func:`body_view`."""


def to_markdown(table: Table) -> str:
    """Return a GitHub-flavoured Markdown section.

    The best entries of a block are bold, ▼ and ▲ mark what differs from the baseline, and standard
    errors follow as "± 2.2", quartiles as "(1.1–1.3)". What the paper prints for a row is a row
    below it. Below the table stand the commands that fill the missing entries, and the notes.
    """
    return _filled("table.md", table)


def to_latex(table: Table) -> str:
    """Return a LaTeX ``table`` that needs the booktabs package and nothing else.

    It shows what :func:`to_markdown` does; commands that fill missing entries are comments.
    """
    return _filled("table.tex", table)


def to_html(table: Table) -> str:
    """Return one ``<table class="capmoe">`` element for any page.

    Published numbers stand in ``<small>``. The tooltip (``title``) of an entry tells its standard
    error, seeds, documents and test, that of a missing one the command that fills it.
    """
    return _filled("table.html", table)


def _filled(template: str, table: Table) -> str:
    headings = [*table.label_headings, *table.columns]
    return render(template, table=table, headings=headings, blocks=body_view(table))


def to_csv(table: Table) -> str:
    """Return one line per row, with full labels and full precision.

    Each column of numbers is followed by its "… stderr", in the same display units; where the
    table has them, by its quartiles "… low" and "… high", by its "… published", "… difference" and
    "… z", and by its "… effect", "… p" and "… p corrected" of the paired test. Unknown and missing
    numbers are empty, and "+∞" is ``inf``, so that pandas reads numbers as numbers.
    """
    found = {suffix for entry in table.entries for suffix in _numbers(entry)}
    suffixes = [suffix for suffix in _SUFFIXES if suffix in found] or _SUFFIXES[:2]
    headings = list(table.label_headings)
    for heading, words in zip(table.columns, table.columns_of_words, strict=True):
        headings += [heading] if words else [heading + suffix for suffix in suffixes]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, headings, lineterminator="\n")
    writer.writeheader()
    for row in table.rows:
        labels = [{NO_LIMIT: "inf", NO_GAMMA: ""}.get(label, label) for label in row.labels]
        cells: dict[str, object] = dict(zip(table.label_headings, labels, strict=True))
        for heading, cell in zip(table.columns, row.entries, strict=True):
            cells |= {heading + suffix: part for suffix, part in _numbers(cell).items()}
        writer.writerow(cells)
    return buffer.getvalue()


def _numbers(cell: Cell) -> dict[str, object]:
    """Return what CSV has of a cell, by the suffix of its column."""
    if not isinstance(cell, Entry):
        return {"": cell.text} if isinstance(cell, Text) else {}
    found: dict[str, object] = {"": cell.value, " stderr": cell.stderr}
    if cell.quartiles:
        found[" low"], found[" high"] = cell.quartiles
    if there := cell.published:
        found |= {" published": there.value, " difference": there.difference, " z": there.z}
    if test := cell.test:
        found |= {" effect": test.effect, " p": test.p, " p corrected": test.corrected}
    return found


def body_view(table: Table, href: Callable[[Record], str] | None = None) -> list[list[View]]:
    """Return what formats show: the rows of each block, with their labels and cells in words.

    ``href`` returns the address of a record's page; None where there are no such pages.
    """
    blocks = []
    for block in table.blocks:
        best = [block.best(column, table.decimals) for column in range(len(table.columns))]
        rows: list[View] = []
        above: tuple[str, ...] = ("",) * len(table.label_headings)
        for index, row in enumerate(block.rows):
            entries = []
            for cell, highest in zip(row.entries, best, strict=True):
                entries.append(_view(cell, index in highest, table.decimals))
                if href and isinstance(cell, Entry) and cell.records:
                    entries[-1]["href"] = href(cell.records[0])
            pairs = zip(row.labels, above, strict=True)
            labels = ["" if label == previous else label for label, previous in pairs]
            rows.append({"of": row, "labels": labels, "entries": entries})
            above = row.labels
        blocks.append(rows)
    return blocks


def _view(cell: Cell, best: bool, decimals: int) -> View:
    if isinstance(cell, Text):
        return {"words": cell.text, **_beside(None, decimals)}
    if isinstance(cell, Missing):
        return {"command": cell.command, **_beside(None, decimals)}
    verdict = cell.test.verdict if cell.test else None
    low, high = cell.quartiles or (0.0, 0.0)
    return {
        "value": f"{cell.value:.{decimals}f}",
        "number": float(cell.value),
        "best": best,
        "verdict": verdict,
        "mark": _MARKS[verdict],
        "quartiles": cell.quartiles and f"({low:.{decimals}f}–{high:.{decimals}f})",
        "stderr": None if cell.stderr is None else f"{cell.stderr:.{decimals}f}",
        "origin": _origin(cell, decimals),
        **_beside(cell.published, decimals),
    }


def _beside(published: Published | None, decimals: int) -> View:
    """Return a printed number and our difference to it with its z, apart and together."""
    if published is None:
        return dict.fromkeys(("printed", "difference", "published"), "")
    printed, difference = f"{published.value:.{decimals}f}", _signed(published.difference, decimals)
    z = [] if published.z is None else [_signed(published.z, 1)]
    return {
        "printed": printed,
        "difference": ", ".join([difference, *z]),
        "published": f"{printed} ({', z '.join([difference, *z])})",
    }


RENDERERS: Final = {"md": to_markdown, "tex": to_latex, "csv": to_csv, "html": to_html}
"""Renderer of each file suffix."""


def write(table: Table, directory: Path) -> list[Path]:
    """Write a table in every format, each file whole or not at all; return their paths."""
    # All are rendered before the first is written: a failure leaves no mixture of old and new.
    texts = {directory / f"{table.name}.{suffix}": r(table) for suffix, r in RENDERERS.items()}
    for path, text in texts.items():
        write_text(path, text)
    return list(texts)


def _origin(entry: Entry, decimals: int) -> list[str]:
    """Return what an entry rests on: its seeds, its documents and its paired test."""
    parts = []
    if entry.seeds:
        parts.append(f"seeds {', '.join(map(str, entry.seeds))}")
    if entry.documents is not None:
        parts.append(f"{entry.documents:,} documents")
    if entry.test is not None and entry.test.corrected is not None:
        parts.append(
            f"{_signed(entry.test.effect, decimals)} to the baseline, p = {entry.test.p:.2g},"
            f" corrected {entry.test.corrected:.2g}"
        )
    if entry.untested:
        parts.append(f"no paired test: {entry.untested}")
    return parts


def _signed(number: float, decimals: int) -> str:
    text = f"{abs(number):.{decimals}f}"
    if not float(text):
        return text
    return f"{'−' if number < 0 else '+'}{text}"
