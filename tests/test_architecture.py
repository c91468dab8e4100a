"""The code keeps to its own rules, and ``docs/explanation/architecture.md`` names what is there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
MODULES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for package in ("capmoe_eval", "hydra_plugins")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def docstrings(tree: ast.Module) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]


def test_every_path_it_names_exists() -> None:
    paths = re.findall(r"`([\w.-]+(?:/[\w.-]*)+|[\w-]+\.(?:md|py|toml|txt|yaml))`", PAGE)
    assert len(paths) > 25
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_function_it_names_is_in_the_module_beside_it() -> None:
    named = re.findall(r"`([\w/]+\.py)`: `(\w+)`", PAGE)
    assert len(named) >= 5
    for path, name in named:
        module = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(?:def |class )?{name}\b", module, flags=re.MULTILINE), (path, name)


def test_every_module_says_what_it_is_for() -> None:
    silent = [path for path, tree in MODULES.items() if not ast.get_docstring(tree)]
    assert silent == []


def test_no_docstring_begins_with_a_question_word() -> None:
    asks = re.compile(r"(What|Who|Where|How|Whether)\b")
    texts = [(path, text) for path, tree in MODULES.items() for text in docstrings(tree)]
    assert len(texts) > 1000
    assert [(path, text[:60]) for path, text in texts if asks.match(text)] == []


def test_names_of_variables_are_nouns() -> None:
    participles = {"found", "one", "own", "known", "given", "shown", "said", "told", "wanted"}
    named = [
        f"{path}:{node.lineno}"
        for path, tree in MODULES.items()
        for node in ast.walk(tree)
        if (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and node.id in participles
        )
        or (isinstance(node, ast.arg) and node.arg in participles)
    ]
    assert named == []


def test_no_class_name_stands_twice() -> None:
    names = Counter(
        node.name
        for tree in MODULES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_no_module_is_too_long_to_read() -> None:
    lines = {path: (ROOT / path).read_text(encoding="utf-8").count("\n") for path in MODULES}
    assert {path: count for path, count in lines.items() if count > 800} == {}
