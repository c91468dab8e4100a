"""HTML in which a text cannot become markup by accident."""

from __future__ import annotations

import functools
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
        opening += _spelled(key)
        if value is not True:
            opening += f'="{_escaped(str(value))}"'
    if name in _VOID:
        return Markup(f"<{opening}>")
    content = _text(children[0]) if len(children) == 1 else "".join(map(_text, children))
    return Markup(f"<{opening}>{content}</{name}>")


@functools.cache
def _spelled(key: str) -> str:
    """Return the name of an attribute as HTML has it."""
    return f" {key.rstrip('_').replace('_', '-')}"


# A site repeats itself: headings, names of fields, small numbers.
_escaped = functools.lru_cache(maxsize=65536)(html.escape)


def join(*children: Child) -> Markup:
    """Return children one after the other, escaped where they are no markup."""
    return Markup("".join(map(_text, children)))


def _text(child: Child) -> str:
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return _escaped(child)
    return "" if child is None else "".join(map(_text, child))
