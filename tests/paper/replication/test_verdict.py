"""Contrasts on made-up records with answers that can be checked by hand."""

from __future__ import annotations

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.replication.claims import CLAIMS, Claim, Contrast, Side
from capmoe_eval.paper.replication.records import SideRecords
from capmoe_eval.paper.replication.verdict import Finding, Judgement, judge, label
from capmoe_eval.routing.method import Method
from tests.records import record_of

BASELINE, SCORE, ORDER = Side("baseline"), Side("score", 1.0), Side("order", 1.0)
CLAIM = Claim("x", "Table 0", "Something.", (Contrast(SCORE, ORDER),))


def method(name: str, **knobs: object) -> Method:
    return Method(name, None if name == "baseline" else 1.0, ep_size=8, **knobs)  # type: ignore[arg-type]


def only(records: list[Record], claim: Claim = CLAIM) -> Finding:
    (finding,) = judge(SideRecords(records), claim)
    return finding


def test_a_clear_difference_is_confirmed_and_its_opposite_contradicted() -> None:
    good, bad = [1.0] * 20, [0.0] * 12 + [1.0] * 8
    found = only([record_of(method("score"), good), record_of(method("order"), bad)])
    assert (found.verdict, found.effect, found.documents) == ("confirmed", 60.0, 20)
    assert found.p == pytest.approx(2 / 2**12)
    assert found.models == {"m": 60.0}
    found = only([record_of(method("score"), bad), record_of(method("order"), good)])
    assert (found.verdict, found.effect) == ("contradicted", -60.0)


def test_a_small_difference_is_not_shown() -> None:
    found = only(
        [record_of(method("score"), [1.0] * 20), record_of(method("order"), [0.0] * 2 + [1.0] * 18)]
    )
    assert (found.verdict, found.p) == ("not shown", 0.5)


def test_p_is_corrected_for_the_contrasts_of_the_claim() -> None:
    six = [
        record_of(method("score"), [1.0] * 20),
        record_of(method("order"), [0.0] * 6 + [1.0] * 14),
    ]
    assert only(six).p == pytest.approx(2 / 2**6)
    assert only(six).verdict == "confirmed"
    claim = Claim("x", "", "", (Contrast(SCORE, ORDER), Contrast(SCORE, BASELINE)))
    both = judge(SideRecords([*six, record_of(method("baseline"), [1.0] * 20)]), claim)
    assert both[0].p == pytest.approx(4 / 2**6)
    assert both[0].verdict == "not shown"


def test_seeds_are_averaged_and_ranks_are_the_models_own() -> None:
    records = [
        record_of(method("score"), [1.0, 1.0]),
        record_of(method("random", seed=0), [1.0, 0.0]),
        record_of(method("random", seed=1), [0.0, 0.0]),
    ]
    claim = Claim("x", "", "", (Contrast(SCORE, Side("random", 1.0)),))
    assert only(records, claim).effect == 75.0


def test_models_are_averaged_before_documents_are_counted() -> None:
    records = [
        record_of(method(name), correct, model=model)
        for model, name, correct in (
            ("a", "score", [1.0, 1.0]),
            ("a", "order", [0.0, 1.0]),
            ("b", "score", [1.0, 1.0]),
            ("b", "order", [0.0, 0.0]),
        )
    ]
    found = only(records)
    assert (found.effect, found.documents) == (75.0, 2)
    assert found.models == {"a": 50.0, "b": 100.0}


def test_tasks_that_one_side_lacks_are_left_out() -> None:
    records = [
        record_of(method("score"), [1.0, 1.0], task="obqa"),
        record_of(method("order"), [1.0, 0.0], task="obqa"),
        record_of(method("score"), [1.0], task="rte"),
    ]
    assert only(records).effect == 50.0
    assert only(records[2:]).verdict == "not measured"


