"""Numbers and JSON values as texts, and texts escaped for Markdown and LaTeX."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

ABSENT: Final = "—"
_LATEX: Final = str.maketrans(
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
_MARKDOWN: Final = {ord(sign): f"\\{sign}" for sign in r"\`*_[]<>|&~"}


def one_line(text: object) -> str:
    """Return a text with every white space as one blank."""
    return " ".join(str(text).split())


def markdown(text: object) -> str:
    """Return a text of one line that Markdown shows as it is."""
    return one_line(text).translate(_MARKDOWN)


def latex(text: str) -> str:
    """Return a text of one line that LaTeX shows as it is."""
    return one_line(text).translate(_LATEX).replace(r"+$\infty$", r"$+\infty$")


def shown(number: float | None, pattern: str = "{:g}", scale: float = 1.0) -> str:
    """Return a number as text, or a dash where there is none."""
    return ABSENT if number is None else pattern.format(scale * number).replace("-", "−")


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines of columns, of which all but the first end in line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    firsts = (row[0].ljust(widths[0]) for row in rows)
    return ["  ".join([first, *others]) for first, (_, *others) in zip(firsts, cells, strict=True)]


def text(value: object) -> str:
    """Return any JSON value as words."""
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
