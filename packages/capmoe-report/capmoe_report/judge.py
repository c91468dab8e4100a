"""The claims of the paper, how they are checked, and the verdict on each.

``data/claims.yaml`` has every claim and number of the paper, ``data/replication.yaml`` those
that are tested on every model of a profile (``experiment=replicate``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Annotated, Any, Final, Literal

from capmoe_eval.experiment.files import read_data
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from capmoe_report import arithmetic, measures, speedup
from capmoe_report.contrasts import Contrast, judge_contrasts, read_contrasts
from capmoe_report.evidence import Evidence, not_paired
from capmoe_report.verdicts import (
    INCONSISTENT,
    ONLY_HERE,
    Finding,
    JudgedClaim,
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
_Results = Sequence[tuple[str, Sequence[Finding]]]
"""Of each check of a claim its kind, and its findings: first its own, then what it rests on."""


class Claim(BaseModel):
    """One claim or number of the paper."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str  # unique, short, fit for an anchor; of the replication, a letter
    place: str  # section, table or figure
    version: Literal["v1", "v2"] = "v2"  # arXiv, ICLR 2026
    section: str = ""  # the heading under which it is listed
    quote: Annotated[str, Field(max_length=199)] = ""  # the paper's own words
    kind: Kind = "effect"
    published: tuple[float | str, ...] = ()  # the value as it is stated, or those of a sentence
    unit: str = ""  # of the published values
    statement: str = ""  # the claim in our words
    refuted_by: str = ""  # the result that would contradict it, in one sentence
    # Tables print it or code does it, and the text does not say it; of the replication, how.
    beyond: bool | str = False
    note: str = ""  # what a reader should know besides
    checks: Annotated[
        tuple[Check, ...],
        BeforeValidator(lambda raw: raw if isinstance(raw, list) else [raw]),
        Field(alias="check", min_length=1),
    ]

    @cached_property
    def contrasts(self) -> tuple[Contrast, ...]:
        """The contrasts of its checks."""
        named = [check["measured"]["contrasts"] for check in self.checks if "measured" in check]
        return tuple(contrast for names in named for contrast in read_contrasts(names))

    @property
    def stated(self) -> str:
        """The published values with their unit; empty where there is none."""
        text = ", ".join(f"{v:g}" if isinstance(v, float) else v for v in self.published)
        space = " " if self.unit and self.unit not in "×%" else ""
        return f"{text}{space}{self.unit}"


@cache
def paper_claims() -> tuple[Claim, ...]:
    """Return every claim of the ledger, in the order of the paper."""
    return read_data(__package__, "data/claims.yaml", tuple[Claim, ...])


@cache
def replication_claims() -> tuple[Claim, ...]:
    """Return the claims of the replication, in order."""
    return read_data(__package__, "data/replication.yaml", tuple[Claim, ...])


_STATED: Final = {"id", "section", "place", "version", "quote", "statement", "refuted_by"}
"""What a judged claim repeats of its claim."""


def judge(evidence: Evidence, claims: Sequence[Claim]) -> tuple[JudgedClaim, ...]:
    """Return the verdict on every claim, with every finding behind it.

    A verdict has the words of docs/explanation/verdicts.md; its scope says of what it speaks, such
    as "at toy scale".
    """
    by_id = {claim.id: claim for claim in claims}
    judged = []
    for claim in claims:
        checks = tuple(
            (kind, tuple(_check(kind, arguments, claim, by_id, evidence)))
            for check in claim.checks
            for kind, arguments in check.items()
        )
        verdict, scope = conclude(claim, checks, evidence)
        decided = deciding([finding for _, (_, *rest) in _deciding(checks) for finding in rest])
        how = claim.beyond if isinstance(claim.beyond, str) else ""
        judged.append(
            JudgedClaim(
                **claim.model_dump(include=_STATED),
                published=claim.stated,
                beyond=bool(claim.beyond),
                verdict=verdict,
                scope=scope,
                decided_by="" if decided is None else decided.label,
                note=f"{how} {claim.note}".strip(),
                contrasts=tuple(finding for _, (_, *rest) in checks for finding in rest),
                checks=checks,
            )
        )
    return tuple(judged)


def _check(
    kind: str,
    arguments: Mapping[str, Any],
    claim: Claim,
    by_id: Mapping[str, Claim],
    evidence: Evidence,
) -> Sequence[Finding]:
    match kind, arguments:
        case "printed", fact:
            return [arithmetic.check(fact)]
        case "agree", {"with": other}:
            return [_agreement(claim, by_id[other])]
        case "measured", {"contrasts": contrasts}:
            return _measured(read_contrasts(contrasts), evidence)
        case "measure", {"name": name}:
            return measures.measure(name, evidence)
        case "load", question:
            return measures.load(question, evidence)
        case "invariant", {"name": name}:
            return measures.check_invariant(name, evidence)
        case "value", where:
            return measures.check_value(where, evidence)
        case "speedup", fact:
            timed = speedup.check(fact, evidence.bench)
            # Ours do not stand beside a published number.
            return timed[:1] if claim.kind == "number" else timed
        case "none", {"reason": reason}:
            return [Finding(verdict=Outcome.IMPOSSIBLE, text=reason)]
    raise LookupError(f"claim {claim.id}: no check {kind} with {arguments}")


def _agreement(claim: Claim, other: Claim) -> Finding:
    """Return whether two places of the paper state the same value of the same thing."""
    verdict = Outcome.HOLDS if claim.stated == other.stated else Outcome.FAILS
    first, second = (f"{each.version} {each.place}" for each in (claim, other))
    text = f"{first} states {claim.stated}, {second} {other.stated}."
    return Finding(verdict=verdict, text=text)


