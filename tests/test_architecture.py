"""``docs/architecture.md`` names files and folders that exist, and every module of the package."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def test_every_path_it_names_exists() -> None:
    paths = re.findall(r"`([\w.-]+(?:/[\w.-]*)+|[\w-]+\.(?:md|py|toml|txt|yaml))`", DOCUMENT)
    assert len(paths) > 100
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_it_has_one_line_for_every_module() -> None:
    listed = re.findall(r"^- `([\w./-]+\.py)`: \S", DOCUMENT, flags=re.MULTILINE)
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in ("capmoe_eval", "hydra_plugins")
        for path in (ROOT / package).rglob("*.py")
    }
    assert modules - set(listed) == set()
    assert len(listed) == len(set(listed))


def test_modules_of_a_room_are_sorted() -> None:
    for room in DOCUMENT.split("\n### ")[1:]:
        modules = re.findall(r"^- `([\w./-]+\.py)`", room, flags=re.MULTILINE)
        assert modules == sorted(modules)
