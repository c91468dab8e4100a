"""Checks of the paper's sentences by arithmetic over its printed tables.

Every function is one fact that a claim can name (``printed: {fact: difference, …}``). It returns
its numbers with an outcome; nothing here was measured by this suite.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.paper.claims import drawn
from capmoe_eval.paper.contrasts import Expectation, in_points
from capmoe_eval.paper.printed import (
    AVERAGE,
    FIELDS,
    PrintedRow,
    Where,
    find_row,
    find_rows,
    pairs,
)
from capmoe_eval.paper.verdicts import (
    BEYOND,
    Finding,
    Outcome,
    in_print,
    listed,
    tallied,
    weigh,
)

# Printed decimals are exact; sums of binary fractions are not.
_EPSILON: Final = 1e-9


def rounded(value: float, decimals: int = 1) -> float:
    """Return ``value`` rounded half up, as print does."""
    return truncated(value + 0.5 / 10.0**decimals, decimals)


def truncated(value: float, decimals: int) -> float:
    """Return ``value`` cut off after ``decimals``."""
    scale = 10.0**decimals
    return math.floor(value * scale + _EPSILON) / scale


def averages(where: Where, decimals: int = 1) -> Finding:
    """Check that printed averages are the rounded means of their rows."""
    rows = [row for row in find_rows(where) if AVERAGE in row.values]
    wrong = []
    for row in rows:
        printed = row.values[AVERAGE]
        if rounded(row.mean, decimals) != printed:
            how = "truncated" if truncated(row.mean, decimals) == printed else "wrong"
            numbers = f"mean {row.mean:.3f}, printed {printed:.{decimals}f}"
            wrong.append(f"{row.label}: {numbers} ({how})")
    return tallied("{fit} of {all} averages are the rounded mean of their row.", wrong, len(rows))


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
    return in_print(bool(fits), text)


def nearest(stated: float, a: Where, b: Where) -> Finding:
    """Name the pairs of rows whose averages differ by the stated number; decides nothing."""
    gaps = [(row.model, row.mean - other.mean) for row, other in pairs(a, b)]
    fits = [f"{model} ({gap:.2f})" for model, gap in gaps if rounded(abs(gap)) == stated]
    return in_print(None, f"{stated:g} points fits {', '.join(fits) or 'no pair of rows'}.")


def ranking(
    higher: Where, lower: Where, columns: str = AVERAGE, margin: float | str = 0.0
) -> Finding:
    """Check that rows lie above others, or at most a margin below them, in a column or in "each".

    Rows pair by the fields that neither choice names. The margin is 0 if they must lie higher, else
    negative, in points or the name of a margin with its sign.
    """
    points = in_points(margin)
    failed, gaps = [], []
    for row, other in pairs(higher, lower):
        least = points * row.point - _EPSILON if points else _EPSILON
        for column in row.tasks if columns == "each" else [columns]:
            if column not in row.values or column not in other.values:
                continue
            gaps.append(row.number(column) - other.number(column))
            if gaps[-1] < least:
                against = f"against {other.method} {other.values[column]:g}"
                failed.append(f"{row.label} {column} {row.values[column]:g} {against}")
    relation = f"at most {-points:.3g} points lower" if points else "higher"
    text = (
        f"{{fit}} of {{all}} printed pairs are {relation}; differences from "
        f"{min(gaps):+.2f} to {max(gaps):+.2f}."
    )
    return tallied(text, failed, len(gaps))


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
    return in_print((not differing) == expect, listed(text, differing))


def best_against(of: Where, against: Where) -> Finding:
    """Check that the best of several rows has a higher mean than another row."""
    rows, other = find_rows(of), find_row(against)
    best = max(rows, key=lambda row: row.mean)
    gain = round(best.mean - other.mean, 9) + 0.0  # no negative zero
    text = (
        f"The best of {len(rows)} rows, {best.label}, has mean {best.mean:.3f}; {other.label} has "
        f"{other.mean:.3f}: {gain:+.3f} points. Printed averages: {best.values[AVERAGE]:g} and "
        f"{other.values[AVERAGE]:g}."
    )
    return in_print(gain > 0, text)


def grain(
    column: str, documents: int, decimals: int = 1, scale: float = 100, besides: Sequence[str] = ()
) -> Finding:
    """Check that printed values are possible for one run: a whole number of right answers.

    ``scale`` is 100 for percent, 1 for fractions; methods ``besides`` are left out: their values
    are means over seeds.
    """
    shares = [scale * right / documents for right in range(documents + 1)]
    round_, cut = ({mode(s, decimals) for s in shares} for mode in (rounded, truncated))
    rows = [r for r in find_rows({}) if column in r.values and r.method not in besides]
    values = [(row.values[column], f"{row.label} {row.values[column]:g}") for row in rows]
    impossible = [text for value, text in values if value not in round_ | cut]
    only_cut = [f"{text} (truncated)" for value, text in values if value in cut - round_]
    text = (
        f"{len(impossible)} of {len(rows)} printed {column} values are no k/{documents}, rounded "
        f"or truncated; {len(only_cut)} only truncated."
    )
    return in_print(not impossible, listed(text, impossible + only_cut))


def points(column: str, questions: Sequence[int]) -> Finding:
    """Check that the points of MME in a column of Table 4 are possible for one run.

    A category of n questions gives 100/n for each right answer and 200/n for each image with both
    right, so that a sum of categories is a multiple of the largest step that divides every 100/n.
    ``questions`` are the numbers n.
    """
    common = math.lcm(*questions)
    step = Fraction(math.gcd(*(100 * common // n for n in questions)), common)
    rows = find_rows({"table": 4})
    impossible = []
    for row in rows:
        value = row.values[column]
        near = [float(step * (math.floor(value / step) + move)) for move in (0, 1)]
        if value not in {mode(x, 1) for x in near for mode in (rounded, truncated)}:
            ends = " and ".join(f"{end:.3f}" for end in near)
            impossible.append(f"{row.label} {value:g} lies between {ends}")
    text = f"{len(impossible)} of {len(rows)} printed {column} values are no multiple of {step}."
    return in_print(not impossible, listed(text, impossible))


def questions(a: Where, b: Where, smallest: Mapping[str, int]) -> Finding:
    """Say how few questions of MME make a difference in points; decides nothing.

    A question is worth 300/n at most: 100/n itself, and 200/n if the other answer to its image is
    right. ``smallest`` has the questions n of the smallest category of each column.
    """
    first, second = find_row(a), find_row(b)
    texts = []
    for column, n in smallest.items():
        gap = first.values[column] - second.values[column]
        fewest = math.ceil(abs(gap) * n / 300 - _EPSILON)
        texts.append(
            f"{column} {gap:+.1f} points: {fewest} of the {n} questions of a category are enough"
        )
    return in_print(None, f"{first.label} against {second.label}: {'; '.join(texts)}.")


def columns(table: int, stated: Sequence[str]) -> Finding:
    """Check that a table has the columns that the text gives it."""
    printed = list(find_rows({"table": table})[0].tasks)
    text = f"Table {table} prints {', '.join(printed)}; the text says {', '.join(stated)}."
    return in_print(printed == list(stated), text)


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


def one_factor(a: Where, b: Where) -> Finding:
    """Check that two rows that are compared differ in one field only."""
    first, second = find_row(a), find_row(b)
    names = [f for f in FIELDS if getattr(first, f) != getattr(second, f)]
    changes = [f"{f} ({getattr(first, f)} against {getattr(second, f)})" for f in names]
    return in_print(len(names) <= 1, f"The rows differ in {' and '.join(changes)}.")


def rising(where: Where, columns: str = AVERAGE) -> Finding:
    """Check that the values of each method do not fall as γ grows."""
    methods: dict[str, list[PrintedRow]] = {}
    for row in sorted(find_rows(where), key=lambda row: row.gamma or 0.0):
        methods.setdefault(row.method, []).append(row)
    falls, steps = [], 0
    for low, high in itertools.chain(*map(itertools.pairwise, methods.values())):
        for column in low.tasks if columns == "each" else [columns]:
            steps += 1
            if high.number(column) < low.number(column) - _EPSILON:
                ends = [
                    f"{row.values[column]:g} ({gamma_suffix(row.gamma, 'γ=')})"
                    for row in (low, high)
                ]
                falls.append(f"{low.method} {column} {' but '.join(ends)}")
    return tallied("{fit} of {all} steps to a larger γ do not lower the value.", falls, steps)


def workload() -> Finding:
    """Check that in Table 10 a heavier workload (batch × prompt) never has a smaller speedup."""
    points = []
    for row in find_rows({"table": 10}):
        # "batch 1K x prompt 2K"
        batch, prompt = (float(part.split()[-1][:-1]) for part in row.variant.split(" x "))
        points.append((batch * prompt, row.values["Speedup"], row.variant))
    two = itertools.combinations(sorted(points), 2)
    ordered = [(light, heavy) for light, heavy in two if light[0] < heavy[0]]
    against = [
        f"{heavy} {gain:g}× below {light} {more:g}×"
        for (_, more, light), (_, gain, heavy) in ordered
        if gain < more
    ]
    text = f"In {len(against)} of {len(ordered)} pairs the heavier workload gains less."
    return in_print(not against, listed(text, against))


def check(arguments: Mapping[str, Any]) -> Finding:
    """Return what a printed fact says; ValueError or TypeError for another fact or argument.

    Where the threshold or the reading is ours (``ours: true``), the paper does not contradict
    itself by falling short of it: what fails is then undecided.
    """
    rest = dict(arguments)
    name, ours = rest.pop("fact", None), rest.pop("ours", False)
    if name not in FACTS:
        raise ValueError(f"printed: fact {name!r} is none of {', '.join(FACTS)}")
    result = FACTS[name](**rest)
    is_undecided = ours and result.verdict is Outcome.FAILS
    return result.model_copy(update={"verdict": Outcome.UNDECIDED}) if is_undecided else result


_FACTS: Final[Sequence[Callable[..., Finding]]] = (
    *(averages, difference, nearest, ranking, same, best_against, grain, points, questions),
    *(columns, agreement, one_factor, rising, workload, *drawn.FACTS),
)
FACTS: Final = {fact.__name__: fact for fact in _FACTS}
"""Every fact that a claim can name."""
