"""README, pages and docstrings have sentences that are read once."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pages import ROOT, pages

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


@pytest.mark.parametrize("path", READ, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_has_short_cells_and_sentences(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\|.*", text)
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell.split()) > IN_A_CELL] == []
    assert too_long(re.sub(r"(?m)^(?:\|| {4}).*", "", text)) == []


def test_a_sentence_of_a_docstring_is_read_once() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    wrong = [
        f"{path}: {words}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds)
        for words in too_long(ast.get_docstring(node) or "")
    ]
    assert wrong == []


def test_a_long_sentence_is_seen() -> None:
    long = "word " * IN_A_SENTENCE + "`code`."
    assert too_long(f"Short.\n\n- An entry\n- {long} Next sentence.") == [long]
