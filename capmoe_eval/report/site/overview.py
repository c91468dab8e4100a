"""The first page: what is there, what is missing, what came out."""

from __future__ import annotations

from capmoe_eval.paper.benchmarks import Bench
from capmoe_eval.paper.verdict_file import VerdictFile
from capmoe_eval.report.site import page
from capmoe_eval.report.site.claims import LEDGER, Ledger, read_verdicts, verdict_counts
from capmoe_eval.report.site.figures import figure_folder, figure_names
from capmoe_eval.report.site.inventory import Inventory, missing_cells
from capmoe_eval.report.site.page import Address, render_page


def overview_page(inventory: Inventory, address: Address) -> str:
    """Return the first page."""
    profile, records, bench = inventory.profile, inventory.records, inventory.bench
    verdicts = {
        "The main claims, tested": read_verdicts(VerdictFile, inventory.verdicts(), profile),
        "Every claim and number": read_verdicts(Ledger, address.out / profile / LEDGER, profile),
    }
    picture = address.out / profile / "replication.png"
    of_images = sum(record.images for record in records)
    figures = len(figure_names(figure_folder(inventory, address)))
    return render_page(
        "overview",
        address,
        "Capacity-aware inference, reproduced",
        profile,
        inventory=inventory,
        with_failures=[
            {"href": address.to_record(record), "text": str(record)}
            for record in records
            if record.broken
        ],
        verdicts={
            name: found if isinstance(found, str) else verdict_counts(found)
            for name, found in verdicts.items()
            if found is not None
        },
        claims=address.to(page.CLAIMS),
        picture=address.to_file(picture) if picture.is_file() else None,
        records=address.link(page.RECORDS, f"{len(records):,}"),
        of_images=address.link(page.IMAGES, f"{of_images:,}"),
        models=sorted({record.model for record in records}),
        tasks=sorted({record.task for record in records}),
        figures=address.link(page.FIGURES, str(figures)),
        benchmarks=address.link(page.EFFICIENCY, str(len(bench.studies) + len(bench.evaluations))),
        benchmarks_about=_about(bench),
        profiles=inventory.profiles or {profile: 0},
        tables=[
            ({"text": key, "href": f"{address.to(page.TABLES)}#{key}"}, found, missing_cells(found))
            for key, found in inventory.experiments.items()
        ],
    )


def _about(bench: Bench) -> list[str]:
    """Return what must be said of the files of benchmarks."""
    emulated = sum(study.emulated for study in bench.studies)
    targets = [t for found in bench.evaluations for t in found.targets if t.met is not None]
    counts = {
        f"{emulated} of expert parallelism EMULATED": emulated,
        f"{sum(t.met is True for t in targets)} of {len(targets)} targets met": len(targets),
        f"{len(bench.broken)} unreadable": len(bench.broken),
    }
    return [text for text, count in counts.items() if count]
