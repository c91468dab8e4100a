"""Every order of two rows that a table of the paper prints is judged by an entry of the ledger."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

from capmoe_eval.paper.printed import PrintedRow, find_row, find_rows

from capmoe_report.judge import Claim, paper_claims
from capmoe_report.rows import pairs

Kind = tuple[int, str, str]
"""A table, and what its two rows are: sorted, or a method whose γ differs."""

IN_PRINT = {
    (6, "Baseline", "Expanded Drop"): "100 documents each, and no difference that is judged",
    (6, "Baseline", "Token Drop"): "100 documents each, and no difference that is judged",
    (10, "Token Drop", "workload"): "speedups on GPUs",
}
"""Orders that are judged by the paper's own numbers alone, and the reason."""
NOT_JUDGED = {
    (6, "Expanded Drop", "Token Drop"): "one point of 100 documents in the mean, of either sign",
}


def differing(first: PrintedRow, second: PrintedRow) -> list[str]:
    """Return the fields in which two rows of one table and model differ.

    The baseline stands beside any γ and variant. Variants of Table 11 are two fields.
    """
    names = [name for name in ("method", "gamma") if getattr(first, name) != getattr(second, name)]
    if "Baseline" in (first.method, second.method):
        return ["method"]
    parts = (row.variant.split(", ") for row in (first, second))
    return names + ["variant" for a, b in itertools.zip_longest(*parts) if a != b]


def kind(first: PrintedRow, second: PrintedRow) -> Kind:
    if first.table == 10:
        return 10, "Token Drop", "workload"
    names = differing(first, second)
    if names == ["gamma"]:
        return first.table, first.method, "γ"
    field = "method" if names == ["method"] else "variant"
    low, high = sorted((str(getattr(first, field)), str(getattr(second, field))))
    return first.table, low, high


def is_ordered(first: PrintedRow, second: PrintedRow) -> bool:
    """Return whether the mean of the rows differs, or every column in one direction."""
    shared = [name for name in ("Avg.", "Overall") if name in first.values] or list(first.tasks)
    signs = {first.values[name] > second.values[name] for name in shared}
    equal = all(first.values[name] == second.values[name] for name in shared)
    return not equal and len(signs) == 1


def printed() -> dict[Kind, list[frozenset[str]]]:
    """Return the ordered pairs of rows of every table, by kind."""
    kinds: dict[Kind, list[frozenset[str]]] = {}
    for first, second in itertools.combinations(find_rows({}), 2):
        alike = (first.table, first.model) == (second.table, second.model)
        is_one = alike and len(differing(first, second)) == 1
        if (is_one or (alike and first.table == 10)) and is_ordered(first, second):
            kinds.setdefault(kind(first, second), []).append(named(first, second))
    return kinds


def named(first: PrintedRow, second: PrintedRow) -> frozenset[str]:
    return frozenset(f"{row.label} {row.variant}" for row in (first, second))


def compared(fact: dict[str, Any]) -> Iterator[frozenset[str]]:
    """Yield the pairs of rows that a check in print compares."""
    match fact:
        case {"fact": "ranking", "higher": a, "lower": b} | {"fact": "agreement", "a": a, "b": b}:
            yield from (named(*pair) for pair in pairs(a, b))
        case {"fact": "difference", "a": a, "b": b}:
            yield named(find_row(a), find_row(b))
        case {"fact": "rising", "where": where}:
            rows = find_rows(where)
            yield from (named(*pair) for pair in itertools.combinations(rows, 2))
        case {"fact": "workload"}:
            yield from (
                named(*pair) for pair in itertools.combinations(find_rows({"table": 10}), 2)
            )


@cache
def compared_by_claim() -> list[tuple[Claim, set[frozenset[str]]]]:
    facts = [
        (claim, check.get("printed", {})) for claim in paper_claims() for check in claim.checks
    ]
    return [(claim, set(compared(fact))) for claim, fact in facts]


def entries_of(pair: frozenset[str]) -> list[Claim]:
    return [claim for claim, of in compared_by_claim() if pair in of]


def test_every_printed_order_is_judged_and_measured_where_it_can_be() -> None:
    kinds = printed()
    assert len(kinds) > 25
    assert (4, "Expanded Drop", "Token Drop") in kinds
    judged = {each: [entries_of(pair) for pair in of] for each, of in kinds.items()}
    # Every pair of rows, not one of its kind.
    assert {each for each, of in judged.items() if not all(of)} == NOT_JUDGED.keys()
    measured = {
        each
        for each, of in judged.items()
        if any("measured" in check for claims in of for claim in claims for check in claim.checks)
    }
    assert kinds.keys() - measured == IN_PRINT.keys() | NOT_JUDGED.keys()
