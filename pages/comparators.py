"""Blocks on methods of other papers, from their records."""

from __future__ import annotations

from capmoe_methods.comparison import lost

from capmoe_eval.results.frames import results_of
from pages import signed, table
from pages.names import records
from pages.pooling import by_key


def macs() -> str:
    """Return what MACS and Token Drop drop and lose on MME, at equal γ."""
    asked = [record for record in records("experiment=images_macs") if record.task == "mme"]
    by_gamma = by_key([r for r in asked if r.gamma is not None], lambda record: record.gamma)
    rows = []
    for gamma, same in sorted(by_gamma.items(), reverse=True):
        drops = [r for r in same if r.method == "score" and r.cell.method.modality == "uniform"]
        of_macs = [
            record
            for record in same
            if record.method == "macs"
            and record.cell.method.setting("rho")
            and record.cell.method.setting("reroute") == "local"
        ]
        if drops and of_macs:
            results = results_of([*drops, *of_macs])
            is_drop = results.cells["method"] == "score"
            interval = lost(results, results.cells[~is_drop], results.cells[is_drop], ["mme"])
            assert not isinstance(interval, str), interval
            both = (drops[0].load, of_macs[0].load)
            rows.append(
                (
                    f"{gamma:g}",
                    *(f"{100 * load.drop_rate:.1f} %" for load in both),
                    *(f"{load.mean_peak_after:.2f}" for load in both),
                    signed(*interval, 1),
                )
            )
    head = (
        *("γ", "dropped, Token Drop", "dropped, MACS", "fullest expert / mean load, Token Drop"),
        *("MACS", "points, MACS − Token Drop"),
    )
    return table(head, rows)
