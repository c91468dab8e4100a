r"""Jinja templates of tables, ledger and site, and the texts of numbers in them.

In HTML every value is escaped, in Markdown and LaTeX what goes through ``md`` or ``latex``. A line
break of HTML is for the reader of the template: beside a tag or a Jinja expression it is nothing,
within a text or a tag one space. What is printed is ``{{ "\n" }}``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from jinja2 import Environment


ABSENT: Final = "—"
_PACKAGE: Final = "capmoe_eval.report"
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
        "§": r"\S{}",
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


def render(template: str, package: str = _PACKAGE, /, **values: object) -> str:
    """Return a filled template of this folder; a value that it lacks is an UndefinedError.

    ``package`` has another folder ``templates``, which is looked in first.
    """
    page = _environment(package).get_template(template).render(values)
    return _spelled(page) if template.endswith(".html") else page.rstrip("\n") + "\n"


def _spelled(page: str) -> str:
    """Return a page whose quotes are escaped as the standard library's ``html.escape`` does."""
    return page.replace("&#34;", "&quot;").replace("&#39;", "&#x27;")


@functools.cache
def _environment(package: str) -> Environment:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from jinja2.ext import Extension

    class OneLine(Extension):
        """Drops the line breaks of a template."""

        def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
            if not (name or "").endswith(".html"):
                return source
            source = re.sub(r"(?<=[>}])\s*\n\s*|\s*\n\s*(?=[<{])", "", source.strip())
            return re.sub(r"\s*\n\s*", " ", source)

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in dict.fromkeys((package, _PACKAGE))]),
        autoescape=lambda name: not (name or "").endswith((".md", ".tex")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        extensions=[OneLine],
    )
    environment.filters |= {
        "latex": latex,
        "md": markdown,
        "one_line": one_line,
        "shown": shown,
    }
    return environment
