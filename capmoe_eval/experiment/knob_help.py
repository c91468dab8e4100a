"""Describe every method and every knob of the registry, as ``--help`` prints them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from capmoe_eval.errors import shown
from capmoe_eval.routing.factor import factor_forms
from capmoe_eval.routing.knobs import declared_knobs
from capmoe_eval.routing.registry import knobs, method_class, method_names

_INDENT = " " * 4


def methods_with(knob: str) -> tuple[str, ...]:
    """Return the methods that have a knob; those of a form of γ are of every method with a γ."""
    field = "gamma" if any(knob in form.knobs for form in factor_forms()) else knob
    return tuple(name for name in method_names() if field in declared_knobs(method_class(name)))


def methods_in_words(knob: str) -> str:
    """Return the methods that have a knob, or all but those that lack it if these are fewer."""
    having = methods_with(knob)
    lacking = [name for name in method_names() if name not in having]
    return f"all but {', '.join(lacking)}" if len(lacking) < len(having) else ", ".join(having)


def help_text() -> str:
    """Return a paragraph for each method and each knob, as ``--help`` prints them."""
    lines = ["== Methods (method=name) =="]
    for name in method_names():
        lines += _paragraph(name, _first_line(method_class(name)), method_class(name).source)
    lines += ["", "== Knobs of methods (knob=value; a knob that a method lacks has no effect) =="]
    for knob in knobs().values():
        heading = f"{knob.name}={shown(knob.default)}"
        lines += _paragraph(heading, knob.help, f"{knob.values} [{methods_in_words(knob.name)}]")
    return "\n".join(lines)


def _paragraph(heading: str, *parts: str) -> Iterator[str]:
    yield heading
    for part in parts:
        yield from textwrap.wrap(part, 100, initial_indent=_INDENT, subsequent_indent=_INDENT)


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]
