"""The code keeps to its own rules, and ``docs/explanation/architecture.md`` names what is there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from capmoe_eval.routing.registry import method_names

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


def compared(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield what is compared: each side, and each element of a tuple, a list or a set."""
    for node in ast.walk(tree):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            sides = node.args if node.func.attr in ("startswith", "endswith") else []
        for side in sides:
            yield from side.elts if isinstance(side, (ast.Tuple, ast.List, ast.Set)) else [side]


def test_no_module_compares_the_name_of_a_method() -> None:
    """What differs between methods, their classes say."""
    places = [
        f"{path}:{side.lineno}: {side.value}"
        for path, tree in MODULES.items()
        for side in compared(tree)
        if isinstance(side, ast.Constant) and side.value in method_names()
    ]
    assert places == []
