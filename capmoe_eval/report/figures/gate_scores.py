"""Gate score by rank: Figure 8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import by_key
from capmoe_eval.report.figures.spec import Measured, Numbers
from capmoe_eval.report.figures.style import BLACK, BLUE, SKY, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def measure_scores(evidence: FigureRecords) -> Measured:
    """Average the gate scores of a token's highest, second, … expert over tokens."""
    found: list[dict[str, Any]] = []
    notes = []
    for model, records in by_key(evidence.of("routing"), lambda record: record.model).items():
        known = [record for record in records if _has_scores(record)]
        left_out = [record.task for record in records if not _has_scores(record)]
        if left_out:
            notes.append(
                f"{evidence.models[model]}: no scores by rank in the records of "
                f"{', '.join(left_out)}; compute them anew with overwrite=true."
            )
        if known:
            found.append({"model": evidence.models[model], **_by_rank(known)})
    if not found:
        raise UsageError(f"fig8: {notes[0]}")
    return Measured({"models": found}, tuple(notes))


def _has_scores(record: Record) -> bool:
    return all(layer.score_by_rank for layer in record.layers)


def _by_rank(records: list[Record]) -> dict[str, Any]:
    """Return the mean over all layers, and the lowest and highest layer's mean, at each rank."""
    layers = []
    for number in range(len(records[0].layers)):
        same = [record.layers[number] for record in records]
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
    figure, axes = panels(len(models), 1.65, same_scale=False)
    for ax, model in zip(axes, models, strict=True):
        ranks = range(1, len(model["mean"]) + 1)
        ax.fill_between(
            ranks,
            model["lowest_layer"],
            model["highest_layer"],
            color=SKY,
            alpha=0.5,
            linewidth=0,
            label="lowest to highest layer",
        )
        ax.plot(ranks, model["mean"], color=BLUE, marker="o", markersize=1.8, label="mean")
        ax.axvline(model["top_k"] + 0.5, color=BLACK, linestyle="--", linewidth=0.7)
        lines = [f"k = {model['top_k']}"]
        if model["next_over_last"] is not None:
            lines.append(f"rank k+1 / rank k: {model['next_over_last']:.2f}")
        lines.append(f"beyond top-k: {100 * model['share_beyond']:.0f} %")
        ax.annotate(
            "\n".join(lines),
            (0.98, 0.96),
            xycoords="axes fraction",
            ha="right",
            va="top",
            fontsize=6.5,
        )
        ax.set_ylim(bottom=0)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.set_xlabel("rank of the expert")
        ax.set_title(model["model"])
    axes[0].set_ylabel("gate score")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
