"""Blocks on the embedded model that learns in context, from its records."""

from __future__ import annotations

from typing import Final

import numpy as np
from capmoe_methods.comparison import interval

from capmoe_eval.experiment.names import method_title
from capmoe_eval.experiment.record import Record
from pages import paragraph, signed, span, table
from pages.effects import paired_by_task
from pages.names import records
from pages.pooling import by_key

_ROUNDS: Final = {f"longicl_{rounds}": f"{rounds}" for rounds in range(1, 6)}


def scores() -> str:
    """Return the right answers by rounds of demonstrations, and what a capacity changes."""
    of_method = by_key(records("experiment=table6"), lambda record: record.method)
    (stock, *bounded) = of_method.values()
    rows = [_row("no capacity", stock)]
    rounds = {record.task: record.value for record in stock}
    assert rounds["longicl_5"] < rounds["longicl_1"]  # as the text says
    changes, n_documents = [], 0
    for side in bounded:
        title = f"{method_title(side[0].method)} γ={side[0].gamma:g}"
        rows.append(_row(title, side))
        paired = paired_by_task(side, stock)
        mean = np.mean([100 * paired[task].units for task in _ROUNDS], axis=0)
        n_documents = len(mean)
        points = interval({"longicl": mean})
        dropped = span((100 * record.load.drop_rate for record in side), "{:.1f}")
        changes.append(f"{title} drops {dropped} % of the pairs and changes {signed(*points, 1)}.")
    return (
        f"Right answers to {n_documents} official test queries, by rounds of "
        "demonstrations in the prompt:\n\n"
        + table(("", *_ROUNDS.values()), rows)
        + "\n"
        + paragraph(
            f"{' '.join(changes)} Changes are points against no capacity: a document's mean over "
            "the five columns, with 95 % intervals over documents. Among 77 names chance is 1.3 %. "
            "With five rounds the model answers fewer queries than with one; the paper's answers "
            "more."
        )
    )


def choices() -> str:
    """Return what each way to keep tokens costs at γ=1, and what no expert at all, at one round."""
    asked = ("model=zoo_icl_olmoe", "tasks=longicl_1")
    (stock,) = records(*asked, "method=baseline")
    (silent,) = records(*asked, "method=score", "gamma=0.0")
    rows = [("no capacity", f"{100 * stock.value:.0f} %", "", "")]
    for method in ("score", "expanded_drop", "random", "reverse_order", "order"):
        (bounded,) = records(*asked, f"method={method}", "gamma=1.0")
        rows.append(_change(method_title(method), bounded, stock))
    rows.append(_change("all experts disabled", silent, stock))
    return table(("one round, γ=1", "right", "pairs dropped", "− no capacity"), rows)


def _change(title: str, record: Record, stock: Record) -> tuple[str, ...]:
    paired = paired_by_task([record], [stock])
    points = interval({task: 100 * each.units for task, each in paired.items()})
    dropped = f"{100 * record.load.drop_rate:.1f} %"
    return title, f"{100 * record.value:.0f} %", dropped, signed(*points, 1)


def _row(title: str, side: list[Record]) -> tuple[str, ...]:
    values = {record.task: record.value for record in side}
    return (title, *(f"{100 * values[task]:.0f} %" for task in _ROUNDS))
