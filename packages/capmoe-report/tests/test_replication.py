"""The replication on made-up records: what it refuses, pairs, and writes besides the ledger."""

from __future__ import annotations

from capmoe_eval.experiment.record import Record
from capmoe_eval.results.frames import results_of
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from tests.records import record_of

from capmoe_report.contrasts import judge_contrasts
from capmoe_report.evidence import Evidence, Side
from capmoe_report.judge import Claim, check_pairs
from capmoe_report.verdicts import Finding

SCORE, ORDER = (Side(method=name, gamma=1.0) for name in ("score", "order"))


def claim_of(*pairs: tuple[Side, Side], expect: object = "greater") -> Claim:
    contrasts = [{"a": a, "b": b, "expect": expect} for a, b in pairs]
    check = {"measured": {"contrasts": contrasts}}
    return Claim.model_validate({"id": "x", "place": "Table 0", "check": check})


def method(name: str, **knobs: object) -> Method:
    return create_method(name, None if name == "baseline" else 1.0, ep_size=8, **knobs)  # type: ignore[arg-type]


def findings(records: list[Record], claim: Claim) -> list[Finding]:
    material = Evidence("zoo", results_of(records))
    check_pairs([claim], material)
    return judge_contrasts(claim.contrasts, material)


CLAIM = claim_of((SCORE, ORDER))


def only(records: list[Record], claim: Claim = CLAIM) -> Finding:
    (finding,) = findings(records, claim)
    return finding


def test_a_model_of_one_rank_has_other_canonical_forms() -> None:
    """With one rank, local candidates are all experts, and one device drops nothing at γ=1."""
    sides = (
        Side(method="expanded_drop", gamma=1.0, candidates="local"),
        Side(method="score", gamma=1.0, granularity="device"),
    )
    claim = claim_of(*((side, ORDER) for side in sides))
    records = [
        record_of(create_method("expanded_drop", 1.0, candidates="global"), [1.0, 1.0]),
        record_of(create_method("baseline"), [1.0, 0.0]),
        record_of(create_method("order", 1.0), [0.0, 0.0]),
    ]
    assert [finding.effect for finding in findings(records, claim)] == [100.0, 50.0]


def test_the_matched_gamma_removes_the_share_nearest_to_expert_drops() -> None:
    rows = (
        ("score", 1.0, 0.30, 0.0),
        ("score", 2.0, 0.05, 1.0),
        ("score", 3.0, 0.0, 0.0),
        ("expert_drop", None, 0.04, 0.0),
    )
    records = [
        record_of(create_method(name, gamma, ep_size=8), [right] * 12, parts={"load": load})
        for name, gamma, drop, right in rows
        for load in [{"drop_rate": drop}]
    ]
    matched = Side(method="score", gamma="matched")
    finding = only(records, claim_of((matched, Side(method="expert_drop"))))
    assert finding.effect == 100.0
    assert finding.note == (
        "the nearest shares are: m γ=2 drops 5.0%, Expert Drop 4.0%; "
        "Expert Drop removes more on 0 of 1 models"
    )
