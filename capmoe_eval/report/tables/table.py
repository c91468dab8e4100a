"""A table as one data frame with a row for each of its cells; as Markdown, LaTeX and CSV."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from capmoe_eval.experiment.files import write_text
from capmoe_eval.lazy import pd
from capmoe_eval.paper.layout import PaperTable
from capmoe_eval.paper.statistics import holm
from capmoe_eval.report.texts import ABSENT, latex, markdown, one_line

SETTINGS: Final = "Settings"
ALPHA: Final = 0.05
"""A paired test is significant where its p, corrected for the table's tests, is below this."""
_NUMBERS: Final = (
    *("value", "stderr", "n", "low", "high", "published", "sampling", "difference", "z"),
    *("effect", "p", "corrected", "truncated", "tokens"),
)
_TEXTS: Final = ("seeds", "untested", "text")


def as_table(
    layout: PaperTable,
    labels: Sequence[str],
    cells: Iterable[Mapping[str, Any]],
    notes: Iterable[str] = (),
    decimals: int = 1,
    commands: Iterable[str] = (),
    **named: str,
) -> pd.DataFrame:
    """Return a table with a row for each cell.

    Its columns are:

    - ``line`` and ``block``: the number of its row, and of the rows that are compared with it
    - ``labels``, each under its own heading, such as ``Method`` and ``γ``
    - ``model``, ``method`` and ``gamma``: what the row is of; γ is infinite for the baseline
    - ``column``: the heading of its column
    - ``status``: ``measured``, ``missing``, ``text``, or ``empty`` where nothing was planned
    - ``value`` and ``stderr``: in the table's units; ``n``: documents; ``seeds`` that are averaged
    - ``low`` and ``high``: an interval, or quartiles of timings
    - ``published``: the printed number; its ``sampling`` error, had it been measured on our
      documents; the ``difference``, ours minus it, and its ``z``
    - ``effect``: the mean difference to the same model's baseline over the same documents; its
      ``p``, and that ``corrected`` for all tests of the table (Holm 1979); why it is ``untested``
    - ``mark``: ▲ significantly better than the baseline, ▼ worse; ``best`` of its block
    - ``truncated``: documents whose prompts were, and the most ``tokens`` that one lost
    - ``text`` of a cell of words
    - ``records``: the paths of the files that it was taken from

    Args:
        layout: Of the title, the caption and the direction in which numbers are better.
        labels: The headings of the columns that name a row.
        cells: Row by row, with some of the columns above.
        notes: Sentences below the table.
        decimals: Of the numbers, as they are shown.
        commands: The shell commands that measure what is missing.
        named: The texts for the places in the title.

    Its ``attrs`` are ``name`` (the stem of its files), ``title``, ``caption``, ``labels``,
    ``notes``, ``commands``, ``decimals`` and ``fine``, those of columns that have other decimals.
    """
    columns = ["line", "block", *labels, "model", "method", "gamma", "column"]
    frame = pd.DataFrame(list(cells), columns=[*columns, *_NUMBERS, *_TEXTS, "records"])
    frame = frame.astype(dict.fromkeys(("gamma", *_NUMBERS), float))
    for name in _TEXTS:
        frame[name] = frame[name].astype(object).where(frame[name].notna(), "")
    frame["records"] = [paths if isinstance(paths, tuple) else () for paths in frame["records"]]
    measured, is_text = frame["value"].notna(), frame["text"] != ""
    status = is_text.map({True: "text", False: "missing"}).mask(measured, "measured")
    frame.insert(len(columns), "status", status)
    frame["difference"] = frame["value"] - frame["published"]
    error = (frame["stderr"] ** 2 + frame["sampling"] ** 2) ** 0.5
    frame["z"] = (frame["difference"] / error).where(error > 0)
    lower = getattr(layout, "lower_is_better", False)
    ps = frame["p"].dropna()
    ps[:] = holm(ps.tolist())
    frame["corrected"], frame["mark"] = ps.reindex(frame.index), ""
    significant = (frame["corrected"] < ALPHA) & (frame["effect"] != 0)
    better = (frame["effect"] > 0) != lower
    frame.loc[significant & better, "mark"] = "▲"
    frame.loc[significant & ~better, "mark"] = "▼"
    # As printed, so that of two numbers that look equal never only one is marked.
    printed = frame["value"].map(lambda value: round(value, decimals), na_action="ignore")
    of_block = printed.mul(-1 if lower else 1).groupby([frame["block"], frame["column"]])
    frame["best"] = (of_block.transform("max") == printed * (-1 if lower else 1)) & (
        of_block.transform("count") > 1
    )
    title = layout.title.format(**named)
    frame.attrs |= {"name": layout.key, "title": title, "caption": layout.caption}
    frame.attrs |= {"labels": list(labels), "notes": list(notes), "commands": list(commands)}
    frame.attrs |= {"decimals": decimals, "fine": {}}
    return frame


