"""The page of all records."""

from __future__ import annotations

from capmoe_eval.names import gamma_text
from capmoe_eval.record import Record
from capmoe_eval.site import page
from capmoe_eval.site.inventory import Inventory, failed_proofs
from capmoe_eval.site.loose import shown
from capmoe_eval.site.markup import Markup, element
from capmoe_eval.site.names import (
    gamma_options,
    gamma_order,
    knobs_text,
    method_name,
    method_options,
)
from capmoe_eval.site.page import Address, Filter, Heading

_HEADINGS = (
    Heading("Model"),
    Heading("Task"),
    Heading("Method"),
    Heading("γ", numeric=True),
    Heading("Knobs"),
    Heading("Score (%)", numeric=True),
    Heading("±", numeric=True),
    Heading("n", numeric=True),
    Heading("Dropped (%)", numeric=True),
    Heading("Peak before", numeric=True),
    Heading("Peak after", numeric=True),
    Heading("Promises"),
)


def records_page(inventory: Inventory, address: Address) -> str:
    """Return the page that lists every record, and every file that is none."""
    records = inventory.records
    choices = [
        Filter("model", "Model", {name: name for name in sorted({r.model for r in records})}),
        Filter("task", "Task", {name: name for name in sorted({r.task for r in records})}),
        Filter("method", "Method", method_options(r.method for r in records)),
        Filter("gamma", "γ", gamma_options(gamma_text(r.method, r.gamma) for r in records)),
    ]
    caption = (
        "One row for each evaluation. Peak: the highest load of an expert over the mean load in "
        "any layer and batch, as the router asked for and as it was computed."
    )
    body = page.rows(_row(record, address) for record in records)
    table = page.sortable(caption, _HEADINGS, [body], wraps=False)
    return page.frame(
        address,
        "Records",
        inventory.profile,
        broken_files(inventory),
        page.filters(choices, keeps_baselines=True) if records else None,
        table if records else element("p", "There are no records of this profile."),
    )


def broken_files(inventory: Inventory) -> Markup | None:
    """Return a box that names the files that are no whole records, or nothing."""
    if not inventory.broken:
        return None
    count = len(inventory.broken)
    told = "1 file is no whole record" if count == 1 else f"{count} files are no whole records"
    return page.notice(
        element("p", element("strong", f"{told} and left out everywhere:")),
        element("ul", [element("li", reason) for reason in inventory.broken]),
    )


def _row(record: Record, address: Address) -> Markup:
    load = record.capmoe["load"]
    gamma = gamma_text(record.method, record.gamma)
    failed = failed_proofs(record)
    kept = element("span", f"broken: {', '.join(failed)}", class_="wrong") if failed else "kept"

    def cell(text: str, value: float | None) -> Markup:
        order = None if value is None else float(value)
        return element("td", text, class_="number", data_value=order)

    return element(
        "tr",
        element("th", record.model, scope="row"),
        element("td", record.task),
        element(
            "td", element("a", method_name(record.method), href=address.to(page.cell_path(record)))
        ),
        cell(gamma, gamma_order(gamma)),
        element("td", knobs_text(record)),
        cell(f"{100 * record.value:.1f}", record.value),
        cell(shown(record.stderr, "{:.1f}", 100), record.stderr),
        cell(str(record.n), record.n),
        cell(shown(load["drop_rate"], "{:.1f}", 100), load["drop_rate"]),
        cell(shown(load["peak_before"], "{:.2f}"), load["peak_before"]),
        cell(shown(load["peak_after"], "{:.2f}"), load["peak_after"]),
        element("td", kept),
        data_model=record.model,
        data_task=record.task,
        data_method=record.method,
        data_gamma=gamma,
    )
