"""The page of serving: the advice on the embedded trace, from the file that the command wrote."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Final

from capmoe_eval.experiment.results import directories
from capmoe_eval.report.advice.command import EXAMPLE, EXAMPLE_MODEL, JSON
from capmoe_eval.report.site.inventory import Inventory, read
from capmoe_eval.report.site.page import Address, render_page

FOLDER: Final = "advice"


def folder(out: Path, profile: str) -> Path:
    """Return the directory of a profile's advice in a report."""
    return out / profile / FOLDER


def serving_page(inventory: Inventory, address: Address) -> str:
    """Return the page of the advice that ``site --all`` wrote, or the command that writes it."""
    place = folder(address.out, inventory.profile)
    path = place / JSON
    values: dict[str, object] = {"advice": None}
    if path.is_file():
        from capmoe_eval.report.advice.page import content
        from capmoe_eval.serving.advice import Advice

        found = read(Advice, path)
        values = {"advice": found} if isinstance(found, str) else content(found)
    return render_page(
        "serving",
        address,
        "Serving",
        inventory.profile,
        command=" ".join(["python -m capmoe_eval.advise", *example_words(inventory, place)]),
        files=f"{address.to_file(place)}/",
        example=EXAMPLE,
        **values,
    )


def example_words(inventory: Inventory, out: Path) -> list[str]:
    """Return the words of the command that advises on the embedded trace.

    Accuracy is asked of the results directory that has records of its model.
    """
    places = {r.path.parents[2] for r in inventory.records if r.model == EXAMPLE_MODEL}
    roots = (root for root in inventory.roots if places.intersection(directories(root)))
    there = [f"--results={root}" for root in itertools.islice(roots, 1)]
    return [EXAMPLE, "--ranks=8", "--at-least-speedup=1.5", *there, f"--out={out}"]
