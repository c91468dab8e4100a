"""The table of knobs: name, default, values and meaning of each are those of its declaration."""

from __future__ import annotations

from capmoe_eval.errors import shown
from capmoe_eval.routing.registry import knobs, methods_in_words
from pages import table


def knob_table() -> str:
    """Return every knob of every registered method as a row of a Markdown table."""
    rows = []
    for knob in knobs().values():
        names = ", ".join(f"`{name}`" for name in knob.choices)
        cells = f"`{knob.name}`", f"`{shown(knob.default)}`", names or knob.values, knob.help
        rows.append((*cells, methods_in_words(knob.name)))
    return table(("knob", "default", "values", "meaning", "methods"), rows)
