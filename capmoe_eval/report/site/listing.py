"""The page of all records."""

from __future__ import annotations

from capmoe_eval.experiment.names import gamma_text
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.site import page
from capmoe_eval.report.site.inventory import Inventory
from capmoe_eval.report.site.loose import shown
from capmoe_eval.report.site.names import (
    gamma_options,
    gamma_order,
    knobs_text,
    method_name,
    method_options,
)
from capmoe_eval.report.site.page import Address, Filter, Frame
from capmoe_eval.report.templates import render


def records_page(inventory: Inventory, address: Address) -> str:
    """Return the page that lists every record, and every file that is none."""
    records = inventory.records
    choices = [
        Filter("model", "Model", {name: name for name in sorted({r.model for r in records})}),
        Filter("task", "Task", {name: name for name in sorted({r.task for r in records})}),
        Filter("method", "Method", method_options(r.method for r in records)),
        Filter("gamma", "γ", gamma_options(gamma_text(r.method, r.gamma) for r in records)),
    ]
    return render(
        "records",
        frame=Frame(address, "Records", inventory.profile),
        broken=broken_files(inventory),
        choices=choices,
        records=[_row(record, address) for record in records],
    )


def broken_files(inventory: Inventory) -> dict[str, object] | None:
    """Return what names the files that are no whole records, or None."""
    if not inventory.broken:
        return None
    count = len(inventory.broken)
    told = "1 file is no whole record" if count == 1 else f"{count} files are no whole records"
    return {"title": f"{told} and left out everywhere:", "lines": inventory.broken}


def _row(record: Record, address: Address) -> dict[str, object]:
    load = record.load
    gamma = gamma_text(record.method, record.gamma)
    numbers = (
        (f"{100 * record.value:.1f}", record.value),
        (shown(record.stderr, "{:.1f}", 100), record.stderr),
        (str(record.n), record.n),
        (shown(load.drop_rate, "{:.1f}", 100), load.drop_rate),
        (shown(load.peak_before, "{:.2f}"), load.peak_before),
        (shown(load.peak_after, "{:.2f}"), load.peak_after),
    )
    return {
        "model": record.model,
        "task": record.task,
        "method": record.method,
        "method_name": method_name(record.method),
        "href": address.to(page.cell_path(record)),
        "gamma": gamma,
        "gamma_order": gamma_order(gamma),
        "knobs": knobs_text(record),
        "numbers": [(text, None if value is None else float(value)) for text, value in numbers],
        "failed": record.proofs.broken,
    }
