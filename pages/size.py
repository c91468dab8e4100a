"""Blocks on effects at two sizes of one architecture, from records and cards."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from capmoe_methods.comparison import Interval, interval

from capmoe_eval.experiment.names import gamma_suffix, method_title
from capmoe_eval.experiment.record import Record
from pages import paragraph, signed, span, table
from pages.effects import paired_by_task
from pages.names import card, records
from pages.pooling import by_key, mean_load

_SIZES: Final = ("zoo_olmoe", "zoo_olmoe_large")
_MODELS: Final = f"grid.model=[{','.join(_SIZES)}]"
# Each grid's words, and the methods of its rows. Table 1 has Token Drop at three factors.
_GRIDS: Final = (
    (
        ("experiment=table1", "tasks=replicate", "grid.seed=[0]"),
        ("score", "reverse_order", "random", "order"),
    ),
    (("experiment=table2",), ("score", "expanded_drop", "expert_drop")),
)


def sizes() -> str:
    """Return what the cards of both models say: their size, their training, their need."""
    cards = [card(name) for name in _SIZES]
    rows = [
        ("million parameters", *(f"{each['parameters'] / 1e6:.1f}" for each in cards)),
        ("training steps", *(f"{each['training']['steps']:,}" for each in cards)),
        ("loss of the last steps", *(f"{each['training']['final_loss']:.3f}" for each in cards)),
        ("accuracy, nine dev sets", *(_mean(each, "accuracy") for each in cards)),
        ("the same, all experts disabled", *(_mean(each, "accuracy_silent") for each in cards)),
        (
            "fullest expert / mean load, by layer",
            *(span(each["peak_load"].values(), "{:.1f}") for each in cards),
        ),
    ]
    return table(("", *(f"`{name}`" for name in _SIZES)), rows)


def changes() -> str:
    """Return the dropped pairs and the change in accuracy under each method, at both sizes."""
    rows: list[Sequence[str]] = []
    differences: dict[str, list[Interval]] = {}
    for words, methods in _GRIDS:
        by_model = by_key(records(*words, _MODELS), lambda record: record.model)
        small, large = (by_model[name] for name in _SIZES)
        for method in methods:
            title, tasks = method_title(method), {record.task for record in small}
            gammas = sorted({r.gamma for r in small if r.method == method}, key=str)
            for gamma in gammas:
                dropped, points = _compared(small, large, method, gamma)
                if gamma == gammas[0]:
                    label = f"{title}{gamma_suffix(gamma)}, {len(tasks)} tasks"
                    rows.append((label, dropped, *(signed(*each, 1) for each in points)))
                differences.setdefault(title, []).append(points[-1])
    more = {
        title: f"{title} {count} of {len(of_method)}"
        for title, of_method in differences.items()
        if (count := sum(each.high < 0 for each in of_method))
    }
    none = [title for title in differences if title not in more]
    compared = [each for of_method in differences.values() for each in of_method]
    less = sum(each.low > 0 for each in compared)
    points_of = (f"points, `{name}`" for name in _SIZES)
    return (
        paragraph(
            "The larger model loses more in these settings, by the 95 % interval of the "
            f"difference: {', '.join(more.values())}. Under {', '.join(none)} it does so in none. "
            f"It loses less in {less} of {len(compared)}. The table has each method's lowest γ."
        )
        + "\n"
        + table(("", "pairs dropped", *points_of, "larger − small"), rows)
        + "\n"
        + paragraph("Intervals are over documents, paired and uncorrected. Tasks count equally.")
    )


def _compared(
    small: Sequence[Record], large: Sequence[Record], method: str, gamma: float | None
) -> tuple[str, list[Interval]]:
    """Return the dropped shares, and the points of the small, the large and their difference."""
    shares, sides = [], []
    for of_model in (small, large):
        stock = [record for record in of_model if record.cell.method.is_stock]
        bounded = [r for r in of_model if (r.method, r.gamma) == (method, gamma)]
        paired = paired_by_task(bounded, stock)
        assert len(paired) == len(stock) == len(bounded)
        sides.append({task: 100 * each.units for task, each in paired.items()})
        share = mean_load(bounded, list(paired), "drop_rate")
        assert share is not None
        shares.append(f"{100 * share:.1f} %")
    difference = {task: sides[1][task] - units for task, units in sides[0].items()}
    return " and ".join(shares), [interval(units) for units in (*sides, difference)]


def _mean(content: dict[str, Any], field: str) -> str:
    return f"{statistics.fmean(content[field].values()):.1f} %"
