"""The page of figures, from what has been drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import BaseModel

from capmoe_eval.report.site import page
from capmoe_eval.report.site.inventory import Inventory, read
from capmoe_eval.report.site.page import Address, render_page

_FORMATS: Final = {"svg": "SVG", "pdf": "PDF", "png": "PNG", "json": "numbers"}


class MissingRecords(BaseModel):
    """The records that a figure lacks, of so many, and the commands that compute them."""

    records: int
    of: int
    commands: list[str]


class FigureText(BaseModel):
    """The words beside a figure, from the file of `capmoe_eval.report.figures.write`."""

    title: str
    place: str
    caption: str
    notes: list[str]
    missing: MissingRecords


def figures_page(inventory: Inventory, address: Address) -> str:
    """Return the page of all figures of a profile in ``<out>/<profile>/figures/``."""
    folder = figure_folder(inventory, address)
    figures = [figure_view(name, folder, address) for name in figure_names(folder)]
    return render_page("figures", address, "Figures", inventory.profile, figures=figures)


def figure_folder(inventory: Inventory, address: Address) -> Path:
    """Return the directory of a profile's figures."""
    return address.out / inventory.profile / "figures"


def figure_names(folder: Path) -> list[str]:
    """Return the figures of a directory: the paper's by number, those of v1, then the others."""
    names = {path.stem for suffix in ("json", "svg") for path in folder.glob(f"*.{suffix}")}

    def order(name: str) -> tuple[int, list[tuple[int, int, str]]]:
        kind = 0 if name.startswith("fig") else 1 if name.startswith("v1_") else 2
        return kind, page.natural(name)

    return sorted(names, key=order)


def figure_view(name: str, folder: Path, address: Address) -> dict[str, object]:
    """Return what the template shows of a figure, drawn or not."""
    picture, about = folder / f"{name}.svg", read(FigureText, folder / f"{name}.json")
    return {
        "name": name,
        "about": about,
        "picture": address.to_file(picture) if picture.is_file() else None,
        "files": address.files(folder / name, _FORMATS),
    }
