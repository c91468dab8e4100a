"""A table as text: Markdown, LaTeX, HTML and CSV."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlencode

from capmoe_eval.experiment.files import write_text
from capmoe_eval.experiment.names import gamma_column
from capmoe_eval.report.tables.table import commands
from capmoe_eval.report.texts import ABSENT, latex, markdown, one_line

if TYPE_CHECKING:
    import pandas as pd


class _Markup(NamedTuple):
    bold: str
    small: str
    published: str
    escape: Callable[[str], str]


_MARKDOWN: Final = _Markup("**{}**", "{}", "_published_", markdown)
_LATEX: Final = _Markup(r"\textbf{{{}}}", r"{{\scriptsize {}}}", r"{\scriptsize published}", latex)
_HTML: Final = _Markup("<strong>{}</strong>", "<small>{}</small>", "", escape)


def to_markdown(table: pd.DataFrame) -> str:
    """Return a GitHub-flavoured Markdown section.

    The best numbers of a block are bold, ▼ and ▲ mark what differs from the baseline, § marks
    truncated prompts, and standard errors follow as "± 2.2", intervals as "(1.1–1.3)". What
    the paper prints for a row is a row below it. Below the table stand the commands that compute
    the missing cells, and the notes.
    """
    about, wide = table.attrs, _wide(table, _MARKDOWN)
    ends = [":--" if end == "l" else "--:" for end in _ends(table)]
    lines = [f"### {markdown(about['title'])}", "", markdown(about["caption"]), ""]
    rows: list[list[str]] = [[*map(str, wide)], ends, *wide.values.tolist()]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    if missing := commands(table):
        text = "Missing cells: run these commands, then render the table again."
        lines += ["", text, "", "```shell", *missing, "```"]
    lines += ["", *(f"- {markdown(note)}" for note in about["notes"])]
    return "\n".join(lines).rstrip() + "\n"


def to_latex(table: pd.DataFrame) -> str:
    """Return a LaTeX ``table`` that needs the booktabs package and nothing else.

    It shows what :func:`to_markdown` does; commands that compute missing cells are comments.
    """
    about, wide = table.attrs, _wide(table, _LATEX)
    begins = ~wide.index.duplicated() & (wide.index != wide.index[0])
    wide.iloc[begins, 0] = "\\midrule\n" + wide.iloc[begins, 0]
    below = [rf"\par\smallskip{{\footnotesize {latex(note)}}}" for note in about["notes"]]
    below += [f"% missing: {one_line(command)}" for command in commands(table)]
    text: str = wide.to_latex(
        index=False,
        position="t",
        label=f"tab:{about['name']}",
        caption=rf"\textbf{{{latex(about['title'])}.}} {latex(about['caption'])}",
        column_format="".join(_ends(table)),
    )
    return text.replace(r"\end{table}", "\n".join([*below, r"\end{table}"]))


def to_html(table: pd.DataFrame, records: str = "") -> str:
    """Return one ``<table class="capmoe">`` element for any page.

    The tooltip (``title``) of a number tells its seeds, documents and test, that of a missing one
    the command that computes it.

    Args:
        table: With the columns of ``as_table``.
        records: The address of a page of records. With it the first label of a row leads to the
            records of its model, method and γ, which are in the fragment.
    """
    about, lines = table.attrs, ['<table class="capmoe">']
    headings = [*about["labels"], *table["column"].unique()]
    heads = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    title, caption = escape(about["title"]), escape(about["caption"])
    lines.append(f"<caption><strong>{title}.</strong> {caption}</caption>")
    lines.append(f"<thead><tr>{heads}</tr></thead>")
    for _, block in table.groupby("block"):
        lines.append("<tbody>")
        for _, row in block.groupby("line"):
            # Every row repeats its labels: an empty heading would name nothing to a screen reader.
            labels = [escape(label) for label in row.iloc[0][about["labels"]]]
            if records and row["model"].notna().all() and row["value"].notna().any():
                labels[0] = f'<a href="{escape(records + _fragment(row.iloc[0]))}">{labels[0]}</a>'
            cells = [f'<th scope="row">{label}</th>' for label in labels]
            cells += [_html_cell(cell, about["decimals"]) for cell in row.itertuples()]
            lines.append(f"<tr>{''.join(cells)}</tr>")
        lines.append("</tbody>")
    notes = [f'<tr><td colspan="{len(headings)}">{escape(n)}</td></tr>' for n in about["notes"]]
    lines += ["<tfoot>", *notes, "</tfoot>"] if notes else []
    return "\n".join([*lines, "</table>\n"])


def to_csv(table: pd.DataFrame) -> str:
    """Return a line for each cell, in full precision, with the columns of ``as_table``."""
    text: str = table.assign(records=table["records"].map("; ".join)).to_csv(index=False)
    return text


RENDERERS: Final = {"md": to_markdown, "tex": to_latex, "csv": to_csv, "html": to_html}
"""Renderer of each file suffix."""


def write(table: pd.DataFrame, directory: Path) -> list[Path]:
    """Write a table in every format, each file whole or not at all; return their paths."""
    # All are rendered before the first is written: a failure leaves no mixture of old and new.
    name = table.attrs["name"]
    texts = {directory / f"{name}.{suffix}": r(table) for suffix, r in RENDERERS.items()}
    for path, text in texts.items():
        write_text(path, text)
    return list(texts)


def _wide(table: pd.DataFrame, markup: _Markup) -> pd.DataFrame:
    """Return the rows as texts, by block; labels that repeat those above are empty."""
    import pandas as pd

    labels, decimals = table.attrs["labels"], table.attrs["decimals"]
    rows: list[list[str]] = []
    blocks: list[Any] = []
    for number, block in table.groupby("block"):
        above = [""] * len(labels)
        for _, row in block.groupby("line"):
            names = row.iloc[0][labels].tolist()
            both = zip(names, above, strict=True)
            texts = ["" if name == previous else markup.escape(name) for name, previous in both]
            above, cells = names, [*row.itertuples()]
            rows.append([*texts, *(_text(cell, markup, decimals) for cell in cells)])
            if row["published"].notna().any():
                small = [_published(cell, decimals) for cell in cells]
                small = [text and markup.small.format(markup.escape(text)) for text in small]
                rows.append([*([""] * len(labels))[1:], markup.published, *small])
            blocks += [number] * (len(rows) - len(blocks))
    columns = [markup.escape(name) for name in (*labels, *table["column"].unique())]
    return pd.DataFrame(rows, blocks, columns)


def _ends(table: pd.DataFrame) -> list[str]:
    """Return the alignment of each column: labels and words left, numbers right."""
    is_text = (table["status"] == "text").groupby(table["column"], sort=False).any()
    return ["l"] * len(table.attrs["labels"]) + ["l" if words else "r" for words in is_text]


def _text(cell: Any, markup: _Markup, decimals: int) -> str:
    """Return a cell's number with its marks and its standard error or interval, or its words."""
    if cell.status != "measured":
        return markup.escape(cell.text or ABSENT)
    number = f"{cell.value:.{decimals}f}"
    text = markup.bold.format(number) if cell.best else number
    text += markup.escape(cell.mark + "§" * (cell.truncated > 0))
    reach = "" if math.isnan(cell.stderr) else f"± {cell.stderr:.{decimals}f}"
    if not math.isnan(cell.low):
        reach = f"({cell.low:.{decimals}f}–{cell.high:.{decimals}f})"
    return f"{text} {markup.small.format(markup.escape(reach))}" if reach else text


