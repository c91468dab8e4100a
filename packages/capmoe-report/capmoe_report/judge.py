"""The claims of the paper, how they are checked, and the verdict on each.

``data/claims.yaml`` has every claim and number of the paper, ``data/replication.yaml`` those
that are tested on every model of a profile (``experiment=replicate``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from capmoe_eval.experiment.data_file import read_yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from capmoe_report import arithmetic, measures, speedup
from capmoe_report.contrasts import Contrast, judge_contrasts, read_contrasts
from capmoe_report.evidence import Evidence, not_paired
from capmoe_report.verdicts import (
    INCONSISTENT,
    ONLY_HERE,
    Finding,
    Outcome,
    deciding,
    only_here,
    weigh,
)

if TYPE_CHECKING:
    import pandas as pd

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


class StatedValue(BaseModel):
    """A value as the paper states it, or the several of one sentence."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    values: tuple[float | str, ...]
    unit: str = ""

    def __str__(self) -> str:
        """Return the value with its unit."""
        text = ", ".join(f"{v:g}" if isinstance(v, float) else v for v in self.values)
        space = " " if self.unit and self.unit not in "×%" else ""
        return f"{text}{space}{self.unit}"


class Claim(BaseModel):
    """One claim or number of the paper."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str  # unique, short, fit for an anchor; of the replication, a letter
    place: str  # section, table or figure
    version: Literal["v1", "v2"] = "v2"  # arXiv, ICLR 2026
    section: str = ""  # the heading under which it is listed
    quote: Annotated[str, Field(max_length=199)] = ""  # the paper's own words
    kind: Kind = "effect"
    published: StatedValue | None = None
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


def paper_claims() -> tuple[Claim, ...]:
    """Return every claim of the ledger, in the order of the paper."""
    return _claims("claims.yaml")


def replication_claims() -> tuple[Claim, ...]:
    """Return the claims of the replication, in order."""
    return _claims("replication.yaml")


@cache
def _claims(name: str) -> tuple[Claim, ...]:
    return read_claims((resources.files(__package__) / "data" / name).read_text(encoding="utf-8"))


def read_claims(text: str) -> tuple[Claim, ...]:
    """Read claims from YAML."""
    return TypeAdapter(tuple[Claim, ...]).validate_python(read_yaml(text))


COLUMNS: Final = ("claim", "conclusion", "of", "check", "decides", *Finding.model_fields)
"""The columns of :func:`judge`."""


def judge(evidence: Evidence, claims: Sequence[Claim]) -> pd.DataFrame:
    """Return the verdict on every claim, with every finding behind it: a row a finding.

    - ``claim``: its id; ``conclusion``: the verdict on it, as docs/explanation/verdicts.md has
      them; ``of``: of what that speaks, such as "at toy scale"
    - ``check``: the kind of the check that the finding is of
    - ``decides``: whether the finding decided, or would have but for the paper's own numbers
    - the fields of :class:`capmoe_report.verdicts.Finding`

    The first row of each check has no label: its verdict is the check's.
    """
    import pandas as pd

    by_id = {claim.id: claim for claim in claims}
    rows = []
    for claim in claims:
        results = [
            (kind, _check(kind, arguments, claim, by_id, evidence))
            for check in claim.checks
            for kind, arguments in check.items()
        ]
        word, scope = conclude(claim, results, evidence)
        decided = deciding([finding for _, (_, *rest) in _deciding(results) for finding in rest])
        rows += [
            (claim.id, word, scope, kind, finding is decided, *vars(finding).values())
            for kind, findings in results
            for finding in findings
        ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def of_claims(
    verdicts: pd.DataFrame, claims: Sequence[Claim]
) -> Iterator[tuple[Claim, pd.DataFrame]]:
    """Yield each claim with its rows of :func:`judge`."""
    rows = dict(list(verdicts.groupby("claim", sort=False)))
    yield from ((claim, rows[claim.id]) for claim in claims)


def findings_of(rows: pd.DataFrame) -> list[Finding]:
    """Return rows of :func:`judge` as findings."""
    fields = rows[list(Finding.model_fields)].astype(object)
    present = fields.where(fields.notna(), None)
    return [Finding.model_validate(row) for row in present.to_dict("records")]


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
    verdict = Outcome.HOLDS if claim.published == other.published else Outcome.FAILS
    first, second = (f"{each.version} {each.place}" for each in (claim, other))
    text = f"{first} states {claim.published}, {second} {other.published}."
    return Finding(verdict=verdict, text=text)


def _measured(contrasts: Sequence[Contrast], evidence: Evidence) -> list[Finding]:
    """Return what contrasts say of a claim: all must hold.

    A contrast that a claim of the replication has, too, is corrected as it is there.
    """
    judged: dict[Contrast, Finding] = {}
    for claim in replication_claims():
        if set(contrasts) & set(claim.contrasts) - judged.keys():
            of_claim = judge_contrasts(claim.contrasts, evidence)
            judged = dict(zip(claim.contrasts, of_claim, strict=True)) | judged
    rest = [contrast for contrast in contrasts if contrast not in judged]
    judged |= zip(rest, judge_contrasts(rest, evidence), strict=True)
    findings, texts = [judged[contrast] for contrast in contrasts], []
    if missing := [finding.label for finding in findings if not finding.documents]:
        texts.append(f"No records of: {'; '.join(missing)}.")
    effects = [evidence.effect(c.first, c.second, c.model) for c in contrasts]
    unpaired = [effect.unpaired.items() for effect in effects]
    if reasons := dict.fromkeys(f"{m} {t} ({why})" for of in unpaired for (m, t), why in of):
        texts.append(f"Not paired and left out: {'; '.join(reasons)}.")
    return [Finding(verdict=weigh(findings), text=" ".join(texts)), *findings]


def check_pairs(claims: Sequence[Claim], evidence: Evidence) -> None:
    """Refuse records that do not pair, by a UsageError: a verdict on a part of them is none."""
    for contrast in (contrast for claim in claims for contrast in claim.contrasts):
        effect = evidence.effect(contrast.first, contrast.second, contrast.model)
        for (model, task), reason in effect.unpaired.items():
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
    measurements decide, by the one rule of :func:`capmoe_report.verdicts.weigh`. Timings speak
    of a direction at most. Without a measurement, arithmetic decides in print.
    """
    # Some facts name numbers and decide nothing.
    printed = _weigh(
        [
            (kind, findings)
            for kind, findings in results
            if kind in _PRINTED
            and not (kind == "printed" and findings[0].verdict is Outcome.IMPOSSIBLE)
        ]
    )
    if printed is Outcome.FAILS:
        return INCONSISTENT, ""
    if measured := _deciding(results):
        outcome = _weigh(measured)
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
