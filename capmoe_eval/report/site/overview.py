"""The first page: what is there, what is missing, what came out."""

from __future__ import annotations

from pathlib import Path

from capmoe_eval.paper.benchmarks import Bench
from capmoe_eval.paper.verdict_file import VerdictFile
from capmoe_eval.report.files import Ledger
from capmoe_eval.report.site import page
from capmoe_eval.report.site.claims import (
    ledger_path,
    read_verdicts,
    verdict_counts,
)
from capmoe_eval.report.site.figures import figure_names
from capmoe_eval.report.site.inventory import Inventory, missing_cells
from capmoe_eval.report.site.page import Address, render_page


def overview_page(inventory: Inventory, replication: Path, address: Address) -> str:
    """Return the first page.

    Args:
        inventory: What is there.
        replication: The JSON file that the replication writes.
        address: Where the page will be.
    """
    profile, records, bench = inventory.profile, inventory.records, inventory.bench
    verdicts = {
        "The main claims, tested": read_verdicts(VerdictFile, replication, profile),
        "Every claim and number": read_verdicts(Ledger, ledger_path(address.out, profile), profile),
    }
    broken_promises = [record for record in records if record.proofs.broken]
    picture = address.out / profile / "replication.png"
    figures = len(figure_names(address.out / profile / "figures"))
    profiles = ", ".join(f"{name} ({count} files)" for name, count in inventory.profiles.items())
    return render_page(
        "overview",
        address,
        "Capacity-aware inference, reproduced",
        profile,
        notes=inventory.notes,
        broken=inventory.broken,
        broken_promises=[
            address.link(page.cell_path(record), str(record.cell)) for record in broken_promises
        ],
        verdicts={
            name: found if isinstance(found, str) else verdict_counts(found)
            for name, found in verdicts.items()
            if found is not None
        },
        claims=address.to(page.CLAIMS),
        picture=address.to_file(picture) if picture.is_file() else None,
        records=address.link(page.RECORDS, f"{len(records):,}"),
        broken_count=f"{len(inventory.broken):,}",
        broken_promises_count=f"{len(broken_promises):,}",
        models=", ".join(sorted({record.model for record in records})) or "none",
        tasks=", ".join(sorted({record.task for record in records})) or "none",
        figures=address.link(page.FIGURES, str(figures)),
        benchmarks=address.link(page.EFFICIENCY, str(len(bench.studies) + len(bench.evaluations))),
        benchmarks_about=_about(bench),
        profiles=profiles or f"{profile} (0 files)",
        tables=[_table(key, inventory, address) for key in inventory.experiments],
    )


def _about(bench: Bench) -> list[str]:
    """Return what must be said of the files of benchmarks."""
    emulated = sum(study.emulated for study in bench.studies)
    targets = [t for found in bench.evaluations for t in found.targets if t.met is not None]
    told = []
    if emulated:
        told.append(f"{emulated} of expert parallelism EMULATED")
    if targets:
        told.append(f"{sum(t.met is True for t in targets)} of {len(targets)} targets met")
    if bench.broken:
        told.append(f"{len(bench.broken)} unreadable")
    return told


def _table(key: str, inventory: Inventory, address: Address) -> dict[str, object]:
    """Return a table's link with its numbers of cells and the command for the missing."""
    link = {"text": key, "href": f"{address.to(page.TABLES)}#{key}"}
    found = inventory.experiments[key]
    if isinstance(found, str):
        return {**link, "problem": found}
    missing = missing_cells(found)
    counts = (len(found.plans), len(found.records), len(found.broken), missing)
    words = " ".join([f"experiment={key}", *inventory.overrides])
    return {
        **link,
        "problem": "",
        "counts": [f"{count:,}" for count in counts],
        "command": f"python -m capmoe_eval {words}" if missing else None,
    }
