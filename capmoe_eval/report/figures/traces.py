"""Show the summary of a trace: as text, and the loads of one layer beside what a capacity drops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_text
from capmoe_eval.report.figures.pooling import busiest_first
from capmoe_eval.report.templates.texts import columns, shown
from capmoe_eval.serving.summary import LayerSummary, Summary
from capmoe_eval.serving.trace import steps_in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GIVEN_BY_IDS = (
    "From the experts of tokens, or counts, alone: loads, peaks, stragglers, padding, and the drop "
    "rate, which is the same whoever is kept."
)
_WITHOUT_SCORES = (
    "Not known without gate scores: which pairs 'score' drops, and how much of the scores is lost."
)
_QUALITY = (
    "Not known from any trace: what the model's answers lose, and how later layers route after a "
    "drop; python -m capmoe_eval measures both on a model."
)


def text(summary: Summary, assumed: str | None = None) -> str:
    """Return a summary as lines of text; ``assumed`` says which steps its tokens were put into."""
    tokens = "" if summary.tokens is None else f"{summary.tokens:,} tokens, "
    top_k = "" if summary.top_k is None else f", top-{summary.top_k}"
    steps = steps_in_words(summary.steps, summary.decode_steps)
    lines = [
        f"{summary.model or 'unknown model'} ({summary.source}): {tokens}{steps}, "
        f"{len(summary.layers)} MoE layers, {summary.n_experts} experts{top_k}",
        *([f"steps: {assumed}"] if assumed else []),
        "",
        "load of the fullest over the mean, in a step",
        *columns(_peaks(summary)),
        "",
        f"under a capacity of {summary.rounding}(γ·T·K/E) pairs per expert, T the tokens of a "
        "step; all layers",
        *columns(_capacities(summary.total)),
        "",
        _GIVEN_BY_IDS,
        *([_WITHOUT_SCORES] if summary.total.at[0].dropped_score is None else []),
        *([] if summary.ranks else ["Not known without --ranks: loads and stragglers of ranks."]),
        _QUALITY,
    ]
    return "\n".join(lines)


def _peaks(summary: Summary) -> list[list[str]]:
    ranks = summary.ranks
    heads = ["layer", "expert: mean", "highest"]
    rows = [heads + ([f"of {ranks} ranks: mean", "highest", "straggler"] if ranks else [])]
    for layer in (*summary.layers, summary.total):
        numbers: list[float | None] = [layer.expert_peak.mean, layer.expert_peak.max]
        if layer.rank_peak is not None:
            numbers += [layer.rank_peak.mean, layer.rank_peak.max, layer.straggler]
        rows.append([layer.name, *(shown(number, "{:.2f}") for number in numbers)])
    return rows


def _capacities(layer: LayerSummary) -> list[list[str]]:
    straggler = ["straggler"] if layer.straggler is not None else []
    lost = (f"scores lost by {keeper}" for keeper in layer.at[0].dropped_score or ())
    return [
        ["γ", "dropped", "padding", *straggler, *lost],
        *(
            [
                gamma_text(at.gamma),
                *(shown(share, "{:.2f} %", 100) for share in (at.drop_rate, at.pad_waste)),
                *(shown(at.straggler, "{:.2f}") for _ in straggler),
                *(shown(share, "{:.2f} %", 100) for share in (at.dropped_score or {}).values()),
            ]
            for at in layer.at
        ),
    ]


def draw_trace(summary: Summary, layer: int | None = None) -> Figure:
    """Draw the load of each expert of a layer over the mean, and what is dropped at each γ.

    Args:
        summary: The summary of a trace.
        layer: Place of the layer in the trace; None for the one with the highest mean peak.

    Raises:
        UsageError: If there is no such layer.
    """
    from capmoe_eval.report.figures import style
    from capmoe_eval.report.figures.expert_load import draw_asked

    layers = summary.layers
    if layer is None:
        layer = busiest_first([each.expert_peak.mean for each in layers])[0]
    if not 0 <= layer < len(layers):
        raise UsageError(f"layer={layer}: the trace has MoE layers 0 to {len(layers) - 1}")
    chosen = layers[layer]
    mean = chosen.assignments / summary.n_experts
    load = sorted((asked / mean for asked in chosen.load), reverse=True)

    figure, (left, right) = style.subplots(style.PAGE, 2.4, 1, 2)
    draw_asked(left, load, label="asked for by the router, all steps")
    peak = f"in a step: {chosen.expert_peak.mean:.1f} ×, at most {chosen.expert_peak.max:.1f} ×"
    left.axhline(1.0, color=style.BLACK, linewidth=0.7, linestyle="--")
    left.set_title(f"{chosen.name}\n{peak}", fontsize=8)
    gammas = [at.gamma for at in chosen.at]
    curves: list[tuple[str, list[float | None]]] = [
        (f"pairs, {chosen.name}", [at.drop_rate for at in chosen.at]),
        ("pairs, all layers", [at.drop_rate for at in summary.total.at]),
    ]
    for keeper in summary.total.at[0].dropped_score or ():
        lost = [(at.dropped_score or {})[keeper] for at in summary.total.at]
        curves.append((f"scores by {keeper}, all layers", [*lost]))
    for index, (label, shares) in enumerate(curves):
        right.plot(gammas, style.percent(shares), **style.line_look(index), label=label)
    style.gamma_axis(right, gammas)
    right.set(ylabel="dropped (%)", ylim=(0, None))
    right.set_title(f"{summary.model or summary.source}: what a capacity drops", fontsize=8)
    right.legend(frameon=False, fontsize=6)
    return figure
