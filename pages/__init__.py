"""``make pages`` fills in what README and docs have of knobs, records and commands.

Such a block stands between two lines, ``<!-- NAME: make pages -->`` and ``<!-- end of NAME -->``.
``blocks.py`` has the text of every block; ``tests/test_pages.py`` compares them, and refuses
measured numbers outside of them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from capmoe_eval.report.texts import shown

if TYPE_CHECKING:
    from capmoe_report.effects import Effect

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"<!-- ([\w-]+): make pages -->\n(.*?)<!-- end of \1 -->\n", re.DOTALL)


def pages() -> list[Path]:
    """Return every README and the pages of ``docs/``, without the log and a command's verdicts."""
    docs = (p for p in sorted(DOCS.rglob("*.md")) if p.parent.name not in ("zoo", "log"))
    methods = sorted((ROOT / "packages/capmoe-methods/capmoe_methods").glob("*/README.md"))
    return [ROOT / "README.md", *docs, *methods]


def present() -> dict[str, str]:
    """Return the blocks as they are, by name; a name on two pages is a ValueError."""
    blocks: dict[str, str] = {}
    for path in pages():
        for name, content in _BLOCK.findall(path.read_text(encoding="utf-8")):
            if name in blocks:
                raise ValueError(f"{path.name}: block {name} stands twice")
            blocks[name] = content
    return blocks


def without_blocks(page: str) -> str:
    """Return the text of a page without its blocks."""
    return _BLOCK.sub("", page)


def fill(page: str, texts: dict[str, str]) -> str:
    """Return a page with new texts in its blocks."""
    pattern = "<!-- {0}: make pages -->\n{1}<!-- end of {0} -->\n"
    return _BLOCK.sub(lambda block: pattern.format(block[1], texts[block[1]]), page)


def paragraph(text: str, rest: str = "") -> str:
    """Return a paragraph in lines of at most 120 characters; ``rest`` is before all but one."""
    wrapper = textwrap.TextWrapper(120, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = rest
    return wrapper.fill(text) + "\n"


def bullets(points: Iterable[str]) -> str:
    """Return a list of paragraphs."""
    return "".join(paragraph(f"- {point}", rest="  ") for point in points)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("| --- ", "|---") for line in lines)


def signed(mean: float, low: float, high: float, digits: int = 2) -> str:
    """Return a difference and its interval, with their signs."""
    pattern = f"{{:+.{digits}f}}"
    numbers = [shown(round(value, digits) + 0.0, pattern) for value in (mean, low, high)]
    return f"{numbers[0]} [{numbers[1]}, {numbers[2]}]"


def change(effect: Effect, digits: int = 2, scale: float = 1.0, *, wide: bool = False) -> str:
    """Return an effect with its interval, or a dash where a side has no records.

    ``wide`` takes the interval over families and documents: a dash where there is one family.
    """
    if effect.points is None or (wide and effect.between is None):
        return "–"
    numbers = (effect.points, *effect.interval(wide=wide))
    return signed(*(scale * number for number in numbers), digits)


def span(values: Iterable[float], pattern: str) -> str:
    """Return the smallest and the largest of some numbers as "a to b", or the one that both are."""
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(shown(end, pattern) for end in (ordered[0], ordered[-1])))
