"""No module compares a method's name: what differs between methods, their classes say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import capmoe_eval
from capmoe_eval.routing.registry import method_names

PACKAGE = Path(capmoe_eval.__file__).parent


def literals(node: ast.expr) -> Iterator[str]:
    """The texts that a comparison may be with: one, or those of a tuple, a list or a set."""
    parts = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]
    for part in parts:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def compared(source: str) -> list[tuple[int, str]]:
    """The line and the name of each comparison with a method's name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            sides = list(node.args) if node.func.attr in ("startswith", "endswith") else []
        lines = [(side.lineno, name) for side in sides for name in literals(side)]
        found += [(line, name) for line, name in lines if name in method_names()]
    return found


def test_no_module_compares_the_name_of_a_method() -> None:
    places = [
        f"{path}:{line}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, name in compared(path.read_text())
    ]
    assert places == []
