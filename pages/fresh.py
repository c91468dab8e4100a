"""Blocks on the fresh toys: the protocol's contrasts beside the exploratory ones.

The models have an unseen training seed and an unseen world. The numbers come from the records of
``results/fresh``, those of contrasts that name their documents from ``results/fresh_documents``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from statistics import fmean
from typing import Any, Final

from capmoe_report.effects import Effect, pooled
from capmoe_report.verdicts import Outcome

from pages import change, paragraph, table
from pages.effects import replication, verdicts_in
from pages.names import FAMILIES, card, evidence_in, exploratory
from pages.protocol import (
    NUMBERS,
    in_words,
    judged,
    numbers_of,
    planned,
    protocol,
)

_RESULTS: Final[str] = protocol()["runs"]["fresh"]["results"]


def effect_of(row: Mapping[str, Any]) -> Effect:
    """Return the effect of a primary contrast on the fresh models, by the rule ``worth``."""
    evidence = evidence_in("fresh", f"{_RESULTS}_documents" if "documents" in row else _RESULTS)
    pairs, *_ = evidence.pairs(row["contrast"].first, row["contrast"].second)
    return pooled(pairs, "answer")


@cache
def _judged() -> list[dict[str, Any]]:
    return judged("fresh", effect_of)


def _before(row: Mapping[str, Any]) -> Effect:
    """Return the effect of a primary contrast on the exploratory models."""
    return row["contrast"].effect(exploratory())


def verdicts() -> str:
    """Return the primary contrasts on the exploratory and on the fresh models, and the reading."""
    rows = []
    for row in _judged():
        effects = change(_before(row)), change(row["effect"])
        over_families = change(row["effect"], wide=True).partition(" ")[2] or "–"
        rows.append((*in_words(row), *effects, over_families, *numbers_of(row), row["verdict"]))
    head = ("claim", "primary contrast", "expected", "exploratory [95 %]", "fresh [95 %]")
    return table((*head, "over families", *NUMBERS, "verdict"), rows)


def summary() -> str:
    """Return how many primary contrasts have each verdict, in a sentence."""
    rows = [row for row in _judged() if "secondary" not in row]
    counts = Counter(row["verdict"] for row in rows)
    parts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in sorted(counts, reverse=True))
    wide = Counter(row["verdict"] for row in rows if _holds_over_families(row))
    return paragraph(
        f"Of the {counts.total()} primary contrasts of the claims, on five models that were "
        f"trained after the rules had been committed: {parts}, {wide['confirmed']} of these over "
        "families, too ([the confirmatory run](docs/explanation/fresh.md))."
    )


def _holds_over_families(row: Mapping[str, Any]) -> bool:
    """Return whether families, too, decide a contrast: secondary, so it is not corrected."""
    effect = row["effect"]
    depth = row["contrast"].expect.depth(effect.points or 0.0)
    return bool(effect.p(depth, wide=True) < protocol()["level"])


def readings() -> str:
    """Return what the protocol says of each exploratory verdict that was confirmed.

    It ends with the scope of the verdicts that were decided.
    """
    exploratory_verdicts = {claim.id: claim.verdict for claim in replication().claims}
    read: dict[str, list[str]] = {}
    for row in _judged():
        if exploratory_verdicts[row["claim"]] != Outcome.HOLDS:
            continue
        reading, name = "confirmed on fresh data", f"({row['claim']})"
        if row["verdict"] == Outcome.FAILS:
            reading = "withdrawn"
        elif row["verdict"] != Outcome.HOLDS:
            power = _power(row)
            reading = "not replicated" if power >= protocol()["power_wanted"] else "left open"
            name += f" (power {100 * power:.0f} %)"
        read.setdefault(reading, []).append(name)
    parts = "; ".join(f"{reading}: {', '.join(names)}" for reading, names in read.items())
    decided = [row for row in _judged() if row["verdict"] in ("confirmed", "contradicted")]
    scopes = [
        ", ".join(f"({row['claim']})" for row in decided if _holds_over_families(row) == is_wide)
        for is_wide in (True, False)
    ]
    return paragraph(
        f"Of the exploratory verdicts *confirmed* these are {parts}. Over families, too, "
        f"{scopes[0]} are decided (p < {protocol()['level']}, uncorrected); {scopes[1]} are on "
        "these models alone."
    )


def _power(row: Mapping[str, Any]) -> float:
    """Return the share of studies that decide: within a margin at 0, else at the old effect."""
    expected = row["contrast"].expect
    points = _before(row).points or 0.0 if expected.is_direction else 0.0
    return planned("fresh", row).cdf(expected.depth(points))


def claims() -> str:
    """Return the verdicts by the exploratory rules, on the exploratory and on the fresh models."""
    before = {claim.id: claim.verdict for claim in replication().claims}
    fresh = verdicts_in(_RESULTS).claims
    asked = [claim for claim in fresh if claim.id not in protocol()["not_asked"]]
    rows = [
        (f"({claim.id})", claim.statement, before[claim.id], claim.verdict)
        for claim in asked
        if claim.verdict != before[claim.id]
    ]
    same = len(asked) - len(rows)
    words = paragraph(f"{same} of {len(asked)} claims have the same verdict in both. The others:")
    return words + "\n" + table(("claim", "statement", "exploratory", "fresh"), rows)


def models() -> str:
    """Return what the fresh models answer on dev sets, and with all experts disabled."""
    rows = []
    for model in protocol()["runs"]["fresh"]["models"]:
        content = card(model)
        means = (fmean(content[key].values()) for key in ("accuracy", "accuracy_silent"))
        family_title = FAMILIES[model].partition(",")[0]
        rows.append([family_title, *(f"{mean:.0f}" for mean in means)])
    return table(("family", "all experts", "no expert"), rows)
