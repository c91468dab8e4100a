"""HTML in which a text cannot become markup by accident."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Final, TypeAlias

_VOID: Final = frozenset({"br", "img", "input", "link", "meta"})


class Markup(str):
    """A text that is HTML already; every other text is escaped when it is put into an element."""

    __slots__ = ()


Child: TypeAlias = "str | Iterable[Child] | None"
"""What may stand in an element: texts, markup, and lists of them."""

Attribute: TypeAlias = str | int | float | bool | None


def element(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Return an element.

    Args:
        name: Its tag.
        children: Its content; texts are escaped, None is nothing.
        attributes: ``class_`` is ``class``, ``data_method`` is ``data-method``; one that is None or
            False is left away, one that is True has no value. Values are escaped.
    """
    opening = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        opening += f" {key.rstrip('_').replace('_', '-')}"
        if value is not True:
            opening += f'="{html.escape(str(value))}"'
    if name in _VOID:
        return Markup(f"<{opening}>")
    return Markup(f"<{opening}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """Return children one after the other, escaped where they are no markup."""
    return Markup("".join(_text(child) for child in children))


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return html.escape(child)
    return "".join(_text(part) for part in child)
