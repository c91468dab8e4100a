"""The claims of ``data/claims.yaml``, how they are checked, and the verdict on each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from capmoe_eval.errors import field_problem
from capmoe_eval.experiment.data_file import read_yaml
from capmoe_eval.paper.claims import arithmetic, records, speedup
from capmoe_eval.paper.contrasts import Contrast, judge, read_contrasts
from capmoe_eval.paper.evidence import Evidence
from capmoe_eval.paper.measures import measured
from capmoe_eval.paper.replication import beyond_text, replication_claims
from capmoe_eval.paper.verdicts import (
    INCONSISTENT,
    NOT_MEASURED,
    NOT_SHOWN,
    NOT_TESTABLE,
    ONLY_HERE,
    WORD,
    CheckResult,
    Finding,
    Outcome,
    deciding,
    only_here,
    weigh,
)

SCOPES: Final[Mapping[str, str]] = {
    "paper": "on the paper's checkpoints",
    "zoo": "at toy scale",
    "tiny": "on untrained models",
}
"""The models that a measured verdict speaks of, by profile."""

# Records decide together; timings, of other machines or emulated, only where there are no records.
_MEASURED: Final = ({"value", "measured", "measure", "load", "invariant"}, {"speedup"})
# A part that cannot be tested keeps the rest from being confirmed.
_PRINTED: Final = ("printed", "agree", "none")

IN_PRINT: Final = "in print"
"""The scope of a verdict that the paper's own numbers decide, without any measurement."""


Kind = Literal["number", "effect", "reading", "setting", "definition"]
"""number: a value in the text; effect: what a method does; reading: what tables or figures are said
to show; setting: how something was run; definition: an equation, an algorithm or a rule."""

CheckKind = Literal[
    "printed", "agree", "measured", "measure", "load", "invariant", "value", "speedup", "none"
]
"""The kinds of checks; docs/explanation/verdicts.md defines them."""

Check = Annotated[dict[CheckKind, dict[str, Any]], Field(min_length=1, max_length=1)]
"""One way to check a claim: the arguments under their kind."""


class _ClaimPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StatedValue(_ClaimPart):
    """A value as the paper states it, or the several of one sentence."""

    values: tuple[float | str, ...]
    unit: str = ""

    def __str__(self) -> str:
        """Return the value with its unit."""
        text = ", ".join(f"{v:g}" if isinstance(v, float) else v for v in self.values)
        space = " " if self.unit and self.unit not in "×%" else ""
        return f"{text}{space}{self.unit}"


class PaperClaim(_ClaimPart):
    """One claim or number of the paper."""

    id: str  # unique, short, fit for an anchor
    version: Literal["v1", "v2"]  # arXiv, ICLR 2026
    section: str  # the heading under which it is listed
    place: str  # section, table or figure
    quote: Annotated[str, Field(min_length=1, max_length=199)]  # the paper's own words
    kind: Kind
    published: StatedValue | None = None
    beyond: bool = False  # tables print it or code does it, and the text does not say it
    note: str = ""  # what a reader should know besides
    checks: Annotated[
        tuple[Check, ...],
        BeforeValidator(lambda raw: raw if isinstance(raw, list) else [raw]),
        Field(alias="check", min_length=1),
    ]


@cache
def paper_claims() -> tuple[PaperClaim, ...]:
    """Return every claim of the ledger, in the order of the paper."""
    source = resources.files(__package__) / "data" / "claims.yaml"
    return read_claims(source.read_text(encoding="utf-8"))


def read_claims(text: str) -> tuple[PaperClaim, ...]:
    """Read claims from YAML; one that does not fit the schema is a ValueError that names it."""
    entries: dict[str, PaperClaim] = {}
    for raw in read_yaml(text):
        try:
            entry = PaperClaim.model_validate(raw)
        except ValidationError as error:
            raise ValueError(f"claim {raw.get('id')}: {field_problem(error)}") from error
        if entry.id in entries:
            raise ValueError(f"claims: an id is used twice: {entry.id}")
        entries[entry.id] = entry
    return tuple(entries.values())


