"""Checks of the paper's sentences by values read from its figures.

Claims name the facts here as they name those of :mod:`capmoe_eval.paper.claims.arithmetic`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.paper.contrasts import in_points
from capmoe_eval.paper.printed import figure
from capmoe_eval.paper.verdicts import Finding, in_print, tallied

_EPSILON: Final = 1e-9
_LAYER: Final = "fig4_layer_speedup"


def relation(
    values: Mapping[str, Any], holds: tuple[str, str, str], text: str, tolerance: float = _EPSILON
) -> Finding:
    """Check that a relation holds between two numbers, such as ``[shown, <, stated]``.

    Values are numbers by name: typed in, or a path in the figures, or one of :data:`_TAKE` of what
    lies under a path, or of numbers. The text has their names in braces.
    """
    numbers = {name: _value(raw) for name, raw in values.items()}
    first, sign, second = holds
    difference = numbers[first] - numbers[second]
    fits = {"=": abs(difference) < tolerance, "<": difference < 0, ">": difference > 0}
    fits["≤"] = difference < tolerance
    return in_print(fits[sign], text.format(**numbers))


def _value(raw: Any) -> Any:
    if isinstance(raw, Mapping):
        [(take, of)] = raw.items()
        return _TAKE[take](_value(of))
    if isinstance(raw, list):
        return figure(*raw) if isinstance(raw[0], str) else [_value(part) for part in raw]
    return raw


_TAKE: Final[Mapping[str, Callable[[Any], float]]] = {
    "highest": max,
    "sum": sum,
    "product": math.prod,
    "floor": math.floor,
    "quotient": lambda two: two[0] / two[1],
    "mean": lambda values: sum(values) / len(values),
    "count": len,
    "gain": lambda speedup: 100 * (speedup - 1),
    "percent": lambda two: 100 * two[0] / two[1],
}
"""Functions of values: ``gain`` of a speedup in percent, ``percent`` of one number of another."""


def series(
    path: Sequence[str | int], higher: int, lower: int, margin: float | str = 0.0
) -> Finding:
    """Check that one series of a bar chart is nowhere more than ``-margin`` below another.

    ``path`` is a figure of groups of values, of which ``higher`` and ``lower`` are places; the
    margin is in points, or its name with a sign.
    """
    bound = in_points(margin)
    groups = {k: v for k, v in figure(*path).items() if k not in ("source", "order")}
    gaps = {name: values[higher] - values[lower] for name, values in groups.items()}
    failed = [f"{name} {gap:+.1f}" for name, gap in gaps.items() if gap < bound - _EPSILON]
    least, most = min(gaps.values()), max(gaps.values())
    text = f"{{fit}} of {{all}} groups fit; differences from {least:+.1f} to {most:+.1f}."
    return tallied(text, failed, len(gaps))


def text_fits(gamma: float, least: float) -> Finding:
    """Check that a capacity holds a share of Figure 10's text tokens, images being dropped first.

    Of an expert's text at most γ times the mean load of both modalities fits. The sums hide what
    single batches lose.
    """
    total, text = figure("fig10_total_pixels_pm0.03"), figure("fig10_text_pixels_pm0.03")
    capacity = gamma * sum(total) / len(total)
    share = 100 * sum(min(load, capacity) for load in text) / sum(text)
    over = sum(load > capacity for load in text)
    part = 100 * sum(text) / sum(total)
    text = (
        f"At{gamma_suffix(gamma)} {share:.1f} % of the figure's text assignments fit, asked at "
        f"least {least:g} %; {over} of {len(text)} experts have more text than their capacity, the "
        f"most {max(text):g} of the figure's unit; text is {part:.1f} % of all."
    )
    return in_print(share >= least, text)


def faster_when_tighter() -> Finding:
    """Check that every model and method of Figure 4 gains more the smaller γ is."""
    series = {
        f"{model} {method}": [speedups[gamma] for gamma in sorted(speedups, key=float)]
        for model, methods in figure(_LAYER).items()
        if model != "source"
        for method, speedups in methods.items()
    }
    failed = [name for name, v in series.items() if v != sorted(set(v), reverse=True)]
    return tallied("{fit} of {all} series rise as γ falls.", failed, len(series))


def straggler(model: str, peak: float | None = None) -> Finding:
    """Check layer speedups against L ∝ max N_i: with a peak p, at most p/γ, so speedup·γ ≤ p."""
    speedups = figure(_LAYER, model, "TD")
    products = {float(gamma): value * float(gamma) for gamma, value in speedups.items()}
    text = ", ".join(f"{p:.2f} ({gamma_suffix(gamma, 'γ=')})" for gamma, p in products.items())
    text = f"{model}: speedup × γ is {text}; were latency the highest load alone, it would be the "
    text += "peak load, the same at every γ."
    if peak is None:
        return in_print(None, text)
    return in_print(max(products.values()) <= peak, f"{text} The stated peak is {peak:g}.")


def below_ideal(figure_5: Mapping[str, Sequence[str]]) -> Finding:
    """Check that end-to-end speedups are possible with those of the layer, at some share of time.

    Amdahl's law: with a share f of the time in MoE layers, 1/end-to-end = 1 − f + f/layer. Settings
    are named as in Figure 4, with their path in Figure 5 and γ.
    """
    texts, shares = [], []
    for (model, (*path, gamma)), method in itertools.product(figure_5.items(), ("TD", "ED")):
        layer = figure(_LAYER, model, method, gamma)
        whole = figure("fig5_e2e_speedup", *path, method, 0)
        shares.append((1 - 1 / whole) / (1 - 1 / layer))
        texts.append(
            f"{model} {method} γ={gamma}: layer {layer:g}×, model {whole:g}×, "
            f"{100 * shares[-1]:.0f} % of the time in MoE layers"
        )
    return in_print(max(shares) <= 1 + _EPSILON, "; ".join(texts) + ".")


FACTS: Final = (relation, series, text_fits, faster_when_tighter, straggler, below_ideal)
"""The facts that a claim can name."""
