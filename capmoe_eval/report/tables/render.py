"""A table as Markdown, LaTeX, CSV and HTML: the same table, the same bytes."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Final

from capmoe_eval.experiment.files import write_text
from capmoe_eval.experiment.names import NO_GAMMA, NO_LIMIT
from capmoe_eval.report.tables.table import Block, Cell, Entry, Missing, Published, Row, Table, Text
from capmoe_eval.report.templates import render

_ABSENT = "—"
_BESIDE = "published"
_MARKS: Final = MappingProxyType({"better": "▲", "worse": "▼", None: ""})


def to_markdown(table: Table) -> str:
    """Return a GitHub-flavoured Markdown section.

    The best entries of a block are bold, ▼ and ▲ mark what differs from the baseline, and standard
    errors follow as "± 2.2", quartiles as "(1.1–1.3)". What the paper prints for a row is a row
    below it. Below the table stand the commands that fill the missing entries, and the notes.
    """

    def text(entry: Cell, best: bool) -> str:
        if isinstance(entry, Missing):
            return _ABSENT
        if isinstance(entry, Text):
            return _markdown_text(entry.text)
        value = f"{entry.value:.{table.decimals}f}"
        value = (f"**{value}**" if best else value) + _mark(entry)
        if entry.quartiles is not None:
            return f"{value} {quartiles(entry.quartiles, table.decimals)}"
        return value if entry.stderr is None else f"{value} ± {entry.stderr:.{table.decimals}f}"

    headings = [_markdown_text(h) for h in (*table.label_headings, *table.columns)]
    rules = [":--"] * len(table.label_headings)
    rules += [":--" if words else "--:" for words in _columns_of_words(table)]
    lines = [_pipe_row(headings), _pipe_row(rules)]
    for block in table.blocks:
        for labels, row in zip(_printed_labels(block), _marked(table, block), strict=True):
            cells = [*map(_markdown_text, labels), *(text(*entry) for entry in row)]
            lines.append(_pipe_row(cells))
            beside = _published(table, row, _compared)
            if any(beside):
                lines.append(_pipe_row([*_beside_labels(table, f"_{_BESIDE}_"), *beside]))
    parts = [
        f"### {_markdown_text(table.title)}",
        _markdown_text(table.caption),
        "\n".join(lines),
    ]
    if table.missing_commands:
        parts += ["Missing cells:", "\n".join(["```shell", *table.missing_commands, "```"])]
    if table.notes:
        parts.append("\n".join(f"- {_markdown_text(note)}" for note in table.notes))
    return "\n\n".join(parts) + "\n"


def to_latex(table: Table) -> str:
    r"""Return a LaTeX ``table`` that needs the booktabs package and nothing else.

    The best entries of a block are bold, daggers mark what differs from the baseline, blocks are
    set apart by ``\midrule``, standard errors and published numbers (below) are small. The
    commands that fill the missing entries are comments.
    """

    def text(entry: Cell, best: bool) -> str:
        if isinstance(entry, Missing):
            return "---"
        if isinstance(entry, Text):
            return _latex_text(entry.text)
        value = f"{entry.value:.{table.decimals}f}"
        value = (rf"\textbf{{{value}}}" if best else value) + _latex_text(_mark(entry))
        if entry.quartiles is not None:
            told = _latex_text(quartiles(entry.quartiles, table.decimals))
            return rf"{value}{{\scriptsize\,{told}}}"
        if entry.stderr is None:
            return value
        return rf"{value}{{\scriptsize\,$\pm$\,{entry.stderr:.{table.decimals}f}}}"

    def line(cells: list[str]) -> str:
        return " & ".join(cells) + r" \\"

    def small(texts: list[str]) -> str:
        return line([rf"{{\scriptsize {_latex_text(text)}}}" if text else "" for text in texts])

    alignment = "l" * len(table.label_headings)
    alignment += "".join("l" if words else "r" for words in _columns_of_words(table))
    lines = [
        r"\begin{table}[t]",
        r"\centering",
        rf"\caption{{\textbf{{{_latex_text(table.title)}.}} {_latex_text(table.caption)}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        line([_latex_text(h) for h in (*table.label_headings, *table.columns)]),
    ]
    for block in table.blocks:
        lines.append(r"\midrule")
        for labels, row in zip(_printed_labels(block), _marked(table, block), strict=True):
            lines.append(line([*map(_latex_text, labels), *(text(*entry) for entry in row)]))
            # Two short lines, for a page is narrow.
            printed = _published(table, row, _value)
            if any(printed):
                compared = _published(table, row, _difference)
                lines.append(small([*_beside_labels(table, _BESIDE), *printed]))
                lines.append(small([*_beside_labels(table, "difference, z"), *compared]))
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\smallskip{{\footnotesize {_latex_text(note)}}}" for note in table.notes]
    lines += [f"% missing: {_one_line(command)}" for command in table.missing_commands]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def to_csv(table: Table) -> str:
    """Return one line per row, with full labels and full precision.

    Each column of numbers is followed by its "… stderr", in the same display units; where the
    table has them, by its quartiles "… low" and "… high", by its "… published", "… difference" and
    "… z", and by its "… effect", "… p" and "… p corrected" of the paired test. Unknown and missing
    numbers are empty, and "+∞" is ``inf``, so that pandas reads numbers as numbers.
    """
    entries = [entry for row in table.rows for entry in row.entries if isinstance(entry, Entry)]
    beside = any(entry.published for entry in entries)
    tested = any(entry.test for entry in entries)
    spread = any(entry.quartiles for entry in entries)
    suffixes = ["", " stderr"]
    suffixes += [" low", " high"] if spread else []
    suffixes += [" published", " difference", " z"] if beside else []
    suffixes += [" effect", " p", " p corrected"] if tested else []

    def numbers(entry: Cell) -> list[float | None]:
        if not isinstance(entry, Entry):
            return [None] * len(suffixes)
        found = [entry.value, entry.stderr]
        if spread:
            found += entry.quartiles or [None] * 2
        if beside:
            there = entry.published
            found += [there.value, there.difference, there.z] if there else [None] * 3
        if tested:
            test = entry.test
            found += [test.effect, test.p, test.corrected] if test else [None] * 3
        return [None if number is None else float(number) for number in found]

    words = _columns_of_words(table)
    headings = [
        heading + suffix
        for heading, is_text in zip(table.columns, words, strict=True)
        for suffix in ([""] if is_text else suffixes)
    ]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*table.label_headings, *headings])
    for row in table.rows:
        cells: list[str | float | None] = []
        cells += [{NO_LIMIT: "inf", NO_GAMMA: ""}.get(label, label) for label in row.labels]
        for entry, is_text in zip(row.entries, words, strict=True):
            if is_text:
                cells.append(entry.text if isinstance(entry, Text) else None)
            else:
                cells += numbers(entry)
        writer.writerow(cells)
    return buffer.getvalue()


def to_html(table: Table) -> str:
    """Return one ``<table class="capmoe">`` element for any page.

    The best entries of a block are ``<strong>``, ▼ and ▲ mark what differs from the baseline, and
    what the paper prints stands below in ``<small>``. The tooltip (``title``) of an entry tells its
    standard error, seeds, documents and test, that of a missing one the command that fills it.
    """

    def shown(entry: Cell, best: bool) -> dict[str, object]:
        if isinstance(entry, Text):
            return {"words": entry.text}
        if isinstance(entry, Missing):
            return {"command": entry.command}
        return {
            "value": f"{entry.value:.{table.decimals}f}",
            "best": best,
            "verdict": entry.test and entry.test.verdict,
            "quartiles": entry.quartiles and quartiles(entry.quartiles, table.decimals),
            "published": entry.published and _compared(entry.published, table.decimals),
            "origin": _origin(entry, table.decimals),
        }

    blocks = [
        [
            {"labels": row.labels, "entries": [shown(*entry) for entry in entries]}
            for row, entries in zip(block.rows, _marked(table, block), strict=True)
        ]
        for block in table.blocks
    ]
    view = {
        "title": table.title,
        "caption": table.caption,
        "headings": [*table.label_headings, *table.columns],
        "blocks": blocks,
        "notes": table.notes,
    }
    return render("table", table=view)


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


def _columns_of_words(table: Table) -> list[bool]:
    return [any(isinstance(cell, Text) for cell in column) for column in _cells_by_column(table)]


def _cells_by_column(table: Table) -> list[list[Cell]]:
    return [[row.entries[index] for row in table.rows] for index in range(len(table.columns))]


def _mark(entry: Entry) -> str:
    return _MARKS[entry.test.verdict if entry.test else None]


def _published(
    table: Table, row: list[tuple[Cell, bool]], text: Callable[[Published, int], str]
) -> list[str]:
    """Return what stands below each entry of a row: of the published number, or nothing."""
    return [
        text(entry.published, table.decimals)
        if isinstance(entry, Entry) and entry.published
        else ""
        for entry, _ in row
    ]


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


def _beside_labels(table: Table, label: str) -> list[str]:
    """Return the labels of a line of published numbers: in the last column of labels."""
    labels = len(table.label_headings)
    return [*[""] * (labels - 1), label][:labels]


def _marked(table: Table, block: Block) -> Iterator[list[tuple[Cell, bool]]]:
    """Yield each row's entries, each with whether it is the best of its block."""
    best = [block.best(column, table.decimals) for column in range(len(table.columns))]
    for index, row in enumerate(block.rows):
        yield [(entry, index in best[column]) for column, entry in enumerate(row.entries)]