@dataclass(frozen=True)
class ClaimVerdict:
    """The verdict of this suite on a claim."""

    entry: PaperClaim
    word: str  # one of :data:`capmoe_eval.paper.verdicts.WORDS`
    scope: str  # of what it speaks, such as "at toy scale"; empty where nothing was found
    results: tuple[CheckResult, ...]  # those of the entry's checks, in their order

    @property
    def label(self) -> str:
        """The word with its scope, as shown."""
        return f"{self.word} {self.scope}".strip()

    @property
    def decided_by(self) -> Finding | None:
        """The finding of ours that decided, or would have but for the paper's own numbers."""
        findings = [f for result in _deciding(self.results) for f in result.findings]
        return deciding(findings)


def ledger(entries: Sequence[PaperClaim], evidence: Evidence) -> list[ClaimVerdict]:
    """Return the verdict of every claim, in the same order, by the evidence of one profile.

    A check that cannot be read is a ValueError that names the claim.
    """
    by_id = {entry.id: entry for entry in entries}
    verdicts = []
    for entry in entries:
        try:
            results = [_check(check, entry, by_id, evidence) for check in entry.checks]
        except (ValueError, LookupError, TypeError) as error:
            problem = field_problem(error) if isinstance(error, ValidationError) else error
            raise ValueError(f"claim {entry.id}: {problem}") from error
        word, scope = conclude(entry, results, evidence.profile)
        findings = [finding for result in _deciding(results) for finding in result.findings]
        if entry.beyond and scope and findings:
            scope = f"{scope} {beyond_text(evidence, findings)}"
        verdicts.append(ClaimVerdict(entry, word, scope, tuple(results)))
    return verdicts


def _check(
    check: Check, entry: PaperClaim, by_id: Mapping[str, PaperClaim], evidence: Evidence
) -> CheckResult:
    match check:
        case {"printed": fact}:
            return arithmetic.check(fact)
        case {"agree": {"with": other}}:
            return _agreement(entry, by_id[other])
        case {"measured": {"contrasts": contrasts}}:
            return _measured(contrasts, evidence)
        case {"measure": {"name": name}}:
            return _measure(name, evidence)
        case {"load": question}:
            return records.check_load(question, evidence)
        case {"invariant": {"name": name}}:
            return records.check_invariant(name, evidence)
        case {"value": where}:
            return records.check_value(where, evidence)
        case {"speedup": fact}:
            timed = speedup.check(fact, evidence.bench)
            # Ours do not stand beside a published number.
            return dataclasses.replace(timed, findings=()) if entry.kind == "number" else timed
        case {"none": {"reason": reason}}:
            return CheckResult("none", Outcome.IMPOSSIBLE, reason)
    raise ValueError(f"an argument of the check is missing: {check}")


def _agreement(entry: PaperClaim, other: PaperClaim) -> CheckResult:
    """Return whether two places of the paper state the same value of the same thing."""
    outcome = Outcome.HOLDS if entry.published == other.published else Outcome.FAILS
    first, second = (f"{claim.version} {claim.place}" for claim in (entry, other))
    text = f"{first} states {entry.published}, {second} {other.published}."
    return CheckResult("agree", outcome, text)


def _judged(contrasts: Sequence[Contrast], evidence: Evidence) -> list[Finding]:
    """Return a finding for each contrast; one of the replication's has its finding there."""
    rest = list(contrasts)
    findings: dict[str, Finding] = {}
    for claim in replication_claims():
        if shared := [contrast for contrast in rest if contrast in claim.contrasts]:
            both = zip(claim.contrasts, judge(claim.contrasts, evidence), strict=True)
            findings |= {repr(c): finding for c, finding in both if c in shared}
            rest = [contrast for contrast in rest if contrast not in shared]
    findings |= zip(map(repr, rest), judge(rest, evidence), strict=True)
    return [findings[repr(contrast)] for contrast in contrasts]


def _measured(raw: Sequence[str | Mapping[str, Any]], evidence: Evidence) -> CheckResult:
    """Return what contrasts say of a claim: all must hold."""
    contrasts = read_contrasts(raw)
    findings = _judged(contrasts, evidence)
    present = [finding for finding in findings if finding.outcome is not Outcome.ABSENT]
    both = zip(contrasts, findings, strict=True)
    texts = [_sentence(contrast, finding) for contrast, finding in both if finding in present]
    if missing := [finding.label for finding in findings if finding not in present]:
        texts.append(f"{'no' if present else 'No'} records of: {'; '.join(missing)}")
    effects = [evidence.effect(c.first, c.second, c.model) for c in contrasts]
    unpaired = [effect.unpaired.items() for effect in effects]
    if reasons := dict.fromkeys(f"{m} {t} ({why})" for of in unpaired for (m, t), why in of):
        texts.append(f"Not paired and left out: {'; '.join(reasons)}")
    outcome = weigh([finding.outcome for finding in findings])
    return CheckResult("measured", outcome, f"{'. '.join(texts)}.", tuple(present))


