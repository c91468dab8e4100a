"""The page of figures, from what has been drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from capmoe_eval.report.files import FigureText, read
from capmoe_eval.report.site import page
from capmoe_eval.report.site.inventory import Inventory, attempt
from capmoe_eval.report.site.page import Address, render_page

_FORMATS: Final = {"svg": "SVG", "pdf": "PDF", "png": "PNG", "json": "numbers"}


def figures_page(inventory: Inventory, address: Address) -> str:
    """Return the page of all figures of a profile in ``<out>/<profile>/figures/``."""
    folder = address.out / inventory.profile / "figures"
    figures = [_figure(name, folder, address) for name in figure_names(folder)]
    return render_page("figures", address, "Figures", inventory.profile, figures=figures)


def figure_names(folder: Path) -> list[str]:
    """Return the figures of a directory: the paper's by number, those of v1, then the others."""
    names = {path.stem for suffix in ("json", "svg") for path in folder.glob(f"*.{suffix}")}

    def order(name: str) -> tuple[int, list[tuple[int, int, str]]]:
        kind = 0 if name.startswith("fig") else 1 if name.startswith("v1_") else 2
        return kind, page.natural(name)

    return sorted(names, key=order)


def _figure(name: str, folder: Path, address: Address) -> dict[str, object]:
    picture, problems = folder / f"{name}.svg", []
    found = attempt(lambda: read(FigureText, folder / f"{name}.json"))
    about = None if isinstance(found, str) else found
    if isinstance(found, str):
        problems.append(f"Its caption is missing: {found}.")
    drawn = picture.is_file()
    if not drawn:
        problems.append("It has not been drawn.")
    return {
        "name": name,
        "title": about.title if about else name,
        "problems": problems,
        "picture": address.to_file(picture) if drawn else None,
        "about": about,
        "files": [
            address.link_to_file(path, label)
            for suffix, label in _FORMATS.items()
            if (path := folder / f"{name}.{suffix}").is_file()
        ],
    }
