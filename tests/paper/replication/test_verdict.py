"""Contrasts on made-up records with answers that can be checked by hand."""

from __future__ import annotations

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.contrasts import Expectation
from capmoe_eval.paper.evidence import Evidence, Side
from capmoe_eval.paper.margins import margins
from capmoe_eval.paper.replication.claims import Claim, find, replication_claims, written_margins
from capmoe_eval.paper.verdicts import WORD, Finding
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from tests.records import layer, record_of

BASELINE, SCORE, ORDER = (
    Side(method="baseline"),
    Side(method="score", gamma=1.0),
    Side(method="order", gamma=1.0),
)


def claim_of(*pairs: tuple[Side, Side], expect: object = "greater") -> Claim:
    words = {"id": "x", "place": "Table 0", "statement": "Something.", "refuted_by": "Else."}
    contrasts = [{"a": a, "b": b, "expect": expect} for a, b in pairs]
    return Claim.model_validate(words | {"contrasts": contrasts})


CLAIM = claim_of((SCORE, ORDER))


def method(name: str, **knobs: object) -> Method:
    return create_method(name, None if name == "baseline" else 1.0, ep_size=8, **knobs)  # type: ignore[arg-type]


def findings(records: list[Record], claim: Claim) -> list[Finding]:
    return find(claim, Evidence("zoo", tuple(records)))


def only(records: list[Record], claim: Claim = CLAIM) -> Finding:
    (finding,) = findings(records, claim)
    return finding


def test_a_clear_difference_is_confirmed_and_its_opposite_contradicted() -> None:
    good, bad = [1.0] * 20, [0.0] * 12 + [1.0] * 8
    found = only([record_of(method("score"), good), record_of(method("order"), bad)])
    assert (WORD[found.outcome], found.effect, found.documents) == ("confirmed", 60.0, 20)
    assert found.p == pytest.approx(2 / 2**12)
    assert found.models == {"m": 60.0}
    found = only([record_of(method("score"), bad), record_of(method("order"), good)])
    assert (WORD[found.outcome], found.effect) == ("contradicted", -60.0)


def test_a_small_difference_is_not_shown() -> None:
    found = only(
        [record_of(method("score"), [1.0] * 20), record_of(method("order"), [0.0] * 2 + [1.0] * 18)]
    )
    assert (WORD[found.outcome], found.p) == ("not shown", 0.5)


def test_p_is_corrected_for_the_contrasts_of_the_claim() -> None:
    six = [
        record_of(method("score"), [1.0] * 20),
        record_of(method("order"), [0.0] * 6 + [1.0] * 14),
    ]
    assert only(six).p == pytest.approx(2 / 2**6)
    assert WORD[only(six).outcome] == "confirmed"
    claim = claim_of((SCORE, ORDER), (SCORE, BASELINE))
    both = findings([*six, record_of(method("baseline"), [1.0] * 20)], claim)
    assert both[0].p == pytest.approx(4 / 2**6)
    assert WORD[both[0].outcome] == "not shown"


def test_seeds_are_averaged_and_ranks_are_the_models_own() -> None:
    records = [
        record_of(method("score"), [1.0, 1.0]),
        record_of(method("random", seed=0), [1.0, 0.0]),
        record_of(method("random", seed=1), [0.0, 0.0]),
    ]
    claim = claim_of((SCORE, Side(method="random", gamma=1.0)))
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
    assert WORD[only(records[2:]).outcome] == "not measured"


@pytest.mark.parametrize(
    ("lost", "verdict"), [(0, "confirmed"), (200, "contradicted"), (11, "not shown")]
)
def test_a_margin_is_decided_by_the_interval(lost: int, verdict: str) -> None:
    """Of 1,000 documents: 0 lost is comparable, 20 % is not, 1.1 % may be."""
    claim = claim_of((SCORE, BASELINE), expect={"at_least": "-comparable"})
    found = only(
        [
            record_of(method("baseline"), [1.0] * 1000),
            record_of(method("score"), [0.0] * lost + [1.0] * (1000 - lost)),
        ],
        claim,
    )
    assert (WORD[found.outcome], found.p) == (verdict, None)


def test_mixed_batches_are_another_comparison() -> None:
    mix = {"task": "zero_shot_mix"}
    answers = {"openbookqa": [1.0, 1.0], "piqa": [1.0, 1.0, 1.0, 1.0]}
    worse = {"openbookqa": [0.0, 1.0], "piqa": [1.0, 1.0, 1.0, 1.0]}
    claim = claim_of(tuple(side.model_copy(update={"batches": "mixed"}) for side in (SCORE, ORDER)))
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


def test_every_claim_has_a_key_and_every_finding_a_label_of_its_own() -> None:
    claims = replication_claims()
    assert len({claim.id for claim in claims}) == len(claims)
    for claim in claims:
        labels = [str(contrast) for contrast in claim.contrasts]
        assert len(set(labels)) == len(labels)
        assert all(c.first.batches == c.second.batches for c in claim.contrasts)


def test_every_margin_is_one_of_the_table() -> None:
    """A bound is 0, or a margin that the report shows with its source."""
    named = {margin.id: margin for margin in written_margins()}
    assert named.keys() == margins().keys()
    for claim in replication_claims():
        for contrast in claim.contrasts:
            expect = contrast.expect
            assert expect == Expectation.of("greater") or claim.id in named[expect.margin].claims


def test_a_capacity_of_each_device_is_not_asked_of_models_with_one_expert_on_it() -> None:
    device = Side(method="score", gamma=1.0, granularity="device")
    records = [
        record_of(method("score", **knobs), correct, model=model, parts={"layers": [layers]})
        for model, layers in (("one", layer([4] * 8)), ("two", layer([4] * 16)))
        for knobs, correct in (({}, [0.0] * 12), ({"granularity": "device"}, [1.0] * 12))
    ]
    found = only(records, claim_of((device, SCORE)))
    assert found.models == {"two": 100.0}
    assert found.note == "left out, with one expert per device: one"


def test_the_matched_gamma_removes_the_share_nearest_to_expert_drops() -> None:
    matched = Side(method="score", gamma="matched")
    records = [
        record_of(
            create_method("score", gamma, ep_size=8),
            [right] * 12,
            parts={"load": {"drop_rate": drop}},
        )
        for gamma, drop, right in ((1.0, 0.30, 0.0), (2.0, 0.05, 1.0), (3.0, 0.0, 0.0))
    ]
    expert = record_of(
        create_method("expert_drop", ep_size=8), [0.0] * 12, parts={"load": {"drop_rate": 0.04}}
    )
    found = only([*records, expert], claim_of((matched, Side(method="expert_drop"))))
    assert found.effect == 100.0
    assert found.note == "the nearest shares are: m γ=2 drops 5.0%, Expert Drop 4.0%"