def _printed_labels(block: Block) -> Iterator[tuple[str, ...]]:
    """Yield each row's labels as print has them: blank where they repeat the row above."""
    above: Row | None = None
    for row in block.rows:
        if above is None:
            yield row.labels
        else:
            pairs = zip(row.labels, above.labels, strict=True)
            yield tuple("" if label == previous else label for label, previous in pairs)
        above = row


def _origin(entry: Entry, decimals: int) -> str:
    parts = []
    if entry.stderr is not None:
        parts.append(f"± {entry.stderr:.{decimals}f} standard error")
    if entry.seeds:
        parts.append(f"seeds {', '.join(map(str, entry.seeds))}")
    if entry.documents is not None:
        parts.append(f"{entry.documents:,} documents")
    if entry.test is not None and entry.test.corrected is not None:
        parts.append(
            f"{_signed(entry.test.effect, decimals)} to the baseline, p = {entry.test.p:.2g}, "
            f"corrected {entry.test.corrected:.2g}"
        )
    if entry.untested:
        parts.append(f"no paired test: {entry.untested}")
    return "; ".join(parts)


def quartiles(bounds: tuple[float, float], decimals: int) -> str:
    """Return quartiles in brackets."""
    return f"({bounds[0]:.{decimals}f}–{bounds[1]:.{decimals}f})"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _pipe_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_text(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|&~])", r"\\\1", _one_line(text))


_LATEX: Final = MappingProxyType(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        # Bare, these two would be read as arguments of the line break before them.
        "[": "{[}",
        "*": "{*}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "γ": r"$\gamma$",
        NO_LIMIT: r"$+\infty$",
        "∞": r"$\infty$",
        "×": r"$\times$",
        "±": r"$\pm$",
        "−": r"$-$",
        "▼": r"$^{\dagger}$",
        "▲": r"$^{\ddagger}$",
        "–": "--",
        "—": "---",
    }
)
_LATEX_SPECIAL: Final = re.compile(
    "|".join(re.escape(s) for s in sorted(_LATEX, key=len, reverse=True))
)


def _latex_text(text: str) -> str:
    return _LATEX_SPECIAL.sub(lambda match: _LATEX[match.group()], _one_line(text))
