"""Rows that the paper prints, paired for a comparison."""

from __future__ import annotations

import itertools

from capmoe_eval.paper.printed import FIELDS, PrintedRow, Where, find_rows


def pairs(a: Where, b: Where) -> list[tuple[PrintedRow, PrintedRow]]:
    """Pair rows of two choices by the fields that neither fixes to one value.

    A row without a γ (Expert Drop, or the baseline beside any γ) pairs with every γ. If neither the
    rows of ``a`` nor those of ``b`` have exactly one partner each, that is a LookupError.
    """
    shared = [f for f in FIELDS if _is_open(a, f) and _is_open(b, f)]
    if {"Baseline", "Expert Drop"} & {str(a.get("method")), str(b.get("method"))}:
        shared = [f for f in shared if f not in ("gamma", "variant")]
    first, second = find_rows(a), find_rows(b)
    rows = [
        (row, other)
        for row, other in itertools.product(first, second)
        if all(getattr(row, f) == getattr(other, f) for f in shared)
    ]
    partners = [
        [sum(row is pair[side] for pair in rows) for row in both]
        for side, both in enumerate((first, second))
    ]
    if not any(set(counts) == {1} for counts in partners):
        row, count = next(x for x in zip(first, partners[0], strict=True) if x[1] != 1)
        raise LookupError(f"{row.label} has {count} partners among {dict(b)}")
    return rows


def _is_open(where: Where, name: str) -> bool:
    """Return True if a choice leaves several values of a field."""
    return isinstance(where.get(name), list) or (name not in where and name != "version")
