"""Blocks on the fresh toys: the protocol's contrasts beside the exploratory ones.

The models have an unseen training seed and an unseen world. The numbers come from the records of
``results/fresh``, those of contrasts that name their documents from ``results/fresh_documents``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from statistics import fmean
from typing import Any, Final

from capmoe_report.contrasts import Contrast
from capmoe_report.effects import Effect
from capmoe_report.evidence import Evidence, evidence_of
from capmoe_report.verdicts import Outcome, VerdictFile

from capmoe_eval.experiment.record import VERDICTS
from capmoe_eval.experiment.results import read_results
from pages import ROOT, paragraph, table
from pages.effects import replication
from pages.names import FAMILIES, card
from pages.protocol import (
    Judged,
    change,
    effect_of_pairs,
    exploratory,
    in_words,
    judged,
    pairs_of,
    planned,
    protocol,
)

_RESULTS: Final = ROOT / protocol()["runs"]["fresh"]["results"]


@cache
def _evidence(root: str) -> Evidence:
    return evidence_of("fresh", read_results(ROOT / root, []))


def effect_of(row: Mapping[str, Any], contrast: Contrast) -> Effect:
    """Return the effect of a primary contrast on the fresh models."""
    root = f"{_RESULTS}_documents" if "documents" in row else str(_RESULTS)
    return effect_of_pairs(pairs_of(_evidence(root), contrast.first, contrast.second))


@cache
def _judged() -> list[Judged]:
    return judged("fresh", effect_of)


@cache
def verdict_file() -> VerdictFile:
    """Return the verdicts on the fresh records by the rules of the exploratory ones."""
    return VerdictFile.model_validate_json((_RESULTS / VERDICTS).read_bytes())


def verdicts() -> str:
    """Return the primary contrasts on the exploratory and on the fresh models, and the reading."""
    rows = []
    for each in _judged():
        before = exploratory().effect(each.contrast.first, each.contrast.second)
        numbers = f"{each.effect.detectable:.2f}", f"{each.p:.2g}"
        effects = (change(before), change(each.effect))
        rows.append((*in_words(each.row, each.contrast), *effects, *numbers, each.verdict))
    head = ("claim", "primary contrast", "expected", "exploratory [95 %]", "fresh [95 %]")
    return table((*head, "decidable", "p", "verdict"), rows)


def readings() -> str:
    """Return what the protocol says of each exploratory verdict that was confirmed."""
    exploratory_verdicts = {claim.id: claim.verdict for claim in replication().claims}
    read: dict[str, list[str]] = {}
    for each in _judged():
        claim = each.row["claim"]
        if exploratory_verdicts[claim] != Outcome.HOLDS:
            continue
        reading, name = "confirmed on fresh data", f"({claim})"
        if each.verdict == Outcome.FAILS:
            reading = "withdrawn"
        elif each.verdict != Outcome.HOLDS:
            power = _power(each)
            reading = "not replicated" if power >= protocol()["power_wanted"] else "left open"
            name += f" (power {100 * power:.0f} %)"
        read.setdefault(reading, []).append(name)
    parts = "; ".join(f"{reading}: {', '.join(names)}" for reading, names in read.items())
    return paragraph(f"Of the exploratory verdicts *confirmed* these are {parts}.")


def _power(each: Judged) -> float:
    """Return the share of studies that decide: within a margin at 0, else at the old effect."""
    before = exploratory().effect(each.contrast.first, each.contrast.second).points or 0.0
    points = before if each.contrast.expect.is_direction else 0.0
    depth = each.contrast.expect.depth(points)
    return planned("fresh", each.row, each.contrast).power(depth)


def claims() -> str:
    """Return the verdicts by the exploratory rules, on the exploratory and on the fresh models."""
    before = {claim.id: claim.verdict for claim in replication().claims}
    asked = [c for c in verdict_file().claims if c.id not in protocol()["not_asked"]]
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
