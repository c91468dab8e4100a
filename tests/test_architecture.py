"""Methods are told apart by their classes, and the page of the architecture names what is there."""

from __future__ import annotations

import ast
import re
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


def test_every_function_it_names_is_in_the_module_beside_it() -> None:
    named = re.findall(r"`([\w/]+\.py)`: `(\w+)`", PAGE)
    assert len(named) >= 5
    for path, name in named:
        module = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(?:def |class )?{name}\b", module, flags=re.MULTILINE), (path, name)


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
