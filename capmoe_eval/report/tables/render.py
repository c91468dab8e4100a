"""A table as Markdown, LaTeX, CSV and HTML: the same table, the same bytes."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

from capmoe_eval.experiment.files import write_text
from capmoe_eval.experiment.names import NO_GAMMA, NO_LIMIT
from capmoe_eval.report.tables.table import Block, Cell, Entry, Missing, Published, Table, Text
from capmoe_eval.report.templates import render
from capmoe_eval.report.templates.texts import latex, markdown, one_line

if TYPE_CHECKING:
    from capmoe_eval.experiment.record import Record

_BESIDE = "published"
_MARKS: Final = MappingProxyType({"better": "▲", "worse": "▼", None: ""})

Line: TypeAlias = list[tuple[Cell, bool]]
"""The cells of a row, each with whether it is the best of its column in its block."""


@dataclass(frozen=True)
class _Format:
    """A format of print: its escape, a missing cell, and what is put around parts of an entry."""

    escape: Callable[[str], str]
    missing: str
    best: str
    quartiles: str
    stderr: str

    def cell(self, cell: Cell, best: bool, decimals: int) -> str:
        """Return a cell as text."""
        if isinstance(cell, Missing):
            return self.missing
        if isinstance(cell, Text):
            return self.escape(cell.text)
        value = f"{cell.value:.{decimals}f}"
        value = self.best.format(value) if best else value
        value += self.escape(_MARKS[cell.test.verdict if cell.test else None])
        if cell.quartiles is not None:
            return value + self.quartiles.format(self.escape(_quartiles(cell.quartiles, decimals)))
        if cell.stderr is None:
            return value
        return value + self.stderr.format(f"{cell.stderr:.{decimals}f}")

    def rows(self, table: Table, block: Block) -> Iterator[tuple[list[str], Line]]:
        """Yield the texts of each row of a block, and its cells; repeated labels are blank."""
        above: tuple[str, ...] = ("",) * len(table.label_headings)
        for row, line in zip(block.rows, _marked(table, block), strict=True):
            pairs = zip(row.labels, above, strict=True)
            labels = ["" if label == previous else self.escape(label) for label, previous in pairs]
            yield [*labels, *(self.cell(*cell, table.decimals) for cell in line)], line
            above = row.labels


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
    for block in table.blocks:
        for texts, line in _MARKDOWN.rows(table, block):
            rows += [texts, *_beside(table, line, {f"_{_BESIDE}_": _compared})]
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
    below = {_BESIDE: _value, "difference, z": _difference}
    for block in table.blocks:
        rows.append(r"\midrule")
        for texts, line in _LATEX.rows(table, block):
            rows.append(" & ".join(texts) + r" \\")
            for small in _beside(table, line, below):
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
    return render("table", table=table, headings=headings, blocks=body_view(table))


def body_view(
    table: Table, href: Callable[[Record], str] | None = None
) -> list[list[dict[str, object]]]:
    """Return what the templates of tables show: the rows of each block, their cells in words.

    Args:
        table: The table.
        href: The address of a record's page; None where there are no such pages.
    """

    def view(cell: Cell, best: bool) -> dict[str, object]:
        found = _cell_view(cell, best, table.decimals)
        if href and isinstance(cell, Entry) and cell.records:
            found["href"] = href(cell.records[0])
        return found

    return [
        [
            {"of": row, "entries": [view(*cell) for cell in line]}
            for row, line in zip(block.rows, _marked(table, block), strict=True)
        ]
        for block in table.blocks
    ]


def _cell_view(cell: Cell, best: bool, decimals: int) -> dict[str, object]:
    if isinstance(cell, Text):
        return {"words": cell.text}
    if isinstance(cell, Missing):
        return {"command": cell.command}
    return {
        "value": f"{cell.value:.{decimals}f}",
        "number": float(cell.value),
        "best": best,
        "verdict": cell.test and cell.test.verdict,
        "quartiles": cell.quartiles and _quartiles(cell.quartiles, decimals),
        "stderr": None if cell.stderr is None else f"{cell.stderr:.{decimals}f}",
        "published": cell.published and _compared(cell.published, decimals),
        "origin": _origin(cell, decimals),
    }


RENDERERS: Final = MappingProxyType[str, Callable[[Table], str]](
    {"md": to_markdown, "tex": to_latex, "csv": to_csv, "html": to_html}
)
"""Renderer of each file suffix."""


def write(table: Table, directory: Path) -> list[Path]:
    """Write a table in every format, each file whole or not at all.

    Args:
        table: The table.
        directory: Where the files ``{table.name}.{suffix}`` go; created if missing.

    Returns:
        The paths written.

    Raises:
        OSError: If a file cannot be written.
    """
    # All are rendered before the first is written: a failure leaves no mixture of old and new.
    texts = {directory / f"{table.name}.{suffix}": r(table) for suffix, r in RENDERERS.items()}
    for path, text in texts.items():
        write_text(path, text)
    return list(texts)


def _marked(table: Table, block: Block) -> Iterator[Line]:
    """Yield the cells of each row of a block, each with whether it is the best of its column."""
    best = [block.best(column, table.decimals) for column in range(len(table.columns))]
    for index, row in enumerate(block.rows):
        yield [(cell, index in rows) for cell, rows in zip(row.entries, best, strict=True)]


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


def _quartiles(bounds: tuple[float, float], decimals: int) -> str:
    """Return quartiles in brackets."""
    return f"({bounds[0]:.{decimals}f}–{bounds[1]:.{decimals}f})"


def _beside(
    table: Table, line: Line, below: Mapping[str, Callable[[Published, int], str]]
) -> Iterator[list[str]]:
    """Yield the lines of published numbers below a row, each with its label, or none."""
    there = [cell.published if isinstance(cell, Entry) else None for cell, _ in line]
    if any(there):
        for label, text in below.items():
            labels = [*[""] * (len(table.label_headings) - 1), label][: len(table.label_headings)]
            yield [*labels, *(text(one, table.decimals) if one else "" for one in there)]


def _value(published: Published, decimals: int) -> str:
    return f"{published.value:.{decimals}f}"


def _difference(published: Published, decimals: int) -> str:
    difference = _signed(published.difference, decimals)
    return difference if published.z is None else f"{difference}, {_signed(published.z, 1)}"


def _compared(published: Published, decimals: int) -> str:
    """Return a published number with our difference to it, and its z."""
    difference = _difference(published, decimals).replace(", ", ", z ")
    return f"{_value(published, decimals)} ({difference})"


def _signed(number: float, decimals: int) -> str:
    text = f"{abs(number):.{decimals}f}"
    if not float(text):
        return text
    return f"{'−' if number < 0 else '+'}{text}"
