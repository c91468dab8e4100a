"""Blocks on methods of other papers, from their records."""

from __future__ import annotations

from capmoe_methods.figures.losses import lost

from capmoe_eval.report.figures.pooling import by_key
from tests.pages import signed, table
from tests.pages.names import FAMILIES, records


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
            interval = lost(of_macs, drops, ["mme"])
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
    """Return what LASER moves, evens out and costs, by model, task and viable score."""
    asked = records("experiment=comparators")
    stock = {(r.model, r.task): r for r in asked if r.cell.method.is_stock}
    rows = []
    for record in sorted(
        (record for record in asked if record.method == "laser"),
        key=lambda record: (record.model, record.task, -record.knobs["viable_score"]),
    ):
        load = record.load
        steps = "" if load.decode is None else ", decode steps alone"
        experts = load.decode or load
        rows.append(
            (
                f"{FAMILIES[record.model]}, {record.task}{steps}",
                f"{record.knobs['viable_score']:g}",
                f"{100 * stock[record.model, record.task].value:.1f}",
                f"{100 * record.value:.1f}",
                f"{100 * load.drop_rate:.1f} %",
                f"{load.mean_peak_before:.2f} → {load.mean_peak_after:.2f}",
                f"{experts.activated_before:.1f} → {experts.activated_after:.1f}",
            )
        )
    head = (
        *("model, task", "`viable_score`", "score, top-k alone", "score, LASER", "pairs moved"),
        *("fullest expert / mean load", "activated experts"),
    )
    return table(head, rows)
