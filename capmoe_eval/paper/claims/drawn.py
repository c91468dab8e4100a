"""Arithmetic over the values read from the paper's figures.

Claims name the facts here as they name those of :mod:`capmoe_eval.paper.claims.arithmetic`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.paper.claims.finding import Finding, in_print, listed
from capmoe_eval.paper.printed import figure

_EPSILON: Final = 1e-9
_LAYER: Final = "fig4_layer_speedup"


def figure_value(path: Sequence[str | int], stated: float) -> Finding:
    """Whether a figure shows the stated value."""
    shown = figure(*path)
    return in_print(
        abs(shown - stated) < _EPSILON, f"The figure shows {shown:g}; stated is {stated:g}."
    )


def figure_percent(
    path: Sequence[str | int], stated: float, beside: Sequence[str | int]
) -> Finding:
    """Whether a speedup of the figure is the stated gain in percent; ``beside`` is a look-alike."""
    gain, other = (100 * (figure(*p) - 1) for p in (path, beside))
    text = (
        f"{' '.join(map(str, path[1:-1]))}: a speedup of {1 + gain / 100:g}× is {gain:.0f} %; "
        f"stated is {stated:g} %, which {'is' if abs(other - stated) < 0.5 else 'is not'} that of "
        f"{' '.join(map(str, beside[1:-1]))} ({other:.0f} %)."
    )
    return in_print(abs(gain - stated) < 0.5, text)


def figure_maximum(
    path: Sequence[str | int], above: float | None = None, below: float | None = None
) -> Finding:
    """Whether a figure's highest value lies above, or below, a bound."""
    values = figure(*path)
    highest = max(values)
    holds = (above is None or highest > above) and (below is None or highest < below)
    bounds = [f"above {above:g}" if above is not None else "", f"below {below:g}" if below else ""]
    said = " and ".join(b for b in bounds if b)
    return in_print(holds, f"The highest of {len(values)} values is {highest:g}; said is {said}.")


def figure_mean(path: Sequence[str | int], stated: float, tolerance: float = 0.02) -> Finding:
    """Whether the values of a figure have the mean that their definition gives them."""
    values = figure(*path)
    mean = sum(values) / len(values)
    text = (
        f"The {len(values)} values sum to {sum(values):.1f}, so that their mean is {mean:.3f}; by "
        f"definition it is {stated:g} (sum {stated * len(values):g})."
    )
    return in_print(abs(mean - stated) <= tolerance, text)


def figure_share(part: Sequence[str | int], whole: Sequence[str | int], below: float) -> Finding:
    """Whether one series is a small part of another."""
    share = sum(figure(*part)) / sum(figure(*whole))
    return in_print(share < below, f"It is {100 * share:.1f} % of the total, read from pixels.")


def series(path: Sequence[str | int], higher: int, lower: int, margin: float = 0.0) -> Finding:
    """Whether one series of a bar chart is nowhere lower than another by more than ``-margin``.

    Args:
        path: A figure of groups, each a list of values.
        higher: Index of the series that is said to be higher.
        lower: Index of the other.
        margin: Least difference.
    """
    groups = {k: v for k, v in figure(*path).items() if k not in ("source", "order")}
    gaps = {name: values[higher] - values[lower] for name, values in groups.items()}
    failed = [f"{name} {gap:+.1f}" for name, gap in gaps.items() if gap < margin - _EPSILON]
    text = (
        f"{len(gaps) - len(failed)} of {len(gaps)} groups fit; differences from "
        f"{min(gaps.values()):+.1f} to {max(gaps.values()):+.1f}."
    )
    return in_print(not failed, listed(text, failed))


def faster_when_tighter() -> Finding:
    """Whether every model and method of Figure 4 gains more the smaller γ is."""
    failed, count = [], 0
    for model, method, speedups in _layer_speedups():
        values = [speedups[g] for g in sorted(speedups, reverse=True)]
        count += 1
        if values != sorted(set(values)):
            failed.append(f"{model} {method}")
    return in_print(
        not failed, listed(f"{count - len(failed)} of {count} series rise as γ falls.", failed)
    )


def straggler(model: str, method: str = "TD", peak: float | None = None) -> Finding:
    """Whether layer speedups fit L ∝ max N_i: with a peak p, at most p/γ, so speedup·γ ≤ p."""
    speedups = figure(_LAYER, model, method)
    products = {float(gamma): value * float(gamma) for gamma, value in speedups.items()}
    said = ", ".join(f"{p:.2f} ({gamma_suffix(gamma, 'γ=')})" for gamma, p in products.items())
    text = f"{model}: speedup × γ is {said}; were latency the highest load alone, it would be the "
    text += "peak load, the same at every γ."
    if peak is None:
        return in_print(None, text)
    return in_print(max(products.values()) <= peak, f"{text} The stated peak is {peak:g}.")


def below_ideal(models: Sequence[str], figure_5: Mapping[str, Sequence[str]]) -> Finding:
    """Whether end-to-end speedups stay below those of the layer, and what share that implies.

    Amdahl's law: with a share f of the time in MoE layers, 1/end-to-end = 1 − f + f/layer.

    Args:
        models: Names in Figure 4.
        figure_5: For each, path of the same setting in Figure 5 and its γ.
    """
    texts, holds = [], True
    for model in models:
        *path, gamma = figure_5[model]
        for method in ("TD", "ED"):
            layer = figure(_LAYER, model, method, gamma)
            whole = figure("fig5_e2e_speedup", *path, method, 0)
            share = (1 - 1 / whole) / (1 - 1 / layer)
            holds = holds and share <= 1 + _EPSILON
            texts.append(
                f"{model} {method} γ={gamma}: layer {layer:g}×, model {whole:g}×, "
                f"{100 * share:.0f} % of the time in MoE layers"
            )
    return in_print(holds, "; ".join(texts) + ".")


def deployment(fewer: Sequence[str | int], more: Sequence[str | int]) -> Finding:
    """Whether fewer experts per GPU gain more, in one setting of Figure 5."""
    few, many = figure(*fewer), figure(*more)
    return in_print(few > many, f"One expert per GPU {few:g}×, several {many:g}×.")


def highest_speedup(stated: float, path: Sequence[str | int]) -> Finding:
    """Whether a stated speedup is within that of a figure for the same model and γ."""
    shown = figure(*path)
    text = f"{' '.join(map(str, path))} is {shown:g}×; stated is up to {stated:g}×."
    return in_print(stated <= shown + _EPSILON, text)


def _layer_speedups() -> Iterator[tuple[str, str, Mapping[str, float]]]:
    for model, methods in figure(_LAYER).items():
        if model != "source":
            for method, speedups in methods.items():
                yield model, method, {k: speedups[k] for k in sorted(speedups, key=float)}


FACTS: Final[dict[str, Callable[..., Finding]]] = {
    fact.__name__: fact
    for fact in (
        figure_value,
        figure_percent,
        figure_maximum,
        figure_mean,
        figure_share,
        series,
        faster_when_tighter,
        straggler,
        below_ideal,
        deployment,
        highest_speedup,
    )
}
