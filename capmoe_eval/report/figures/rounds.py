"""Token Reroute by its number of rounds: Figure 7 of v1."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from capmoe_eval.experiment.names import TITLES, gamma_suffix
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import by_key, mean_load, mean_score
from capmoe_eval.report.figures.spec import Measured, Numbers
from capmoe_eval.report.figures.style import BLACK, BLUE, COLUMN, VERMILLION, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def measure_rounds(evidence: FigureRecords) -> Measured:
    """Collect score and lost pairs by rounds; one round is Token Drop, zero is no limit at all."""
    model, tasks = evidence.model, list(evidence.tasks)
    records = evidence.of("one_round", "rounds", model=model)
    points: list[dict[str, Any]] = []
    notes = []
    groups = by_key(records, _rounds)
    for rounds in sorted(groups):
        score = mean_score(groups[rounds], tasks)
        if score is None:
            notes.append(f"No mean after {rounds} rounds: not every task is there.")
            continue
        points.append(
            {
                "rounds": rounds,
                "value": score.value,
                "stderr": score.stderr,
                "drop_rate": mean_load(groups[rounds], tasks, "drop_rate"),
                "unserved": _unserved(groups[rounds], tasks),
            }
        )
    stock = mean_score(evidence.of("baseline", model=model), tasks)
    gammas = sorted({record.gamma for record in records if record.gamma is not None})
    return Measured(
        {
            "model": evidence.models[model],
            "gamma": gammas[0] if gammas else None,
            "tasks": list(evidence.tasks.values()),
            "points": points,
            "baseline": None if stock is None else {"value": stock.value, "stderr": stock.stderr},
        },
        tuple(notes),
    )


def _rounds(record: Record) -> int:
    return record.cell.method.rounds if record.method == "token_reroute" else 1


def _unserved(records: Sequence[Record], tasks: Sequence[str]) -> float:
    """Return the share of T·K that no expert computes, tasks counting equally.

    Dropped pairs less those computed elsewhere instead; after one round, the drop rate.
    """
    shares = []
    for task in tasks:
        layers = [x for record in records if record.task == task for x in record.layers]
        computed = sum(sum(layer.load_after) for layer in layers)
        shares.append(1 - computed / float(sum(layer.assignments for layer in layers)))
    return statistics.fmean(shares)


def draw_rounds(numbers: Numbers) -> Figure:
    """Draw v1's Figure 7: score above, lost assignments below."""
    figure = new_figure(COLUMN, 2.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    points = numbers["points"]
    rounds = [point["rounds"] for point in points]
    upper.errorbar(
        rounds,
        [point["value"] for point in points],
        yerr=[1.96 * (point["stderr"] or 0.0) for point in points],
        color=BLUE,
        marker="o",
        elinewidth=0.7,
        capsize=2,
        label=f"{TITLES['token_reroute']} ± 1.96 SE",
    )
    if numbers["baseline"]:
        upper.axhline(numbers["baseline"]["value"], color=BLACK, linestyle=":", label="no limit")
    upper.set_ylabel("mean score (%)")
    upper.margins(y=0.15)
    upper.grid(axis="y")
    for field, marker, colour, dash, label in (
        ("drop_rate", "s", VERMILLION, "--", "top-k pairs dropped"),
        ("unserved", "^", BLUE, "-", "of them not replaced"),
    ):
        lower.plot(
            rounds,
            [None if point[field] is None else 100 * point[field] for point in points],
            marker=marker,
            color=colour,
            linestyle=dash,
            label=label,
        )
    lower.margins(y=0.2)
    lower.set_ylim(bottom=0)
    lower.set_ylabel("share (%)")
    lower.grid(axis="y")
    lower.set_xticks(
        rounds, [f"{count}" + (f" ({TITLES['score']})" if count == 1 else "") for count in rounds]
    )
    lower.set_xlabel("rounds")
    title = f"{numbers['model']}, {len(numbers['tasks'])} tasks"
    upper.set_title(title + gamma_suffix(numbers["gamma"], ", γ = "))
    handles, labels = upper.get_legend_handles_labels()
    more, words = lower.get_legend_handles_labels()
    figure.legend(handles + more, labels + words, loc="outside lower center", ncols=2)
    return figure
