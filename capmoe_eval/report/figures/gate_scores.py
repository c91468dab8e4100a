"""Gate score by rank: Figure 8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import by_layer
from capmoe_eval.report.figures.spec import Measured, Numbers
from capmoe_eval.report.figures.style import BLACK

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def measure_scores(evidence: FigureRecords) -> Measured:
    """Average the gate scores of a token's highest, second, … expert over tokens."""
    found: list[dict[str, Any]] = []
    notes = []
    for title, records in evidence.by_model("routing").items():
        known = [r for r in records if all(layer.score_by_rank for layer in r.layers)]
        left_out = [record.task for record in records if record not in known]
        if left_out:
            notes.append(
                f"{title}: no scores by rank in the records of {', '.join(left_out)}; compute them "
                "anew with overwrite=true."
            )
        if known:
            found.append({"model": title, **_by_rank(known)})
    if not found:
        raise UsageError(f"fig8: {notes[0]}")
    return Measured({"models": found}, notes)


def _by_rank(records: list[Record]) -> dict[str, Any]:
    """Return the mean over all layers, and the lowest and highest layer's mean, at each rank."""
    layers = []
    for same in by_layer(records):
        tokens = sum(layer.tokens for layer in same)
        sums = [[layer.tokens * score for score in layer.score_by_rank or ()] for layer in same]
        layers.append([sum(scores) / tokens for scores in zip(*sums, strict=True)])
    ranks = list(zip(*layers, strict=True))
    mean = [sum(scores) / len(scores) for scores in ranks]
    top_k = records[0].layers[0].top_k
    return {
        "top_k": top_k,
        "mean": mean,
        "lowest_layer": [min(scores) for scores in ranks],
        "highest_layer": [max(scores) for scores in ranks],
        "next_over_last": mean[top_k] / mean[top_k - 1] if top_k < len(mean) else None,
        "share_beyond": 1 - sum(mean[:top_k]) / sum(mean),
    }


def draw_scores(numbers: Numbers) -> Figure:
    """Draw Figure 8, one panel a model."""
    from matplotlib.ticker import MaxNLocator

    models = numbers["models"]
    figure, axes = style.panels(len(models), 1.65, same_scale=False)
    for ax, model in zip(axes, models, strict=True):
        ranks = range(1, len(model["mean"]) + 1)
        band, label = (model["lowest_layer"], model["highest_layer"]), "lowest to highest layer"
        ax.fill_between(ranks, *band, color=style.SKY, alpha=0.5, linewidth=0, label=label)
        ax.plot(ranks, model["mean"], color=style.BLUE, marker="o", markersize=1.8, label="mean")
        ax.axvline(model["top_k"] + 0.5, color=BLACK, linestyle="--", linewidth=0.7)
        lines = [f"k = {model['top_k']}"]
        if model["next_over_last"] is not None:
            lines.append(f"rank k+1 / rank k: {model['next_over_last']:.2f}")
        lines.append(f"beyond top-k: {100 * model['share_beyond']:.0f} %")
        style.corner_note(ax, "\n".join(lines), top=0.96)
        ax.set(ylim=(0, None), xlabel="rank of the expert", title=model["model"])
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes[0].set_ylabel("gate score")
    style.legend_below(figure, axes[0], columns=2)
    return figure
