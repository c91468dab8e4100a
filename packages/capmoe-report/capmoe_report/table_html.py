"""A table of results as one element of HTML, whose numbers tell what they are of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from capmoe_eval.experiment.names import gamma_column
from capmoe_eval.report.tables.formats import Markup, cell_text, published_text, signed

if TYPE_CHECKING:
    import pandas as pd

_HTML: Final = Markup("<strong>{}</strong>", "<small>{}</small>", "", escape)


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


def _fragment(cell: Any) -> str:
    """Return what a row is of, as a page of records chooses by it."""
    gamma = gamma_column(cell.method, None if math.isnan(cell.gamma) else cell.gamma)
    return "#" + urlencode({"model": cell.model, "method": cell.method, "gamma": gamma})


def _html_cell(cell: Any, decimals: int) -> str:
    text = cell_text(cell, _HTML, decimals)
    if published := published_text(cell, decimals):
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
        effect = f"{signed(cell.effect, decimals)} to the baseline"
        yield f"{effect}, p = {cell.p:.2g}, corrected {cell.corrected:.2g}"
    if cell.truncated > 0:
        yield f"prompts of {cell.truncated:,.0f} documents truncated"
    if cell.untested:
        yield f"no paired test: {cell.untested}"
