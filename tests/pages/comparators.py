"""Blocks on methods of other papers, from their records."""

from __future__ import annotations

from capmoe_methods.losses import lost

from capmoe_eval.results.frames import results_of
from tests.pages import signed, table
from tests.pages.names import FAMILIES, records
from tests.pages.pooling import by_key

_VIABLE = 0.5, 0.25, 0.1


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
            and record.knobs["rho"]
            and record.knobs["reroute"] == "local"
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


def laser() -> str:
    """Return what LASER moves, evens out and costs, by model and task, top-k first."""
    asked = records("experiment=comparators")
    stock = {(r.model, r.task): r for r in asked if r.cell.method.is_stock}
    moved = (record for record in asked if record.method == "laser")
    rows = []
    for (model, task), of_task in sorted(by_key(moved, lambda r: (r.model, r.task)).items()):
        by_score = sorted(of_task, key=lambda record: -record.knobs["viable_score"])
        assert [record.knobs["viable_score"] for record in by_score] == list(_VIABLE)
        loads = [record.load for record in by_score]
        counted = [load.decode or load for load in loads]
        steps = "" if loads[0].decode is None else ", decode steps"
        scores = [record.value for record in (stock[model, task], *by_score)]
        peaks = [loads[0].mean_peak_before, *(load.mean_peak_after for load in loads)]
        experts = [counted[0].activated_before, *(load.activated_after for load in counted)]
        rows.append(
            (
                f"{FAMILIES[model]}, {task}{steps}",
                ", ".join(f"{100 * score:.1f}" for score in scores),
                ", ".join(f"{100 * load.drop_rate:.1f}" for load in loads),
                ", ".join(f"{peak:.2f}" for peak in peaks),
                ", ".join(f"{number:.1f}" for number in experts),
            )
        )
    head = "model, task", "score, %", "pairs moved, %", "fullest expert / mean", "activated experts"
    columns = ", ".join(f"{score:g}" for score in _VIABLE)
    return f"Top-k alone in the forwards of the first, then `viable_score` {columns}:\n\n" + table(
        head, rows
    )