class Markup(NamedTuple):
    """The marks of numbers in a kind of text."""

    bold: str
    small: str
    published: str
    escape: Callable[[str], str]


_MARKDOWN: Final = Markup("**{}**", "{}", "_published_", markdown)
_LATEX: Final = Markup(r"\textbf{{{}}}", r"{{\scriptsize {}}}", r"{\scriptsize published}", latex)


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
    if missing := about["commands"]:
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
    below += [f"% missing: {one_line(command)}" for command in about["commands"]]
    text: str = wide.to_latex(
        index=False,
        position="t",
        label=f"tab:{about['name']}",
        caption=rf"\textbf{{{latex(about['title'])}.}} {latex(about['caption'])}",
        column_format="".join(_ends(table)),
    )
    return text.replace(r"\end{table}", "\n".join([*below, r"\end{table}"]))


def to_csv(table: pd.DataFrame) -> str:
    """Return a line for each cell, in full precision, with the columns of ``as_table``."""
    text: str = table.assign(records=table["records"].map("; ".join)).to_csv(index=False)
    return text


RENDERERS: Final = {"md": to_markdown, "tex": to_latex, "csv": to_csv}
"""Renderer of each file suffix."""


def write(table: pd.DataFrame, directory: Path) -> list[Path]:
    """Write a table in every format, each file whole or not at all; return their paths."""
    # All are rendered before the first is written: a failure leaves no mixture of old and new.
    name = table.attrs["name"]
    texts = {directory / f"{name}.{suffix}": r(table) for suffix, r in RENDERERS.items()}
    for path, text in texts.items():
        write_text(path, text)
    return list(texts)


def _wide(table: pd.DataFrame, markup: Markup) -> pd.DataFrame:
    """Return the rows as texts, by block; labels that repeat those above are empty.

    The settings are always there: an empty text stands for none.
    """
    labels, decimals, fine = (table.attrs[name] for name in ("labels", "decimals", "fine"))
    rows: list[list[str]] = []
    blocks: list[Any] = []
    for number, block in table.groupby("block"):
        above = [""] * len(labels)
        for _, row in block.groupby("line"):
            names = row.iloc[0][labels].tolist()
            both = zip(labels, names, above, strict=True)
            texts = [
                "" if name == previous and label != SETTINGS else markup.escape(name)
                for label, name, previous in both
            ]
            above, cells = names, [*row.itertuples()]
            numbers = (cell_text(each, markup, fine.get(each.column, decimals)) for each in cells)
            rows.append([*texts, *numbers])
            if row["published"].notna().any():
                small = [published_text(cell, decimals) for cell in cells]
                small = [text and markup.small.format(markup.escape(text)) for text in small]
                rows.append([*([""] * len(labels))[1:], markup.published, *small])
            blocks += [number] * (len(rows) - len(blocks))
    columns = [markup.escape(name) for name in (*labels, *table["column"].unique())]
    return pd.DataFrame(rows, blocks, columns)


def _ends(table: pd.DataFrame) -> list[str]:
    """Return the alignment of each column: labels and words left, numbers right."""
    is_text = (table["status"] == "text").groupby(table["column"], sort=False).any()
    return ["l"] * len(table.attrs["labels"]) + ["l" if words else "r" for words in is_text]


def cell_text(cell: Any, markup: Markup, decimals: int) -> str:
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


def published_text(cell: Any, decimals: int) -> str:
    """Return the printed number, with our difference to it and its z; empty where it has none."""
    if math.isnan(cell.published):
        return ""
    z = "" if math.isnan(cell.z) else f", z {signed(cell.z, 1)}"
    return f"{cell.published:.{decimals}f} ({signed(cell.difference, decimals)}{z})"


def signed(number: float, decimals: int) -> str:
    """Return a number with its sign, or a bare zero."""
    text = f"{abs(number):.{decimals}f}"
    return f"{'−' if number < 0 else '+'}{text}" if float(text) else text
