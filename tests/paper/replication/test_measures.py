"""Measures of load and of company, by hand."""

from __future__ import annotations

import math
import statistics

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.paper.evidence import Evidence
from capmoe_eval.paper.replication.measures import balance, companions, decay, removed
from capmoe_eval.paper.verdicts import Outcome
from capmoe_eval.routing.method import Method
from tests.records import layer, record_of


def test_the_share_that_expert_drop_removes_is_held_against_token_drops() -> None:
    records = [
        record_of(Method("score", 1.0), [1.0], parts={"load": {"drop_rate": 0.3}}),
        record_of(Method("score", 1.0), [1.0], task="rte", parts={"load": {"drop_rate": 0.5}}),
        record_of(Method("expert_drop"), [1.0], parts={"load": {"drop_rate": 0.1}}),
        record_of(Method("expert_drop"), [1.0], task="rte", parts={"load": {"drop_rate": 0.1}}),
    ]
    one, *others = removed(Evidence("zoo", tuple(records)), [])
    assert (one.outcome, one.effect) == (Outcome.HOLDS, pytest.approx(30.0))
    assert [finding.outcome for finding in others] == [Outcome.ABSENT] * 2


def trainings(scratch: list[float], upcycled: list[float]) -> list[dict[str, object]]:
    return [
        {"name": "mixtral", "origin": origin, "seed": seed, "steps": 600, "peaks": [peak, peak + 2]}
        for origin, peaks in (("scratch", scratch), ("upcycled", upcycled))
        for seed, peak in enumerate(peaks)
    ]


def test_balance_has_students_interval_over_seeds() -> None:
    (found,) = balance(Evidence("zoo"), trainings([4.0, 4.0, 4.3], [2.0, 2.1, 2.0]))
    differences = [2.0, 1.9, 2.3]
    mean = sum(differences) / 3
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / 2)
    assert found.effect == pytest.approx(mean)
    assert found.low == pytest.approx(mean - 4.302652729749464 * deviation / math.sqrt(3))
    assert found.outcome == Outcome.HOLDS
    assert found.models["seed 2"] == pytest.approx(2.3)
    (found,) = balance(Evidence("zoo"), trainings([2.0, 2.1, 2.0], [4.0, 4.0, 4.3]))
    assert found.outcome == Outcome.FAILS
    (found,) = balance(Evidence("zoo"), trainings([2.0, 4.0, 3.0], [3.0, 3.0, 3.0]))
    assert found.outcome == Outcome.UNDECIDED


def test_nine_training_seeds_have_an_interval_too() -> None:
    """Eight degrees of freedom: t = 2.306."""
    scratch = [4.0, 4.1, 3.9, 4.2, 4.0, 4.3, 3.8, 4.0, 4.1]
    (found,) = balance(Evidence("zoo"), trainings(scratch, [2.0] * 9))
    deviation = statistics.stdev(scratch)
    assert found.outcome == Outcome.HOLDS
    assert found.low == pytest.approx(found.effect - 2.306004135 * deviation / 3)


def test_trainings_of_other_lengths_are_not_mixed() -> None:
    short = trainings([4.0, 4.0, 4.3], [2.0, 2.1, 2.0])
    long = [{**training, "steps": 900} for training in trainings([2.0, 2.1], [4.0, 4.0])]
    found = balance(Evidence("zoo"), [*short, *long])
    assert [finding.outcome for finding in found] == [Outcome.HOLDS, Outcome.FAILS]
    assert found[0].label.endswith("3 seeds of 600 steps")


def test_balance_needs_two_seeds() -> None:
    assert [f.outcome for f in balance(Evidence("zoo"), [])] == [Outcome.ABSENT]
    assert [f.outcome for f in balance(Evidence("zoo"), trainings([1.0], [2.0]))] == [
        Outcome.ABSENT
    ]


def test_flips_of_other_documents_are_not_counted() -> None:
    mix = {"task": "zero_shot_mix"}
    records = [
        record_of(Method("order", 1.0), {"piqa": [1.0, 0.0]}, shuffle=0, **mix),
        record_of(
            Method("order", 1.0), {"piqa": [1.0, 1.0]}, shuffle=1, parts={"documents": "x"}, **mix
        ),
    ]
    with pytest.raises(UsageError, match="task=piqa: records do not pair"):
        companions(Evidence("zoo", tuple(records)), [])


@pytest.mark.parametrize(
    ("scores", "outcome"),
    [([0.4, 0.2, 0.15, 0.1], Outcome.HOLDS), ([0.4, 0.3, 0.01], Outcome.FAILS)],
)
def test_decay_compares_the_step_behind_the_top_k_with_those_inside(
    scores: list[float], outcome: Outcome
) -> None:
    layers = [layer([8] * len(scores), scores=scores)]
    baseline = record_of(Method("baseline"), [1.0], parts={"layers": layers})
    (found,) = decay(Evidence("zoo", (baseline,)), [])
    assert found.outcome == outcome
    inside, behind = math.log(scores[0] / scores[1]), math.log(scores[1] / scores[2])
    assert found.effect == pytest.approx(inside - behind)
    assert f"m {scores[2] / scores[1]:.2f}" in found.note


def test_flips_are_counted_between_batches_of_the_same_documents() -> None:
    mix = {"task": "zero_shot_mix"}
    records = [
        record_of(Method("order", 1.0), {"piqa": [1.0, 0.0, 1.0, 1.0]}, shuffle=0, **mix),
        record_of(Method("order", 1.0), {"piqa": [1.0, 1.0, 1.0, 1.0]}, shuffle=1, **mix),
        record_of(Method("order", 1.0), {"piqa": [1.0, 0.0, 0.0, 1.0]}, shuffle=2, **mix),
        record_of(Method("order", 1.0), {"piqa": [0.0, 0.0, 0.0, 0.0]}, batch_size=4, **mix),
        record_of(Method("baseline"), {"piqa": [1.0, 1.0]}, shuffle=0, **mix),
        record_of(Method("baseline"), {"piqa": [1.0, 1.0]}, shuffle=1, **mix),
    ]
    baseline, order = companions(Evidence("zoo", tuple(records)), [])
    # Pairs of batches differ in 1, 1 and 2 of 4 documents.
    assert order.effect == pytest.approx(100 * (1 + 1 + 2) / 3 / 4)
    assert order.label == "order γ=1: more than 1 % of the answers change with the company"
    assert (order.outcome, baseline.outcome) == (Outcome.HOLDS, Outcome.HOLDS)
    assert baseline.effect == 0.0
