"""``python -m tests.knob_table`` writes the table of knobs in ``docs/methods.md``.

Name, default, values and meaning of a knob are those of its declaration.
"""

from __future__ import annotations

from pathlib import Path

from capmoe_eval.errors import shown
from capmoe_eval.experiment.knob_help import methods_in_words
from capmoe_eval.routing.registry import knobs

DOCUMENT = Path(__file__).parents[1] / "docs" / "methods.md"
BEGIN, END = "<!-- knobs: python -m tests.knob_table -->\n", "<!-- end of knobs -->\n"


def main() -> None:
    """Write the table in place of the one that is there."""
    text = DOCUMENT.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}{table()}{END}{after}", encoding="utf-8")


def written() -> str:
    """Return the table that the document has."""
    return DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def table() -> str:
    """Return every knob of every registered method as a row of a Markdown table."""
    rows = ["| knob | default | values | meaning | methods |", "|---|---|---|---|---|"]
    for knob in knobs().values():
        names = ", ".join(f"`{name}`" for name in knob.choices)
        cells = f"`{knob.name}`", f"`{shown(knob.default)}`", names or knob.values, knob.help
        rows.append(f"| {' | '.join((*cells, methods_in_words(knob.name)))} |")
    return "".join(f"{row}\n" for row in rows)


if __name__ == "__main__":
    main()