def _measure(name: str, evidence: Evidence) -> CheckResult:
    """Return what a measure of the replication says of a claim."""
    findings, texts = measured(name, evidence), []
    for finding in findings:
        bounds = "" if finding.low is None else f" [{finding.low:+.2f}, {finding.high:+.2f}]"
        effect = finding.effect
        number = "" if effect is None else f"{effect:+.2f}{bounds} {finding.unit}; "
        note = f" ({finding.note})" if finding.note else ""
        texts.append(f"{finding.label}: {number}{finding.outcome.value}{note}")
    outcome = weigh([finding.outcome for finding in findings])
    present = tuple(finding for finding in findings if finding.effect is not None)
    return CheckResult("measure", outcome, f"{'. '.join(texts)}.", present)


def _sentence(contrast: Contrast, finding: Finding) -> str:
    p = "" if finding.p is None else f"p = {finding.p:.3g}, "
    wide = (
        "" if finding.wide is None else "over families [{:+.2f}, {:+.2f}], ".format(*finding.wide)
    )
    note = f" ({finding.note})" if finding.note else ""
    return (
        f"{finding.label}: {finding.effect:+.2f} points [{finding.low:+.2f}, {finding.high:+.2f}], "
        f"{wide}{p}{finding.documents:,} documents ({finding.compared}); "
        f"asked {contrast.expect}: {finding.outcome.value}{note}"
    )


def _deciding(results: Sequence[CheckResult]) -> list[CheckResult]:
    """Return the measured results that a verdict rests on; none if nothing was measured."""
    for sources in _MEASURED:
        tested = [r for r in results if r.source in sources and r.outcome is not Outcome.IMPOSSIBLE]
        if weigh([result.outcome for result in tested]) is not Outcome.ABSENT:
            return tested
    return []


def conclude(entry: PaperClaim, results: Sequence[CheckResult], profile: str) -> tuple[str, str]:
    """Return the word and the scope that follow from the results of an entry's checks.

    What the paper's own numbers refute is inconsistent in print, whatever was measured. Else
    measurements decide, by the one rule of :func:`capmoe_eval.paper.verdicts.weigh`. Timings speak
    of a direction at most. Without a measurement, arithmetic decides in print.
    """
    # Some facts name numbers and decide nothing.
    idle = [r for r in results if r.source == "printed" and r.outcome is Outcome.IMPOSSIBLE]
    printed = weigh([r.outcome for r in results if r.source in _PRINTED and r not in idle])
    if printed is Outcome.FAILS:
        return INCONSISTENT, ""
    measured = _deciding(results)
    if measured:
        outcome = weigh([result.outcome for result in measured])
        scopes = [result.scope for result in measured if result.scope]
        if scopes:
            return _direction(entry, outcome, scopes[0])
        scope = SCOPES.get(profile, f"in profile {profile}")
        here = only_here(outcome, [f for result in measured for f in result.findings])
        return WORD[outcome], f"{scope}, {ONLY_HERE}" if here else scope
    if printed is not Outcome.ABSENT:
        return WORD[printed], IN_PRINT
    if any(r.outcome is Outcome.ABSENT for r in results):
        return NOT_MEASURED, ""
    return NOT_TESTABLE, ""


def _direction(entry: PaperClaim, outcome: Outcome, scope: str) -> tuple[str, str]:
    """Return the word and scope of timings on other machines, or of emulations.

    A number that the paper prints is neither confirmed nor contradicted by them, and an emulation,
    which leaves out more than it has, contradicts nothing.
    """
    if outcome is Outcome.FAILS and scope == speedup.EMULATED:
        return NOT_SHOWN, "(the opposite, but emulated)"
    if entry.kind != "number":
        return WORD[outcome], scope
    order = {Outcome.HOLDS: "as stated", Outcome.FAILS: "the opposite"}
    return NOT_SHOWN, f"(the order is {order.get(outcome, 'open')} {scope})"
