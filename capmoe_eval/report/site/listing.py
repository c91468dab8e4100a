"""The page of all records."""

from __future__ import annotations

from capmoe_eval.experiment.names import gamma_text
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.site import page
from capmoe_eval.report.site.inventory import Inventory
from capmoe_eval.report.site.names import (
    gamma_filter,
    gamma_order,
    method_filter,
    method_name,
    name_filter,
)
from capmoe_eval.report.site.page import Address, render_page


def records_page(inventory: Inventory, address: Address) -> str:
    """Return the page that lists every record, and every file that is none."""
    records = inventory.records
    return render_page(
        "records",
        address,
        "Records",
        inventory.profile,
        broken=broken_files(inventory),
        choices=[
            name_filter("model", "Model", (record.model for record in records)),
            name_filter("task", "Task", (record.task for record in records)),
            method_filter(record.method for record in records),
            gamma_filter(gamma_text(record.method, record.gamma) for record in records),
        ],
        rows=[_row(record, address) for record in records],
    )


def broken_files(inventory: Inventory) -> dict[str, object] | None:
    """Return what names the files that are no whole records, or None."""
    if not inventory.broken:
        return None
    count = len(inventory.broken)
    told = "1 file is no whole record" if count == 1 else f"{count} files are no whole records"
    return {"title": f"{told} and left out everywhere:", "lines": inventory.broken}


def _row(record: Record, address: Address) -> dict[str, object]:
    gamma = gamma_text(record.method, record.gamma)
    knobs = record.cell.label.split("-")[1:]
    return {
        "record": record,
        "method_name": method_name(record.method),
        "href": address.to(page.cell_path(record)),
        "gamma": gamma,
        "gamma_order": gamma_order(gamma),
        "knobs": " ".join(k for k in knobs if not k.startswith("g") or k == "global"),
    }
