"""The page of figures, from what has been drawn."""

from __future__ import annotations

from pathlib import Path

from capmoe_eval.site import page
from capmoe_eval.site.inventory import Inventory
from capmoe_eval.site.loose import mapping, read_object, sequence, text
from capmoe_eval.site.markup import Child, Markup, element, join
from capmoe_eval.site.page import Address, notice


def figures_page(inventory: Inventory, address: Address) -> str:
    """Return the page of all figures of a profile in ``<out>/<profile>/figures/``."""
    folder = address.out / inventory.profile / "figures"
    names = figure_names(folder)
    lines: list[Child] = [_figure(name, folder, address) for name in names]
    if not names:
        command = f"python -m capmoe_eval.figures all profile={inventory.profile}"
        lines = [notice(element("p", "No figure has been drawn yet: ", element("code", command)))]
    return page.frame(address, "Figures", inventory.profile, lines)


def figure_names(folder: Path) -> list[str]:
    """Return the figures of a directory: the paper's by number, those of v1, then the others."""
    names = {path.stem for suffix in ("json", "svg") for path in folder.glob(f"*.{suffix}")}

    def order(name: str) -> tuple[int, list[tuple[int, int, str]]]:
        kind = 0 if name.startswith("fig") else 1 if name.startswith("v1_") else 2
        return kind, page.natural(name)

    return sorted(names, key=order)


def _figure(name: str, folder: Path, address: Address) -> Markup:
    picture, problems = folder / f"{name}.svg", []
    content = {}
    try:
        content = dict(read_object(folder / f"{name}.json"))
    except ValueError as error:
        problems.append(f"Its caption is missing: {error}.")
    title = text(content.get("title") or name)
    shown: Child = None
    if picture.is_file():
        image = element("img", src=address.to_file(picture), alt=title)
        shown = element("div", image, class_="paper")
    else:
        problems.append("It has not been drawn.")
    missing = mapping(content.get("missing"))
    commands = [text(command) for command in sequence(missing.get("commands"))]
    holes: Child = None
    if missing.get("records"):
        told = f"{text(missing['records'])} of {text(missing.get('of'))} records are missing"
        holes = element(
            "details",
            element("summary", told),
            element("pre", element("code", "\n".join(commands)), tabindex="0"),
            class_="holes",
        )
    files = [
        join(" ", element("a", label, href=address.to_file(path)))
        for suffix, label in (("svg", "SVG"), ("pdf", "PDF"), ("png", "PNG"), ("json", "numbers"))
        if (path := folder / f"{name}.{suffix}").is_file()
    ]
    notes = [element("li", text(note)) for note in sequence(content.get("notes"))]
    place = content.get("place")
    caption = element(
        "figcaption",
        element("h2", title, id=f"{name}-title"),
        element("p", text(place), class_="place") if place else None,
        element("p", text(content.get("caption"))) if content.get("caption") else None,
        element("ul", notes, class_="notes") if notes else None,
        holes,
        element("p", "Files:", files, class_="files") if files else None,
    )
    boxes = [notice(element("p", problem)) for problem in problems]
    return join("\n", element("figure", boxes, shown, caption, id=name))
