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
        broken=inventory.broken,
        choices=[
            name_filter("model", "Model", (record.model for record in records)),
            name_filter("task", "Task", (record.task for record in records)),
            method_filter(record.method for record in records),
            gamma_filter(gamma_text(record.method, record.gamma) for record in records),
        ],
        rows=[_row(record, address) for record in records],
    )


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
