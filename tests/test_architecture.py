"""``docs/architecture.md`` names files and folders that exist, and every module of the package."""

from __future__ import annotations

import ast
import re

from tests.architecture import DOCUMENT, HEADING, ROOT, files

PAGE = DOCUMENT.read_text(encoding="utf-8")


def test_every_path_it_names_exists() -> None:
    answers = PAGE.partition(HEADING)[0]
    paths = re.findall(r"`([\w.-]+(?:/[\w.-]*)+|[\w-]+\.(?:md|py|toml|txt|yaml))`", answers)
    assert len(paths) > 25
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_function_it_names_is_in_the_module_beside_it() -> None:
    named = re.findall(r"`([\w/]+\.py)`: `(\w+)`", PAGE)
    assert len(named) >= 5
    for path, name in named:
        module = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(?:def |class )?{name}\b", module, flags=re.MULTILINE), (path, name)


def test_its_list_of_files_is_that_of_the_modules() -> None:
    assert PAGE.partition(HEADING)[2] == files(), "`python -m tests.architecture` writes it anew"


def test_every_module_says_in_its_first_line_what_it_is_for() -> None:
    lines = re.findall(r"^- `\w+\.py`: (.*)$", files(), flags=re.MULTILINE)
    assert len(lines) > 100 and all(lines)


def test_no_docstring_begins_with_a_question_word() -> None:
    said = [
        (path.name, ast.get_docstring(part) or "")
        for path in sorted((ROOT / "capmoe_eval").rglob("*.py"))
        for part in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(part, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    asks = re.compile(r"(What|Who|Where|How|Whether)\b")
    assert len(said) > 1000
    assert [(name, text[:60]) for name, text in said if asks.match(text)] == []
