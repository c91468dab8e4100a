r"""Jinja templates of the replication and the site.

In HTML every value is escaped. A line break of HTML is for
the reader of the template: beside a tag or a Jinja expression it is nothing, within a text or a tag
one space. What is printed is ``{{ "\n" }}``.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, /, **values: object) -> str:
    """Return a filled template of this folder; a value that it lacks is an UndefinedError."""
    page = _environment().get_template(template).render(values)
    return page if template.endswith(".html") else page.rstrip("\n") + "\n"


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

    return Environment(
        loader=PackageLoader("capmoe_report"),
        autoescape=lambda name: not (name or "").endswith(".md"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        extensions=[OneLine],
    )
