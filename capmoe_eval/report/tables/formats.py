"""A table's text as Markdown, LaTeX, CSV and HTML: the same table, the same bytes."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Final

from capmoe_eval.experiment.files import write_text
from capmoe_eval.experiment.names import NO_GAMMA, NO_LIMIT
from capmoe_eval.report.tables.table import CellText, Entry, Table, TableCell
from capmoe_eval.report.templates import render

_SUFFIXES: Final = (
    *("", " stderr", " low", " high", " published", " difference", " z"),
    *(" effect", " p", " p corrected", " truncated"),
)
"""Endings of a number's columns in CSV, in their order; the first two are always there."""


def to_markdown(table: Table) -> str:
    """Return a GitHub-flavoured Markdown section.

    The best entries of a block are bold, ▼ and ▲ mark what differs from the baseline, § marks
    truncated prompts, and standard errors follow as "± 2.2", quartiles as "(1.1–1.3)". What
    the paper prints for a row is a row below it. Below the table stand the commands that fill the
    missing entries, and the notes.
    """
    return render("table.md", table=table)


def to_latex(table: Table) -> str:
    """Return a LaTeX ``table`` that needs the booktabs package and nothing else.

    It shows what :func:`to_markdown` does; commands that fill missing entries are comments.
    """
    return render("table.tex", table=table)


def to_html(table: Table) -> str:
    """Return one ``<table class="capmoe">`` element for any page.

    Published numbers stand in ``<small>``. The tooltip (``title``) of an entry tells its standard
    error, seeds, documents and test, that of a missing one the command that fills it.
    """
    return render("table.html", table=table)


def to_csv(table: Table) -> str:
    """Return one line per row, with full labels and full precision.

    Each column of numbers is followed by its "… stderr", in the same display units. Where the table
    has them, there follow the quartiles "… low" and "… high"; "… published", "… difference" and
    "… z"; and "… effect", "… p" and "… p corrected" of the paired test. Last stands "… truncated",
    the documents whose prompts were. Unknown and missing numbers are empty, and "+∞" is ``inf``,
    so that pandas reads numbers as numbers.
    """
    present = {suffix for entry in table.entries for suffix in _numbers(entry)}
    suffixes = [suffix for suffix in _SUFFIXES if suffix in present] or _SUFFIXES[:2]
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


def _numbers(cell: TableCell) -> dict[str, object]:
    """Return what CSV has of a cell, by the suffix of its column."""
    if not isinstance(cell, Entry):
        return {"": cell.text} if isinstance(cell, CellText) else {}
    numbers: dict[str, object] = {"": cell.value, " stderr": cell.stderr}
    if cell.quartiles:
        numbers[" low"], numbers[" high"] = cell.quartiles
    if there := cell.published:
        numbers |= {" published": there.value, " difference": there.difference, " z": there.z}
    if test := cell.test:
        numbers |= {" effect": test.effect, " p": test.p, " p corrected": test.corrected}
    if cell.truncated:
        numbers[" truncated"] = cell.truncated
    return numbers


RENDERERS: Final = {"md": to_markdown, "tex": to_latex, "csv": to_csv, "html": to_html}
"""Renderer of each file suffix."""


def write(table: Table, directory: Path) -> list[Path]:
    """Write a table in every format, each file whole or not at all; return their paths."""
    # All are rendered before the first is written: a failure leaves no mixture of old and new.
    texts = {directory / f"{table.name}.{suffix}": r(table) for suffix, r in RENDERERS.items()}
    for path, text in texts.items():
        write_text(path, text)
    return list(texts)
