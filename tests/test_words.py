"""README, pages and docstrings use the words of the field, and sentences that are read once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pages import ROOT, pages, without_blocks

INSTEAD = {
    r"\brooms?\b": "package",
    r"\bpromis\w+": "invariant",
    r"units? of chance": "sampling unit",
    r"margins? that decides?": "equivalence margin",
    r"the first decides|corrected for nothing|rest describes": "primary endpoint, exploratory",
    r"\b(?:in|contiguous) blocks\b|\bblocks? of experts\b": "contiguous placement",
    r"balanc\w+ without loss": "lossless load balancing",
    r"silent experts|experts? (?:is|are) silent": "experts disabled",
    r"(?:no|have a|has a) part (?:in|of) (?:an?|the|its) identity": "omitted from the digest",
    r"nominal γ=1 up to|read as the decimal": "with few tokens per expert; parsed exactly",
    r"\bweighs capacities\b": "compares",
    r"goes with the cell's end": "removed when the cell ends",
}
"""What is not written, and the words for it."""
READ = sorted(
    {
        *pages(),
        *(
            ROOT / name
            for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")
        ),
        *(ROOT / "capmoe_eval").rglob("README.md"),
    }
)
IN_A_CELL, IN_A_SENTENCE = 30, 36
"""Words at most: of a cell of a table, and of a sentence."""
MODULES = sorted(
    path for package in ("capmoe_eval", "hydra_plugins") for path in (ROOT / package).rglob("*.py")
)


def prose(page: str) -> str:
    """Return the text of a page without code, generated blocks and targets of links."""
    text = re.sub(r"^```.*?^```", "", without_blocks(page), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text, an entry of a list or of arguments by itself.

    Code is one word.
    """
    text = re.sub(r"^```.*?^```|<!--.*?-->", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"(?::\w+:)?(`+)[^`]*\1", "`code`", text)
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*#] |\n\s*\d+\. |\n {4}(?=\S)", text):
        yield from re.split(r"(?<=[.?!])[)*\"”]*\s+(?=[^a-z])", paragraph.strip())


def too_long(text: str) -> list[str]:
    """Return the sentences that nobody reads once."""
    return [each for each in sentences(text) if len(each.split()) > IN_A_SENTENCE]


def documented() -> Iterator[tuple[Path, str]]:
    """Yield every docstring of the package, with its file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                yield path.relative_to(ROOT), ast.get_docstring(node) or ""


def old_words(text: str) -> list[str]:
    """Return what a text says in words of its own instead of the field's."""
    joined = re.sub(r"\s+", " ", text)
    return [
        f"{match[0]!r}: write {words}"
        for pattern, words in INSTEAD.items()
        for match in re.finditer(pattern, joined, flags=re.IGNORECASE)
    ]


@pytest.mark.parametrize("path", READ, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_has_the_words_of_the_field_short_cells_and_sentences(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert old_words(prose(text)) == []
    rows = re.findall(r"(?m)^\|.*", text)
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell.split()) > IN_A_CELL] == []
    assert too_long(re.sub(r"(?m)^(?:\|| {4}).*", "", text)) == []


def test_docstrings_use_the_words_of_the_field() -> None:
    assert [f"{path}: {words}" for path, text in documented() for words in old_words(text)] == []


def test_a_sentence_of_a_docstring_is_read_once() -> None:
    assert [f"{path}: {words}" for path, text in documented() for words in too_long(text)] == []


def test_a_long_sentence_is_seen() -> None:
    long = "word " * IN_A_SENTENCE + "`code`."
    assert too_long(f"Short.\n\n- An entry\n- {long} Next sentence.") == [long]
    assert too_long(f"Args:\n    name: {long}\n    other: {'word ' * 30}") == [f"name: {long}"]
    assert too_long("- " + "word " * 30 + "\n- " + "`of code`" * 30) == []


def test_an_old_word_is_seen() -> None:
    text = "The unit of\nchance is an image, and `room` is code."
    assert old_words(prose(text)) == ["'unit of chance': write sampling unit"]
