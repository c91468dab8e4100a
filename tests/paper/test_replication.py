"""The replication on made-up records: what it refuses, pairs, and writes besides the ledger."""

from __future__ import annotations

import math

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.claims.judge import Claim, check_pairs, replication_claims
from capmoe_eval.paper.contrasts import Expectation, judge_contrasts, margins, written_margins
from capmoe_eval.paper.evidence import Evidence, Side
from capmoe_eval.paper.replication import grouping
from capmoe_eval.paper.verdicts import Finding
from capmoe_eval.results.frames import results_of
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from tests.paper.fabricate import evidence, record
from tests.records import layer, record_of

BASELINE, SCORE, ORDER = (
    Side(method="baseline"),
    Side(method="score", gamma=1.0),
    Side(method="order", gamma=1.0),
)
MIX = {"task": "zero_shot_mix"}


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


def test_p_is_corrected_for_the_contrasts_of_the_claim() -> None:
    six = [
        record_of(method("score"), [1.0] * 20),
        record_of(method("order"), [0.0] * 6 + [1.0] * 14),
    ]
    alone = math.erfc(5 / math.sqrt(2 * 6))  # McNemar with its correction, 6 against 0
    assert only(six).p == pytest.approx(alone)
    claim = claim_of((SCORE, ORDER), (SCORE, BASELINE))
    both = findings([*six, record_of(method("baseline"), [1.0] * 20)], claim)
    assert both[0].p == pytest.approx(2 * alone)


def test_a_contrast_with_a_margin_says_what_its_test_can_detect() -> None:
    sides = (method("score"), [1.0] * 20), (method("order"), [1.0] * 19 + [0.0])
    records = [record_of(*side) for side in sides]
    for expect in ({"at_least": "-comparable"}, {"within": "comparable"}):
        # One document of twenty is worth 5 points.
        assert (only(records, claim_of((SCORE, ORDER), expect=expect)).detectable or 0.0) > 5, (
            expect
        )
    assert only(records).detectable is None


@pytest.mark.parametrize(
    ("documents", "numbers", "problem"),
    [
        ("ab", (1, 1), r"model=m, task=obqa: records do not pair \(other documents of obqa\)"),
        ("aa", (3, 4), "3 and 4 scores for the same documents of obqa"),
    ],
)
def test_other_documents_are_refused(
    documents: str, numbers: tuple[int, int], problem: str
) -> None:
    records = [
        record_of(method(name), [1.0] * number, parts={"documents": hashes})
        for name, hashes, number in zip(("score", "order"), documents, numbers, strict=True)
    ]
    with pytest.raises(UsageError, match=problem):
        only(records)


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


def test_a_capacity_of_each_device_is_not_asked_of_models_with_one_expert_on_it() -> None:
    device = Side(method="score", gamma=1.0, granularity="device")
    records = [
        record_of(method("score", **knobs), correct, model=model, parts={"layers": [layers]})
        for model, layers in (("one", layer([4] * 8)), ("two", layer([4] * 16)))
        for knobs, correct in (({}, [0.0] * 12), ({"granularity": "device"}, [1.0] * 12))
    ]
    finding = only(records, claim_of((device, SCORE)))
    assert finding.models == {"two": 100.0}
    assert finding.note == "left out, with one expert per device: one"


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


def test_every_claim_has_a_key_and_every_finding_a_label_of_its_own() -> None:
    claims = replication_claims()
    assert len({claim.id for claim in claims}) == len(claims)
    for claim in claims:
        labels = [str(contrast) for contrast in claim.contrasts]
        assert len(set(labels)) == len(labels)
        assert all(c.first.batches == c.second.batches for c in claim.contrasts)


def test_every_margin_is_one_of_the_table() -> None:
    """A bound is 0, or a margin that the report shows with its source."""
    named = {margin["id"]: margin for margin in written_margins(replication_claims())}
    assert named.keys() == margins().keys()
    for claim in replication_claims():
        for contrast in claim.contrasts:
            expect = contrast.expect
            assert expect == Expectation.of("greater") or claim.id in named[expect.margin]["claims"]


# Table 1's gaps by the number of sequences that share a capacity.

RIGHT = {"score": 9, "random": 6, "reverse_order": 5, "order": 3}


def answered(size: int | None = None) -> list[Record]:
    """Right answers of ten; where many sequences share a capacity, Score alone stands out."""
    rank = {"cell": {"batch_size": size or 16}} | ({"ep_size": 1} if size else {})
    right = RIGHT | ({"random": 3, "reverse_order": 3} if size else {})
    return [record(name, 1.0, [1] * n + [0] * (10 - n), **rank) for name, n in right.items()]


def test_gaps_are_found_for_each_number_of_sequences() -> None:
    printed, two, many = grouping(evidence(*answered(), *answered(64)))
    # Table 1 prints 41.6, 34.0, 36.2 and 36.0 on the one task of these records.
    assert printed.label == "Table 1, OLMoE: OBQA"
    assert [gap.effect for gap in printed.gaps] == [7.6, -2.2, 0.2]
    assert [gap.effect for gap in two.gaps] == pytest.approx([30, 10, 20])
    assert [gap.effect for gap in many.gaps] == pytest.approx([60, 0, 0])
    assert two.distance == pytest.approx((22.4 + 12.2 + 19.8) / 3, abs=0.01)
    assert many.distance == pytest.approx((52.4 + 2.2 + 0.2) / 3, abs=0.01)
    assert (printed.distance, two.sequences, many.sequences) == (None, 2, 64)