@pytest.mark.parametrize(
    ("lost", "verdict"), [(0, "confirmed"), (200, "contradicted"), (11, "not shown")]
)
def test_close_is_decided_by_the_interval(lost: int, verdict: str) -> None:
    """Of 1,000 documents: 0 lost is close, 20 % is not, 1.1 % may be."""
    claim = Claim("x", "", "", (Contrast(SCORE, BASELINE, "close"),))
    found = only(
        [
            record_of(method("baseline"), [1.0] * 1000),
            record_of(method("score"), [0.0] * lost + [1.0] * (1000 - lost)),
        ],
        claim,
    )
    assert (found.verdict, found.p) == (verdict, None)


def test_mixed_batches_are_another_comparison() -> None:
    mix = {"task": "zero_shot_mix"}
    answers = {"openbookqa": [1.0, 1.0], "piqa": [1.0, 1.0, 1.0, 1.0]}
    worse = {"openbookqa": [0.0, 1.0], "piqa": [1.0, 1.0, 1.0, 1.0]}
    claim = Claim("x", "", "", (Contrast(SCORE, ORDER, batches="mixed"),))
    records = [
        record_of(method("score"), answers, shuffle=0, **mix),
        record_of(method("order"), worse, shuffle=0, **mix),
        record_of(method("order"), answers, shuffle=None, **mix),  # lm-eval's batches: not mixed
        record_of(method("order"), [0.0]),
    ]
    assert only(records, claim).effect == 25.0


def test_other_documents_do_not_pair() -> None:
    with pytest.raises(
        UsageError, match=r"model=m, task=obqa: records do not pair \(other documents of obqa\)"
    ):
        only(
            [
                record_of(method("score"), [1.0], parts={"documents": "a"}),
                record_of(method("order"), [1.0], parts={"documents": "b"}),
            ]
        )


def test_scores_that_are_missing_do_not_pair_either() -> None:
    short = [record_of(method("score"), [1.0] * 3), record_of(method("order"), [1.0] * 4)]
    with pytest.raises(UsageError, match="3 and 4 scores for the same documents of obqa"):
        only(short)


def test_models_that_answered_other_documents_are_further_units() -> None:
    records = [
        record_of(method(name), correct, model=model, parts={"documents": model})
        for model, name, correct in (
            ("a", "score", [1.0, 1.0]),
            ("a", "order", [0.0, 1.0]),
            ("b", "score", [1.0]),
            ("b", "order", [1.0]),
        )
    ]
    found = only(records)
    assert found.documents == 3
    assert found.models == {"a": 50.0, "b": 0.0}


def test_a_model_of_one_rank_has_other_canonical_forms() -> None:
    """With one rank, local candidates are all experts, and one device drops nothing at γ=1."""
    one = {"candidates": "local"}
    sides = (Side("expanded_drop", 1.0, one), Side("score", 1.0, {"granularity": "device"}))
    claim = Claim("x", "", "", tuple(Contrast(side, ORDER) for side in sides))
    records = [
        record_of(Method("expanded_drop", 1.0, candidates="global"), [1.0, 1.0]),
        record_of(Method("baseline"), [1.0, 0.0]),
        record_of(Method("order", 1.0), [0.0, 0.0]),
    ]
    assert [finding.effect for finding in judge(SideRecords(records), claim)] == [100.0, 50.0]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["confirmed", "confirmed"], "confirmed"),
        (["confirmed", "not shown"], "partly"),
        (["confirmed", "contradicted"], "mixed"),
        (["not shown", "contradicted"], "mixed"),
        (["not shown", "not measured"], "not shown"),
        ([], "not measured"),
    ],
)
def test_a_claims_verdict(verdicts: list[str], expected: str) -> None:
    findings = tuple(Finding("", verdict) for verdict in verdicts)
    assert Judgement(CLAIM, findings).verdict == expected


def test_every_claim_has_a_key_and_every_contrast_a_label_of_its_own() -> None:
    assert len({claim.key for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        labels = [label(contrast) for contrast in claim.contrasts]
        assert len(set(labels)) == len(labels)
    assert label(Contrast(SCORE, BASELINE, "close")) == "score γ=1 ≥ baseline - 1"
