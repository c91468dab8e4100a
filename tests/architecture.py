"""``python -m tests.architecture`` writes the list of files in ``docs/architecture.md``.

A module's line is the first line of its docstring, so that it is written once, where it is read.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "architecture.md"
HEADING = "## The files\n"


def main() -> None:
    """Write the list in place of the one that is there."""
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(text.partition(HEADING)[0] + HEADING + files(), encoding="utf-8")


def files() -> str:
    """Return the modules folder by folder, one line each."""
    folders: dict[Path, list[Path]] = {}
    for package in ("capmoe_eval", "hydra_plugins"):
        for path in sorted((ROOT / package).rglob("*.py")):
            folders.setdefault(path.parent, []).append(path)
    return "".join(f"\n{_folder(folder, modules)}" for folder, modules in folders.items())


def _folder(folder: Path, modules: list[Path]) -> str:
    inits = [path for path in modules if path.name == "__init__.py"]
    about = f"\n{_docstring(inits[0])}\n" if inits else ""
    lines = [
        f"- `{path.name}`: {_docstring(path).splitlines()[0].rstrip('.')}\n"
        for path in modules
        if path not in inits
    ]
    return f"### `{folder.relative_to(ROOT)}/`\n{about}" + ("\n" if lines else "") + "".join(lines)


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


if __name__ == "__main__":
    main()
