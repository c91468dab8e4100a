r"""The HTML, Markdown and LaTeX of tables, ledger and site: Jinja templates of plain values.

In HTML every value is escaped, in Markdown and LaTeX what goes through ``md`` or ``latex``. A line
break of HTML is for the reader of the template: beside a tag or a Jinja expression it is nothing,
within a text or a tag one space. What is printed is ``{{ "\n" }}``.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from capmoe_eval.report.templates.texts import latex, markdown, one_line, shown

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: object) -> str:
    """Return a filled template of this folder; a value that it lacks is an UndefinedError."""
    page = _environment().get_template(template).render(values)
    return _spelled(page) if template.endswith(".html") else page.rstrip("\n") + "\n"


def _spelled(page: str) -> str:
    """Return a page whose quotes are escaped as the standard library's ``html.escape`` does."""
    return page.replace("&#34;", "&quot;").replace("&#39;", "&#x27;")


@functools.cache
def _kind(word: str) -> str:
    """Return a word as the name of a class."""
    return re.sub(r"[^a-z]+", "-", word.lower())


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from jinja2.ext import Extension

    class OneLine(Extension):
        """Drops the line breaks of a template."""

        def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
            if not (name or "").endswith(".html"):
                return source
            source = re.sub(r"(?<=[>}])\s*\n\s*|\s*\n\s*(?=[<{])", "", source.strip())
            return re.sub(r"\s*\n\s*", " ", source)

    environment = Environment(
        loader=PackageLoader("capmoe_eval.report"),
        autoescape=lambda name: not (name or "").endswith((".md", ".tex")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        extensions=[OneLine],
    )
    environment.filters |= {
        "kind": _kind,
        "latex": latex,
        "md": markdown,
        "one_line": one_line,
        "shown": shown,
    }
    return environment