def _measured(contrasts: Sequence[Contrast], evidence: Evidence) -> list[Finding]:
    """Return what contrasts say of a claim: all must hold.

    A contrast that a claim of the replication has, too, is corrected as it is there.
    """
    judged: dict[Contrast, Finding] = {}
    for claim in replication_claims():
        if set(contrasts) & set(claim.contrasts) - judged.keys():
            effects = [contrast.effect(evidence) for contrast in claim.contrasts]
            of_claim = judge_contrasts(claim.contrasts, effects)
            judged = dict(zip(claim.contrasts, of_claim, strict=True)) | judged
    rest = [contrast for contrast in contrasts if contrast not in judged]
    of_rest = judge_contrasts(rest, [contrast.effect(evidence) for contrast in rest])
    judged |= zip(rest, of_rest, strict=True)
    findings, texts = [judged[contrast] for contrast in contrasts], []
    if missing := [finding.label for finding in findings if not finding.documents]:
        texts.append(f"No records of: {'; '.join(missing)}.")
    unpaired = [contrast.effect(evidence).unpaired.items() for contrast in contrasts]
    if reasons := dict.fromkeys(f"{m} {t} ({why})" for of in unpaired for (m, t), why in of):
        texts.append(f"Not paired and left out: {'; '.join(reasons)}.")
    return [Finding(verdict=weigh(findings), text=" ".join(texts)), *findings]


def check_pairs(claims: Sequence[Claim], evidence: Evidence) -> None:
    """Refuse records that do not pair, by a UsageError: a verdict on a part of them is none."""
    for contrast in (contrast for claim in claims for contrast in claim.contrasts):
        for (model, task), reason in contrast.effect(evidence).unpaired.items():
            raise not_paired(model, task, reason)


def _deciding(results: _Results) -> _Results:
    """Return the measured results that a verdict rests on; none if nothing was measured."""
    for kinds in _MEASURED:
        tested = [
            (kind, findings)
            for kind, findings in results
            if kind in kinds and findings[0].verdict is not Outcome.IMPOSSIBLE
        ]
        if _weigh(tested) is not Outcome.ABSENT:
            return tested
    return []


def _weigh(results: _Results) -> Outcome:
    return weigh(findings[0] for _, findings in results)


def conclude(claim: Claim, results: _Results, evidence: Evidence) -> tuple[str, str]:
    """Return the word and the scope that follow from the results of a claim's checks.

    What the paper's own numbers refute is inconsistent in print, whatever was measured. Else
    measurements and print decide together, by the one rule of
    :func:`capmoe_report.verdicts.weigh`. Timings speak of a direction at most. Without a
    measurement, arithmetic decides in print.
    """
    # Some facts name numbers and decide nothing.
    in_print = [
        (kind, findings)
        for kind, findings in results
        if kind in _PRINTED
        and not (kind == "printed" and findings[0].verdict is Outcome.IMPOSSIBLE)
    ]
    printed = _weigh(in_print)
    if printed is Outcome.FAILS:
        return INCONSISTENT, ""
    if measured := _deciding(results):
        outcome = _weigh([*measured, *in_print])
        findings = [finding for _, (_, *rest) in measured for finding in rest]
        if scope := next(filter(None, (check.scope for _, (check, *_) in measured)), ""):
            word, scope = _direction(claim, outcome, scope)
        else:
            # The page of the replication says once of which models it is.
            of = (
                ""
                if claim.refuted_by
                else SCOPES.get(evidence.profile, f"in profile {evidence.profile}")
            )
            here = ONLY_HERE if only_here(outcome, findings) else ""
            word, scope = outcome.value, ", ".join(filter(None, (of, here)))
        if claim.beyond and deciding(findings):
            scope = f"{scope} {_beyond_text(claim, findings, evidence)}".lstrip()
        return word, scope
    if printed is not Outcome.ABSENT:
        return printed.value, IN_PRINT
    is_absent = any(findings[0].verdict is Outcome.ABSENT for _, findings in results)
    return (Outcome.ABSENT if is_absent else Outcome.IMPOSSIBLE).value, ""


def _beyond_text(claim: Claim, findings: Sequence[Finding], evidence: Evidence) -> str:
    """Return the scope of a verdict on what the paper's text does not say, with its batches.

    They are those of the models' deployments; a contrast that names others says so itself. Where
    all contrasts do, no batches are named.
    """
    sides = [side for contrast in claim.contrasts for side in (contrast.first, contrast.second)]
    if sides and all(side.batch_size and "ep_size" in side.knobs for side in sides):
        return "(beyond the text)"
    models = {model for finding in findings for model in finding.models}
    deployed = [at for model, at in evidence.deployments.items() if model in models]
    sizes, ranks = (
        " or ".join(sorted({str(at[name]) for at in deployed}))
        for name in ("batch_size", "ep_size")
    )
    return f"(beyond the text, in batches of {sizes} on {ranks} ranks)"


def _direction(claim: Claim, outcome: Outcome, scope: str) -> tuple[str, str]:
    """Return the word and scope of timings on other machines, or of emulations.

    A number that the paper prints is neither confirmed nor contradicted by them, and an emulation,
    which leaves out more than it has, contradicts nothing.
    """
    if outcome is Outcome.FAILS and scope == speedup.EMULATED:
        return Outcome.UNDECIDED.value, "(the opposite, but emulated)"
    if claim.kind != "number":
        return outcome.value, scope
    order = {Outcome.HOLDS: "as stated", Outcome.FAILS: "the opposite"}
    return Outcome.UNDECIDED.value, f"(the order is {order.get(outcome, 'open')} {scope})"
