"""From evidence to verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from capmoe_eval.names import gamma_suffix
from capmoe_eval.paired import Comparison, compare, holm
from capmoe_eval.pairing import pool
from capmoe_eval.replication.claims import MARGIN, Claim, Contrast, Side
from capmoe_eval.replication.evidence import Evidence

LEVEL: Final = 0.05
"""Family-wise error rate within a claim."""

CONFIRMED, CONTRADICTED = "confirmed", "contradicted"
PARTLY, MIXED, NOT_SHOWN, NOT_MEASURED = "partly", "mixed", "not shown", "not measured"


@dataclass(frozen=True)
class Finding:
    """What was found on one point of a claim.

    Attributes:
        label: What is compared.
        verdict: ``confirmed``, ``contradicted``, ``not shown`` or ``not measured``.
        unit: Unit of ``effect``: ``points`` of accuracy, or what a measure says.
        effect: The difference, over all models.
        low: Lower end of its 95 % confidence interval, or None where it is not a sample.
        high: Upper end.
        p: Two-sided p, corrected for the claim's number of contrasts; None without a test.
        models: The effect on each model by itself.
        documents: Documents that were compared; 0 for a measure.
        note: What one should know of it.
    """

    label: str
    verdict: str
    unit: str = "points"
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    models: Mapping[str, float] = field(default_factory=dict)
    documents: int = 0
    note: str = ""


@dataclass(frozen=True)
class Judgement:
    """A claim with what was found on it.

    Attributes:
        claim: The claim.
        findings: What was found, point by point.
    """

    claim: Claim
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> str:
        """The claim's verdict: what its points have in common."""
        verdicts = {f.verdict for f in self.findings} - {NOT_MEASURED}
        if not verdicts:
            return NOT_MEASURED
        if len(verdicts) == 1:
            return verdicts.pop()
        if CONTRADICTED in verdicts:
            return MIXED
        return PARTLY


def judge(evidence: Evidence, claim: Claim) -> tuple[Finding, ...]:
    """Return what the evidence says of a claim's contrasts; its measure is another matter.

    ``greater`` is decided by the p values of the claim's contrasts, corrected for their number;
    ``close`` by whether the confidence interval lies on one side of the margin.
    """
    found = [_compared(evidence, contrast) for contrast in claim.contrasts]
    pairs = list(zip(claim.contrasts, found, strict=True))
    tested = [one.comparison.p for c, one in pairs if one is not None and c.expect == "greater"]
    corrected = iter(holm(tested))
    findings = []
    for contrast, one in pairs:
        if one is None:
            findings.append(Finding(label(contrast), NOT_MEASURED))
        else:
            p = next(corrected) if contrast.expect == "greater" else None
            findings.append(_finding(contrast, one, p))
    return tuple(findings)


@dataclass(frozen=True)
class _Compared:
    comparison: Comparison
    models: Mapping[str, float]


def _compared(evidence: Evidence, contrast: Contrast) -> _Compared | None:
    """Compare a contrast's sides: documents are averaged over models, tasks count equally."""
    found = {
        model: pairs
        for model in evidence.models
        if (pairs := evidence.pairs(model, contrast.one, contrast.other, contrast.batches))
    }
    if not found:
        return None
    models = {
        model: 100 * float(np.mean([paired.differences.mean() for paired in pairs.values()]))
        for model, pairs in found.items()
    }
    points = {task: 100 * values for task, values in pool(found.values()).items()}
    return _Compared(compare(points), models)


def _finding(contrast: Contrast, compared: _Compared, p: float | None) -> Finding:
    found = compared.comparison
    if p is None:
        yes, no = found.low > -MARGIN, found.high < -MARGIN
    else:
        yes, no = (p < LEVEL and sign * found.effect > 0 for sign in (1, -1))
    return Finding(
        label=label(contrast),
        verdict=CONFIRMED if yes else CONTRADICTED if no else NOT_SHOWN,
        effect=found.effect,
        low=found.low,
        high=found.high,
        p=p,
        models=compared.models,
        documents=found.documents,
    )


def label(contrast: Contrast) -> str:
    """Return a contrast in a few words."""
    sign = {"greater": ">", "close": "≥"}[contrast.expect]
    margin = f" - {MARGIN:g}" if contrast.expect == "close" else ""
    mixed = ", mixed batches" if contrast.batches == "mixed" else ""
    return f"{_name(contrast.one)} {sign} {_name(contrast.other)}{margin}{mixed}"


def _name(side: Side) -> str:
    knobs = [
        key if value is True else str(value) if isinstance(value, str) else f"{key}={value}"
        for key, value in side.knobs.items()
        if value is not False
    ]
    return " ".join([side.name.replace("_", " ") + gamma_suffix(side.gamma), *knobs])
