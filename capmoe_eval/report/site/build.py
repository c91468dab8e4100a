"""All pages as texts, and their way to the disk."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from capmoe_eval.errors import writing
from capmoe_eval.experiment.files import write_text
from capmoe_eval.report.site import page
from capmoe_eval.report.site.cell_page import record_page, relatives
from capmoe_eval.report.site.claims import claims_page
from capmoe_eval.report.site.efficiency import efficiency_page
from capmoe_eval.report.site.figures import figures_page
from capmoe_eval.report.site.inventory import Inventory
from capmoe_eval.report.site.listing import records_page
from capmoe_eval.report.site.overview import overview_page
from capmoe_eval.report.site.page import Address
from capmoe_eval.report.site.results import tables_page


def record_pages(inventory: Inventory, out: Path) -> dict[str, str]:
    """Return the page of each record: its path below ``out``, and its text."""
    found, others = {}, relatives(inventory.records)
    for record in inventory.records:
        path = page.cell_path(record)
        found[path] = record_page(
            record, inventory.profile, others[record.path], Address(path, out)
        )
    return found


def main_pages(inventory: Inventory, out: Path, replication: Path) -> dict[str, str]:
    """Return every other file of the site: its path below ``out``, and its text.

    Args:
        inventory: What is there.
        out: Where the site will be; figures, claims and the picture are looked for there.
        replication: The JSON file that the replication writes.
    """
    found = {
        page.OVERVIEW: overview_page(inventory, replication, Address(page.OVERVIEW, out)),
        page.TABLES: tables_page(inventory, Address(page.TABLES, out)),
        page.FIGURES: figures_page(inventory, Address(page.FIGURES, out)),
        page.EFFICIENCY: efficiency_page(inventory, Address(page.EFFICIENCY, out)),
        page.CLAIMS: claims_page(inventory, replication, Address(page.CLAIMS, out)),
        page.RECORDS: records_page(inventory, Address(page.RECORDS, out)),
    }
    for path in (page.STYLE, page.SCRIPT):
        asset = files("capmoe_eval.report.site") / "assets" / path.rpartition("/")[2]
        found[path] = asset.read_text(encoding="utf-8")
    return found


def write_site(pages: Mapping[str, str], out: Path) -> int:
    """Write a site, and delete the pages of records that are no more.

    A file that says the same already is left alone.

    Returns:
        How many pages were deleted.

    Raises:
        UsageError: If a file cannot be written.
    """
    with writing("--out", out):
        for path, text in pages.items():
            if not _says(out / path, text):
                write_text(out / path, text, durable=False)
        return _delete_others(pages, out)


def _says(path: Path, text: str) -> bool:
    try:
        return path.read_bytes() == text.encode("utf-8")
    except FileNotFoundError:
        return False


def _delete_others(pages: Mapping[str, str], out: Path) -> int:
    """Delete pages of cells that an earlier run wrote and this one did not."""
    kept = {out / path for path in pages}
    mark = f'<meta name="generator" content="{page.GENERATOR}">'
    deleted = 0
    for path in sorted((out / page.CELLS).glob("*/*/*.html")):
        if path not in kept and mark in path.read_text(encoding="utf-8", errors="replace"):
            path.unlink()
            deleted += 1
    return deleted
