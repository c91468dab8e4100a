"""The page of figures, from what has been drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from capmoe_eval.report.site import page
from capmoe_eval.report.site.inventory import Inventory
from capmoe_eval.report.site.loose import mapping, read_object, sequence, text
from capmoe_eval.report.site.page import Address, Frame
from capmoe_eval.report.templates import render

_FORMATS: Final = {"svg": "SVG", "pdf": "PDF", "png": "PNG", "json": "numbers"}


def figures_page(inventory: Inventory, address: Address) -> str:
    """Return the page of all figures of a profile in ``<out>/<profile>/figures/``."""
    folder = address.out / inventory.profile / "figures"
    names = figure_names(folder)
    return render(
        "figures",
        frame=Frame(address, "Figures", inventory.profile),
        figures=[_figure(name, folder, address) for name in names],
    )


def figure_names(folder: Path) -> list[str]:
    """Return the figures of a directory: the paper's by number, those of v1, then the others."""
    names = {path.stem for suffix in ("json", "svg") for path in folder.glob(f"*.{suffix}")}

    def order(name: str) -> tuple[int, list[tuple[int, int, str]]]:
        kind = 0 if name.startswith("fig") else 1 if name.startswith("v1_") else 2
        return kind, page.natural(name)

    return sorted(names, key=order)


def _figure(name: str, folder: Path, address: Address) -> dict[str, object]:
    picture, problems = folder / f"{name}.svg", []
    content: Mapping[str, Any] = {}
    try:
        content = read_object(folder / f"{name}.json")
    except ValueError as error:
        problems.append(f"Its caption is missing: {error}.")
    drawn = picture.is_file()
    if not drawn:
        problems.append("It has not been drawn.")
    missing = mapping(content.get("missing"))
    told = f"{text(missing.get('records'))} of {text(missing.get('of'))} records are missing"
    return {
        "name": name,
        "title": text(content.get("title") or name),
        "problems": problems,
        "picture": address.to_file(picture) if drawn else None,
        "place": content.get("place") and text(content["place"]),
        "caption": content.get("caption") and text(content["caption"]),
        "notes": [text(note) for note in sequence(content.get("notes"))],
        "missing": told if missing.get("records") else None,
        "commands": [text(command) for command in sequence(missing.get("commands"))],
        "files": [
            address.link_to_file(path, label)
            for suffix, label in _FORMATS.items()
            if (path := folder / f"{name}.{suffix}").is_file()
        ],
    }
