"""A table as Markdown, LaTeX, CSV and HTML: the same table, the same bytes."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from capmoe_eval.experiment.files import write_text
from capmoe_eval.experiment.names import NO_GAMMA, NO_LIMIT
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.tables.table import Cell, Entry, Missing, Published, Table, Text
from capmoe_eval.report.templates import render
from capmoe_eval.report.templates.texts import latex, markdown, one_line

_MARKS: Final = MappingProxyType({"better": "▲", "worse": "▼", None: ""})

View: TypeAlias = dict[str, Any]
"""A row or a cell in words, see :func:`body_view`."""


@dataclass(frozen=True)
class _Format:
    """A format of print: its escape, a missing cell, and what is put around parts of an entry."""

    escape: Callable[[str], str]
    missing: str
    best: str
    quartiles: str
    stderr: str

    def cell(self, cell: View) -> str:
        """Return a cell as text."""
        if "command" in cell:
            return self.missing
        if "words" in cell:
            return self.escape(cell["words"])
        value = self.best.format(cell["value"]) if cell["best"] else cell["value"]
        value += self.escape(cell["mark"])
        if cell["quartiles"]:
            return value + self.quartiles.format(self.escape(cell["quartiles"]))
        return value + self.stderr.format(cell["stderr"]) if cell["stderr"] else value

    def row(self, row: View) -> list[str]:
        """Return the texts of a row; repeated labels are blank."""
        return [*map(self.escape, row["labels"]), *map(self.cell, row["entries"])]


_MARKDOWN: Final = _Format(markdown, "—", "**{}**", " {}", " ± {}")
_LATEX: Final = _Format(
    latex, "---", r"\textbf{{{}}}", r"{{\scriptsize\,{}}}", r"{{\scriptsize\,$\pm$\,{}}}"
)


def to_markdown(table: Table) -> str:
    """Return a GitHub-flavoured Markdown section.

    The best entries of a block are bold, ▼ and ▲ mark what differs from the baseline, and standard
    errors follow as "± 2.2", quartiles as "(1.1–1.3)". What the paper prints for a row is a row
    below it. Below the table stand the commands that fill the missing entries, and the notes.
    """
    rules = [":--"] * len(table.label_headings)
    rules += [":--" if words else "--:" for words in table.columns_of_words]
    rows = [[markdown(h) for h in (*table.label_headings, *table.columns)], rules]
    for block in body_view(table):
        for row in block:
            rows += [_MARKDOWN.row(row), *_beside(table, row, {"_published_": "published"})]
    parts = [
        f"### {markdown(table.title)}",
        markdown(table.caption),
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
    ]
    if table.missing_commands:
        parts += ["Missing cells:", "\n".join(["```shell", *table.missing_commands, "```"])]
    if table.notes:
        parts.append("\n".join(f"- {markdown(note)}" for note in table.notes))
    return "\n\n".join(parts) + "\n"


def to_latex(table: Table) -> str:
    r"""Return a LaTeX ``table`` that needs the booktabs package and nothing else.

    The best entries of a block are bold, daggers mark what differs from the baseline, blocks are
    set apart by ``\midrule``, standard errors and published numbers (below) are small. The
    commands that fill the missing entries are comments.
    """
    alignment = "l" * len(table.label_headings)
    alignment += "".join("l" if words else "r" for words in table.columns_of_words)
    rows = [" & ".join(latex(h) for h in (*table.label_headings, *table.columns)) + r" \\"]
    # Two short lines below a row, for a page is narrow.
    below = {"published": "printed", "difference, z": "difference"}
    for block in body_view(table):
        rows.append(r"\midrule")
        for row in block:
            rows.append(" & ".join(_LATEX.row(row)) + r" \\")
            for small in _beside(table, row, below):
                cells = [rf"{{\scriptsize {latex(text)}}}" if text else "" for text in small]
                rows.append(" & ".join(cells) + r" \\")
    lines = [
        r"\begin{table}[t]",
        r"\centering",
        rf"\caption{{\textbf{{{latex(table.title)}.}} {latex(table.caption)}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
        *(rf"\par\smallskip{{\footnotesize {latex(note)}}}" for note in table.notes),
        *(f"% missing: {one_line(command)}" for command in table.missing_commands),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def to_csv(table: Table) -> str:
    """Return one line per row, with full labels and full precision.

    Each column of numbers is followed by its "… stderr", in the same display units; where the
    table has them, by its quartiles "… low" and "… high", by its "… published", "… difference" and
    "… z", and by its "… effect", "… p" and "… p corrected" of the paired test. Unknown and missing
    numbers are empty, and "+∞" is ``inf``, so that pandas reads numbers as numbers.
    """
    suffixes = ["", " stderr"]
    suffixes += [" low", " high"] if any(e.quartiles for e in table.entries) else []
    if any(entry.published for entry in table.entries):
        suffixes += [" published", " difference", " z"]
    if any(entry.test for entry in table.entries):
        suffixes += [" effect", " p", " p corrected"]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    columns = list(zip(table.columns, table.columns_of_words, strict=True))
    headings = [
        heading + suffix for heading, words in columns for suffix in ([""] if words else suffixes)
    ]
    writer.writerow([*table.label_headings, *headings])
    for row in table.rows:
        cells: list[str | float | None] = []
        cells += [{NO_LIMIT: "inf", NO_GAMMA: ""}.get(label, label) for label in row.labels]
        for cell, (_, words) in zip(row.entries, columns, strict=True):
            if words:
                cells.append(cell.text if isinstance(cell, Text) else None)
            else:
                found = _numbers(cell) if isinstance(cell, Entry) else {}
                cells += [found.get(suffix) for suffix in suffixes]
        writer.writerow(cells)
    return buffer.getvalue()


def _numbers(entry: Entry) -> dict[str, float | None]:
    """Return the numbers of an entry by the suffix of their column."""
    found = {"": entry.value, " stderr": entry.stderr}
    if entry.quartiles:
        found[" low"], found[" high"] = entry.quartiles
    if there := entry.published:
        found |= {" published": there.value, " difference": there.difference, " z": there.z}
    if test := entry.test:
        found |= {" effect": test.effect, " p": test.p, " p corrected": test.corrected}
    return found


def to_html(table: Table) -> str:
    """Return one ``<table class="capmoe">`` element for any page.

    The best entries of a block are ``<strong>``, ▼ and ▲ mark what differs from the baseline, and
    what the paper prints stands below in ``<small>``. The tooltip (``title``) of an entry tells its
    standard error, seeds, documents and test, that of a missing one the command that fills it.
    """
    headings = [*table.label_headings, *table.columns]
    return render("table.html", table=table, headings=headings, blocks=body_view(table))


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
        return {"words": cell.text}
    if isinstance(cell, Missing):
        return {"command": cell.command}
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
        **(_beside_view(cell.published, decimals) if cell.published else {"published": None}),
    }


def _beside_view(published: Published, decimals: int) -> View:
    """Return a printed number and our difference to it with its z, apart and together."""
    printed, difference = f"{published.value:.{decimals}f}", _signed(published.difference, decimals)
    z = [] if published.z is None else [_signed(published.z, 1)]
    return {
        "printed": printed,
        "difference": ", ".join([difference, *z]),
        "published": f"{printed} ({', z '.join([difference, *z])})",
    }


RENDERERS: Final = MappingProxyType[str, Callable[[Table], str]](
    {"md": to_markdown, "tex": to_latex, "csv": to_csv, "html": to_html}
)
"""Renderer of each file suffix."""


def write(table: Table, directory: Path) -> list[Path]:
    """Write a table in every format, each file whole or not at all; return their paths.

    Raises:
        OSError: If a file cannot be written.
    """
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


def _beside(table: Table, row: View, below: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield the lines of published numbers below a row, each with its label, or none."""
    if any(cell.get("published") for cell in row["entries"]):
        for label, part in below.items():
            labels = [*[""] * (len(table.label_headings) - 1), label][: len(table.label_headings)]
            yield [*labels, *(cell.get(part) or "" for cell in row["entries"])]


def _signed(number: float, decimals: int) -> str:
    text = f"{abs(number):.{decimals}f}"
    if not float(text):
        return text
    return f"{'−' if number < 0 else '+'}{text}"
