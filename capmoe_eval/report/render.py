"""A table as Markdown, LaTeX, CSV and HTML: the same table, the same bytes."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Final

from capmoe_eval.atomic import write_text
from capmoe_eval.report.table import Block, Entry, Missing, Row, Table

_ABSENT = "—"


def to_markdown(table: Table) -> str:
    """Return a GitHub-flavoured Markdown section.

    The best entries of a block are bold and standard errors follow their value as "± 2.2". Below
    stand the commands that fill the missing entries, and the notes.
    """

    def text(entry: Entry | Missing, best: bool) -> str:
        if isinstance(entry, Missing):
            return _ABSENT
        value = f"{entry.value:.{table.decimals}f}"
        value = f"**{value}**" if best else value
        return value if entry.stderr is None else f"{value} ± {entry.stderr:.{table.decimals}f}"

    headings = [_markdown_text(h) for h in (*table.label_headings, *table.columns)]
    rules = [":--"] * len(table.label_headings) + ["--:"] * len(table.columns)
    lines = [_pipe_row(headings), _pipe_row(rules)]
    for block in table.blocks:
        for labels, row in zip(_printed_labels(block), _marked(table, block), strict=True):
            cells = [*map(_markdown_text, labels), *(text(*entry) for entry in row)]
            lines.append(_pipe_row(cells))
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

    The best entries of a block are bold, blocks are set apart by ``\midrule``, standard errors are
    small. The commands that fill the missing entries are comments.
    """

    def text(entry: Entry | Missing, best: bool) -> str:
        if isinstance(entry, Missing):
            return "---"
        value = f"{entry.value:.{table.decimals}f}"
        value = rf"\textbf{{{value}}}" if best else value
        if entry.stderr is None:
            return value
        return rf"{value}{{\scriptsize\,$\pm$\,{entry.stderr:.{table.decimals}f}}}"

    def line(cells: list[str]) -> str:
        return " & ".join(cells) + r" \\"

    lines = [
        r"\begin{table}[t]",
        r"\centering",
        rf"\caption{{\textbf{{{_latex_text(table.title)}.}} {_latex_text(table.caption)}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{'l' * len(table.label_headings)}{'r' * len(table.columns)}}}",
        r"\toprule",
        line([_latex_text(h) for h in (*table.label_headings, *table.columns)]),
    ]
    for block in table.blocks:
        lines.append(r"\midrule")
        for labels, row in zip(_printed_labels(block), _marked(table, block), strict=True):
            lines.append(line([*map(_latex_text, labels), *(text(*entry) for entry in row)]))
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\smallskip{{\footnotesize {_latex_text(note)}}}" for note in table.notes]
    lines += [f"% missing: {_one_line(command)}" for command in table.missing_commands]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def to_csv(table: Table) -> str:
    """Return one line per row, with full labels and full precision.

    Each column is followed by its "… stderr", in the same display units. Unknown and missing
    numbers are empty, and "+∞" is ``inf``, so that pandas reads numbers as numbers.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    pairs = ((column, f"{column} stderr") for column in table.columns)
    writer.writerow([*table.label_headings, *(heading for pair in pairs for heading in pair)])
    for row in table.rows:
        numbers: list[float | None] = []
        for entry in row.entries:
            numbers += [None, None] if isinstance(entry, Missing) else [entry.value, entry.stderr]
        labels = [{"+∞": "inf", "–": ""}.get(label, label) for label in row.labels]
        writer.writerow(
            [*labels, *(None if number is None else float(number) for number in numbers)]
        )
    return buffer.getvalue()


def to_html(table: Table) -> str:
    """Return one ``<table class="capmoe">`` element for any page.

    The best entries of a block are ``<strong>``. The tooltip (``title``) of an entry tells its
    standard error, seeds and documents, that of a missing one the command that fills it.
    """

    def cell(entry: Entry | Missing, best: bool) -> str:
        if isinstance(entry, Missing):
            return f'<td class="missing" title="{html.escape(entry.command)}">{_ABSENT}</td>'
        value = f"{entry.value:.{table.decimals}f}"
        value = f"<strong>{value}</strong>" if best else value
        origin = _origin(entry, table.decimals)
        return f'<td title="{html.escape(origin)}">{value}</td>' if origin else f"<td>{value}</td>"

    def headings(texts: tuple[str, ...], scope: str) -> str:
        return "".join(f'<th scope="{scope}">{html.escape(text)}</th>' for text in texts)

    lines = [
        '<table class="capmoe">',
        f"<caption><strong>{html.escape(table.title)}.</strong> "
        f"{html.escape(table.caption)}</caption>",
        f"<thead><tr>{headings((*table.label_headings, *table.columns), 'col')}</tr></thead>",
    ]
    for block in table.blocks:
        lines.append("<tbody>")
        for row, entries in zip(block.rows, _marked(table, block), strict=True):
            # Every row repeats its labels: an empty heading would name nothing to a screen reader.
            cells = "".join(cell(*entry) for entry in entries)
            lines.append(f"<tr>{headings(row.labels, 'row')}{cells}</tr>")
        lines.append("</tbody>")
    if table.notes:
        width = len(table.label_headings) + len(table.columns)
        notes = [f'<tr><td colspan="{width}">{html.escape(note)}</td></tr>' for note in table.notes]
        lines += ["<tfoot>", *notes, "</tfoot>"]
    return "\n".join([*lines, "</table>"]) + "\n"


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


def _marked(table: Table, block: Block) -> Iterator[list[tuple[Entry | Missing, bool]]]:
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
    return "; ".join(parts)


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
        "+∞": r"$+\infty$",
        "∞": r"$\infty$",
        "×": r"$\times$",
        "±": r"$\pm$",
        "–": "--",
        "—": "---",
    }
)
_LATEX_SPECIAL: Final = re.compile(
    "|".join(re.escape(s) for s in sorted(_LATEX, key=len, reverse=True))
)


def _latex_text(text: str) -> str:
    return _LATEX_SPECIAL.sub(lambda match: _LATEX[match.group()], _one_line(text))