def _published(cell: Any, decimals: int) -> str:
    """Return the printed number, with our difference to it and its z; empty where it has none."""
    if math.isnan(cell.published):
        return ""
    z = "" if math.isnan(cell.z) else f", z {_signed(cell.z, 1)}"
    return f"{cell.published:.{decimals}f} ({_signed(cell.difference, decimals)}{z})"


def _signed(number: float, decimals: int) -> str:
    text = f"{abs(number):.{decimals}f}"
    return f"{'−' if number < 0 else '+'}{text}" if float(text) else text


def _fragment(cell: Any) -> str:
    """Return what a row is of, as a page of records chooses by it."""
    gamma = gamma_column(cell.method, None if math.isnan(cell.gamma) else cell.gamma)
    return "#" + urlencode({"model": cell.model, "method": cell.method, "gamma": gamma})


def _html_cell(cell: Any, decimals: int) -> str:
    text = _text(cell, _HTML, decimals)
    if published := _published(cell, decimals):
        text += f'<br><small class="published">{published}</small>'
    tip = cell.command or "; ".join(_origin(cell, decimals))
    look = ' class="missing"' * (cell.status == "missing")
    return f'<td{look} title="{escape(tip)}">{text}</td>' if tip else f"<td>{text}</td>"


def _origin(cell: Any, decimals: int) -> Iterator[str]:
    """Yield what a number is of."""
    if cell.seeds:
        yield f"seeds {cell.seeds}"
    if not math.isnan(cell.n):
        yield f"{cell.n:,.0f} documents"
    if not math.isnan(cell.p):
        effect = f"{_signed(cell.effect, decimals)} to the baseline"
        yield f"{effect}, p = {cell.p:.2g}, corrected {cell.corrected:.2g}"
    if cell.truncated > 0:
        yield f"prompts of {cell.truncated:,.0f} documents truncated"
    if cell.untested:
        yield f"no paired test: {cell.untested}"
