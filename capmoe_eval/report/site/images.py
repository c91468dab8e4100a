"""The page of images and text: the tables, figures and claims of models that read both."""

from __future__ import annotations

from typing import Final

from capmoe_eval.paper.verdict_file import VerdictFile
from capmoe_eval.report.figures import catalogue
from capmoe_eval.report.site import page
from capmoe_eval.report.site.claims import read_verdicts
from capmoe_eval.report.site.figures import figure_folder, figure_names, figure_view
from capmoe_eval.report.site.inventory import Inventory
from capmoe_eval.report.site.names import GAMMA_ORDER
from capmoe_eval.report.site.page import Address, render_page
from capmoe_eval.report.site.results import table_views

TABLES: Final = ("table4", "table8", "table9")
FIGURES: Final = tuple(
    spec.name
    for spec in catalogue.FIGURES
    if any("images" in name for name in (spec.experiment, *spec.parts))
)
CLAIMS: Final = ("l", "m", "n", "o")
"""The letters of the replication's claims about images."""


def images_page(inventory: Inventory, address: Address) -> str:
    """Return the page; of a profile without a model of images it says why there is nothing."""
    profile, found = inventory.profile, inventory.experiments.get(TABLES[0])
    verdicts = read_verdicts(VerdictFile, inventory.verdicts(), profile)
    judged = {claim.id: claim for claim in getattr(verdicts, "claims", ())}
    folder = figure_folder(inventory, address)
    drawn = figure_names(folder)
    return render_page(
        "images",
        address,
        "Images and text",
        profile,
        problem=found if isinstance(found, str) else "",
        notes=[] if found is None or isinstance(found, str) else found.notes,
        commands=[
            f"make {' '.join(names)} PROFILE={profile}"
            for names in ((*TABLES, *FIGURES), ("replicate",))
        ],
        unreadable_verdicts=verdicts if isinstance(verdicts, str) else "",
        claims=[judged[letter] for letter in CLAIMS if letter in judged],
        unjudged=[letter for letter in CLAIMS if letter not in judged],
        all_claims=address.link(page.CLAIMS, "Claims"),
        tables=table_views(TABLES, inventory, address),
        figures=[figure_view(name, folder, address) for name in FIGURES if name in drawn],
        undrawn=[name for name in FIGURES if name not in drawn],
        order=GAMMA_ORDER,
    )
