"""Checks of the paper's sentences by arithmetic over its printed tables and figures.

Every function is a fact that a claim can name (``printed: {fact: difference, …}``); what is asked
once is a formula of ``relation``. A fact returns its numbers with an outcome; nothing here was
measured by this suite.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.lazy import pd
from capmoe_eval.paper.printed import AVERAGE, PrintedRow, Where, figure, find_row, find_rows

from capmoe_report.margins import Expectation, in_points, pairs
from capmoe_report.verdicts import BEYOND, Finding, Outcome, listed, unanimous, weigh

if TYPE_CHECKING:
    from jinja2 import Environment

# Printed decimals are exact; sums of binary fractions are not.
_EPSILON: Final = 1e-9


def rounded(value: float, decimals: int = 1) -> float:
    """Return ``value`` rounded half up, as print does."""
    return truncated(value + 0.5 / 10.0**decimals, decimals)


def truncated(value: float, decimals: int) -> float:
    """Return ``value`` cut off after ``decimals``."""
    scale = 10.0**decimals
    return math.floor(value * scale + _EPSILON) / scale


def _in_print(holds: bool | None, text: str) -> Finding:
    """Return the check of arithmetic in print; None gives numbers and decides nothing."""
    verdict = Outcome.IMPOSSIBLE if holds is None else unanimous([holds])
    return Finding(verdict=verdict, text=text)


def _tallied(text: str, cases: Sequence[tuple[bool, float, str]]) -> Finding:
    """Return a check that holds if every case does, each with its difference and its words.

    The text has places ``{fit}``, ``{failed}`` and ``{all}`` for numbers of cases, ``{low}`` and
    ``{high}`` for their differences.
    """
    failed = [words for fits, _, words in cases if not fits]
    gaps = [gap for _, gap, _ in cases]
    counts = {"fit": len(cases) - len(failed), "failed": len(failed), "all": len(cases)}
    return _in_print(
        not failed, listed(text.format(**counts, low=min(gaps), high=max(gaps)), failed)
    )


def relation(values: Mapping[str, Any], text: str, holds: str = "") -> Finding:
    """Check a formula of numbers by name; without one nothing is decided.

    A value is a number, or a formula in which the names before it are known, such as
    ``row(table=1, method="Score", gamma=1.0).mean``. A formula is an expression of Jinja2. It has
    ``row`` and ``rows`` (:func:`find_row` and :func:`find_rows`), and ``figure`` for the values
    under a path. ``series`` has these values as a Series, by γ if there is one for each γ. The text
    has the names in braces.
    """
    named: dict[str, Any] = {}
    for name, value in values.items():
        named[name] = _evaluated(value, named) if isinstance(value, str) else value
    fits = bool(_evaluated(holds, named)) if holds else None
    return _in_print(fits, text.format(**named))


def _evaluated(formula: str, named: Mapping[str, Any]) -> Any:
    return _formulas().compile_expression(formula, undefined_to_none=False)(**named)


@functools.cache
def _formulas() -> Environment:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, autoescape=False)
    environment.globals |= {
        "figure": figure,
        "series": _series,
        "row": lambda **where: find_row(where),
        "rows": lambda **where: find_rows(where),
    }
    return environment


def _series(*path: str | int) -> pd.Series[float]:
    values = figure(*path)
    return pd.Series(values).rename(index=float if isinstance(values, Mapping) else None)


def averages(where: Where, decimals: int = 1) -> Finding:
    """Check that printed averages are the rounded means of their rows."""
    cases = []
    for row in (row for row in find_rows(where) if AVERAGE in row.values):
        printed = row.values[AVERAGE]
        how = "truncated" if truncated(row.mean, decimals) == printed else "wrong"
        words = f"{row.label}: mean {row.mean:.3f}, printed {printed:.{decimals}f} ({how})"
        cases.append((rounded(row.mean, decimals) == printed, row.mean - printed, words))
    return _tallied("{fit} of {all} averages are the rounded mean of their row.", cases)


def difference(a: Where, b: Where, stated: float) -> Finding:
    """Check that two averages differ as stated, in points or in percent."""
    first, second = find_row(a), find_row(b)
    exact = first.mean - second.mean
    relative = 100 * exact / second.mean
    printed = first.values[AVERAGE] - second.values[AVERAGE]
    fits = "relative percent" if rounded(abs(relative)) == stated else ""
    if stated in (rounded(abs(exact)), rounded(abs(printed))):
        fits = "points"
    text = (
        f"{first.label} against {second.label}, {AVERAGE}: {exact:+.2f} points "
        f"({relative:+.2f} % relative; printed averages differ by {printed:+.1f}). "
    )
    text += f"{stated:g} fits as {fits}." if fits else f"Neither is {stated:g}."
    return _in_print(bool(fits), text)


def ranking(
    higher: Where, lower: Where, columns: str = AVERAGE, margin: float | str = 0.0
) -> Finding:
    """Check that rows lie above others, or at most a margin below them, in a column or in "each".

    Rows pair by the fields that neither choice names. The margin is 0 if they must lie higher, else
    negative, in points or the name of a margin with its sign.
    """
    points, cases = in_points(margin), []
    for row, other in pairs(higher, lower):
        least = points * row.point - _EPSILON if points else _EPSILON
        for column in row.tasks if columns == "each" else [columns]:
            if column in row.values and column in other.values:
                gap = row.number(column) - other.number(column)
                against = f"against {other.method} {other.values[column]:g}"
                words = f"{row.label} {column} {row.values[column]:g} {against}"
                cases.append((gap >= least, gap, words))
    relation = f"at most {-points:.3g} points lower" if points else "higher"
    text = f"{{fit}} of {{all}} printed pairs are {relation}; "
    return _tallied(text + "differences from {low:+.2f} to {high:+.2f}.", cases)


def same(a: Where, b: Where, expect: bool = True, columns: Sequence[str] | None = None) -> Finding:
    """Check that rows are equal, number by number; ``expect: false`` asks that they are not."""
    differing, cells, changed = [], 0, 0
    rows = pairs(a, b)
    for row, other in rows:
        names = [name for name in (columns or row.values) if name in other.values]
        moved = [
            f"{n} {row.values[n]:g}→{other.values[n]:g}"
            for n in names
            if row.values[n] != other.values[n]
        ]
        cells, changed = cells + len(names), changed + len(moved)
        if moved:
            differing.append(f"{row.label}: {', '.join(moved)}")
    equal = len(rows) - len(differing)
    text = f"{equal} of {len(rows)} rows are equal; {changed} of {cells} numbers differ."
    return _in_print((not differing) == expect, listed(text, differing))


def grain(
    column: str,
    questions: Sequence[int],
    decimals: int = 1,
    scale: int = 100,
    besides: Sequence[str] = (),
) -> Finding:
    """Check that printed values are possible for one run, whose right answers are whole numbers.

    A right answer to one of n questions gives ``scale`` / n: 100 for percent, 1 for fractions. With
    several n, as of the categories of MME's points (which give 200/n besides, for both questions on
    an image), a sum is a multiple of the largest step that divides every ``scale`` / n. Methods
    ``besides`` are left out: their values are means over seeds.
    """
    common = math.lcm(*questions)
    step = Fraction(scale * math.gcd(*(common // n for n in questions)), common)
    rows = [r for r in find_rows({}) if column in r.values and r.method not in besides]
    impossible = []
    for row in rows:
        value = row.values[column]
        near = [float(step * (math.floor(value / step) + move)) for move in (0, 1)]
        if value not in {mode(x, decimals) for x in near for mode in (rounded, truncated)}:
            ends = " and ".join(f"{end:.6g}" for end in near)
            impossible.append(f"{row.label} {value:g} lies between {ends}")
    text = (
        f"{len(impossible)} of {len(rows)} printed {column} values are no multiple of {step}, "
        "rounded or truncated."
    )
    return _in_print(not impossible, listed(text, impossible))


def agreement(a: Where, b: Where, documents: int, margin: str) -> Finding:
    """Check that fractions agree: each difference's 95 % interval lies within a margin.

    It fails if one lies wholly outside; a difference that is not significant is no agreement. The
    intervals are those of two unpaired shares of as many documents.
    """
    differences, outcomes = [], []
    bound = in_points(margin)
    for row, other in pairs(a, b):
        for column, value in row.tasks.items():
            gap, p = 100 * (value - other.values[column]), (value + other.values[column]) / 2
            reach = 100 * BEYOND * math.sqrt(2 * p * (1 - p) / documents)
            verdict = Expectation.of({"within": bound}).judge(gap - reach, gap + reach)
            outcomes.append(Finding(verdict=verdict))
            differences.append((reach, f"{row.label} {column} {gap:+.0f} ± {reach:.0f}"))
    text = (
        f"With n = {documents} differences are known to {min(differences)[0]:.0f} points or worse; "
        f"asked within ±{bound:.3g}: {'; '.join(text for _, text in differences)}."
    )
    return Finding(verdict=weigh(outcomes), text=text)


def rising(where: Where, columns: str = AVERAGE) -> Finding:
    """Check that the values of each method do not fall as γ grows."""
    methods: dict[str, list[PrintedRow]] = {}
    for row in sorted(find_rows(where), key=lambda row: row.gamma or 0.0):
        methods.setdefault(row.method, []).append(row)
    cases = []
    for low, high in itertools.chain(*map(itertools.pairwise, methods.values())):
        for column in low.tasks if columns == "each" else [columns]:
            ends = " but ".join(
                f"{row.values[column]:g} ({gamma_suffix(row.gamma, 'γ=')})" for row in (low, high)
            )
            gap = high.number(column) - low.number(column)
            cases.append((gap >= -_EPSILON, gap, f"{low.method} {column} {ends}"))
    return _tallied("{fit} of {all} steps to a larger γ do not lower the value.", cases)


def workload() -> Finding:
    """Check that in Table 10 a heavier workload (batch × prompt) never has a smaller speedup."""
    points = []
    for row in find_rows({"table": 10}):
        # "batch 1K x prompt 2K"
        batch, prompt = (float(part.split()[-1][:-1]) for part in row.variant.split(" x "))
        points.append((batch * prompt, row.values["Speedup"], row.variant))
    cases = [
        (gain >= less, gain - less, f"{heavy} {gain:g}× below {light} {less:g}×")
        for (work, less, light), (more, gain, heavy) in itertools.combinations(sorted(points), 2)
        if work < more
    ]
    return _tallied("In {failed} of {all} pairs the heavier workload gains less.", cases)


def bars(path: Sequence[str | int], higher: int, lower: int, margin: float | str = 0.0) -> Finding:
    """Check that one series of a bar chart is nowhere more than ``-margin`` below another.

    ``path`` is a figure of groups of values, of which ``higher`` and ``lower`` are places; the
    margin is in points, or its name with a sign.
    """
    bound, cases = in_points(margin) - _EPSILON, []
    for name, values in figure(*path).items():
        if name not in ("source", "order"):
            gap = values[higher] - values[lower]
            cases.append((gap >= bound, gap, f"{name} {gap:+.1f}"))
    text = "{fit} of {all} groups fit; differences from {low:+.1f} to {high:+.1f}."
    return _tallied(text, cases)


def faster_when_tighter() -> Finding:
    """Check that every model and method of Figure 4 gains more the smaller γ is."""
    cases = []
    for model, methods in figure("fig4_layer_speedup").items():
        for method, speedups in methods.items() if model != "source" else ():
            by_gamma = [speedups[gamma] for gamma in sorted(speedups, key=float)]
            gain = min(tight - loose for tight, loose in itertools.pairwise(by_gamma))
            cases.append((gain > 0, gain, f"{model} {method}"))
    return _tallied("{fit} of {all} series rise as γ falls.", cases)


def check(arguments: Mapping[str, Any]) -> Finding:
    """Return what a printed fact says.

    Where the threshold or the reading is ours (``ours: true``), the paper does not contradict
    itself by falling short of it: what fails is then undecided.
    """
    rest = dict(arguments)
    name, ours = rest.pop("fact"), rest.pop("ours", False)
    result = FACTS[name](**rest)
    is_undecided = ours and result.verdict is Outcome.FAILS
    return result.model_copy(update={"verdict": Outcome.UNDECIDED}) if is_undecided else result


FACTS: Final[Mapping[str, Callable[..., Finding]]] = {
    fact.__name__: fact
    for fact in (
        *(relation, averages, difference, ranking, same, grain, agreement),
        *(rising, workload, bars, faster_when_tighter),
    )
}
"""Every fact that a claim can name."""
