"""Measures of load and of company, by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from capmoe_bench.timings import Bench
from capmoe_eval.results.frames import results_of
from capmoe_eval.routing.registry import create_method
from tests.records import layer, record_of

from capmoe_report.evidence import Evidence
from capmoe_report.measures import measure
from capmoe_report.trainings import SeedTraining
from capmoe_report.verdicts import Finding, Outcome


def found_by(name: str, evidence: Evidence) -> list[Finding]:
    """What a measure finds, without its check."""
    return measure(name, evidence)[1:]


def trainings(scratch: list[float], upcycled: list[float]) -> list[dict[str, object]]:
    return [
        {
            "name": "mixtral",
            "origin": origin,
            "seed": seed,
            "steps": 600,
            "peaks": [peak, peak + 2],
            "accuracy": {"boolq": 90.0},
        }
        for origin, peaks in (("scratch", scratch), ("upcycled", upcycled))
        for seed, peak in enumerate(peaks)
    ]


def trained(trainings: list[dict[str, object]]) -> Evidence:
    return Evidence("zoo", trainings=tuple(map(SeedTraining.model_validate, trainings)))


def test_trainings_at_chance_count_for_nothing() -> None:
    """Of 60 documents 37 are above a coin's chance (p = 0.046), 36 are not (p = 0.077)."""
    known, guessing = trainings([4.0, 4.0, 4.3], [2.0, 2.1, 2.0]), []
    for right, asked in ((37, known), (36, guessing)):
        accuracy = {"boolq": 100 * right / 60}
        asked[:] = [t | {"accuracy": accuracy} for t in trainings([4.0, 4.0], [2.0, 2.1])]
    (found,) = found_by("balance", trained(known))
    assert found.verdict is Outcome.HOLDS
    (found,) = found_by("balance", trained(guessing))
    assert (found.verdict, found.effect) == (Outcome.ABSENT, None)
    assert found.note == "4 trainings of mixtral are left out: not above chance"
    # Four answers: 25 % of the documents is chance there.
    (found,) = found_by("balance", trained([t | {"accuracy": {"openbookqa": 40.0}} for t in known]))
    assert found.verdict is Outcome.HOLDS


def test_balance_has_students_interval_over_seeds() -> None:
    (found,) = found_by("balance", trained(trainings([4.0, 4.0, 4.3], [2.0, 2.1, 2.0])))
    differences = [2.0, 1.9, 2.3]
    mean = sum(differences) / 3
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / 2)
    assert found.effect == pytest.approx(mean)
    assert found.low == pytest.approx(mean - 4.302652729749464 * deviation / math.sqrt(3))
    assert found.verdict == Outcome.HOLDS
    assert found.models["seed 2"] == pytest.approx(2.3)
    (found,) = found_by("balance", trained(trainings([2.0, 2.1, 2.0], [4.0, 4.0, 4.3])))
    assert found.verdict == Outcome.FAILS
    (found,) = found_by("balance", trained(trainings([2.0, 4.0, 3.0], [3.0, 3.0, 3.0])))
    assert found.verdict == Outcome.UNDECIDED


def routers(scores: list[float], top_k: int = 2) -> Evidence:
    layers = [layer([8] * len(scores), scores=scores, top_k=top_k)]
    record = record_of(create_method("baseline"), [1.0], parts={"layers": layers})
    return Evidence("zoo", results_of([record]))


def noise(experts: int, spread: float, seed: int) -> list[float]:
    """Mean scores by rank of a router that knows nothing."""
    logits = np.random.default_rng(seed).normal(0, spread, (4000, experts))
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    means: list[float] = (-np.sort(-scores, axis=1)).mean(axis=0).tolist()
    return means


@pytest.mark.parametrize(
    ("scores", "outcome"),
    [
        ([0.4, 0.2, 0.19, 0.18], Outcome.HOLDS),  # flat behind the top-k
        ([0.4, 0.3, 0.01, 0.01], Outcome.FAILS),  # a cliff
        (noise(16, 1.0, 1), Outcome.UNDECIDED),
        (noise(64, 2.0, 2), Outcome.UNDECIDED),
        (noise(16, 0.1, 3), Outcome.UNDECIDED),
    ],
)
def test_neither_a_cliff_nor_noise_is_a_flat_tail(scores: list[float], outcome: Outcome) -> None:
    for top_k in (2,) if len(scores) == 4 else (2, 4, 8):
        (found,) = found_by("decay", routers(scores, top_k))
        assert found.verdict == outcome
        if outcome is Outcome.UNDECIDED:
            assert found.effect == pytest.approx(1.0, abs=0.09)


def test_flips_are_counted_between_batches_of_the_same_documents() -> None:
    mix = {"task": "zero_shot_mix"}
    records = [
        record_of(create_method("order", 1.0), {"piqa": [1.0, 0.0, 1.0, 1.0]}, shuffle=0, **mix),
        record_of(create_method("order", 1.0), {"piqa": [1.0, 1.0, 1.0, 1.0]}, shuffle=1, **mix),
        record_of(create_method("order", 1.0), {"piqa": [1.0, 0.0, 0.0, 1.0]}, shuffle=2, **mix),
        record_of(create_method("order", 1.0), {"piqa": [0.0, 0.0, 0.0, 0.0]}, batch_size=4, **mix),
        record_of(create_method("baseline"), {"piqa": [1.0, 1.0]}, shuffle=0, **mix),
        record_of(create_method("baseline"), {"piqa": [1.0, 1.0]}, shuffle=1, **mix),
    ]
    baseline, order, *others = found_by("companions", Evidence("zoo", results_of(records)))
    assert {finding.verdict for finding in others} == {Outcome.ABSENT}
    # Pairs of batches differ in 1, 1 and 2 of 4 documents.
    assert order.effect == pytest.approx(100 * (1 + 1 + 2) / 3 / 4)
    assert order.label == "order γ=1: more than 1 % of the answers change with the company"
    assert (order.verdict, baseline.verdict) == (Outcome.HOLDS, Outcome.HOLDS)
    assert baseline.effect == 0.0


def test_much_text_refutes_nothing_that_is_said_of_little() -> None:
    """A third of the tokens are text, of which a fifth is dropped; Figure 10 has a twentieth."""
    image = {"tokens": 80, "dropped": 40, "added": 0, "lost_all": 0, "drop_rate": 0.5}
    load = {"modalities": {"image": image, "text": image | {"tokens": 40, "drop_rate": 0.2}}}
    method = create_method("score", 0.5, modality="image_first")
    record = record_of(method, task="mmbench", parts={"load": load})
    first, *_ = found_by("text_kept", Evidence("zoo", results_of([record])))
    assert (first.verdict, first.effect) == (Outcome.UNDECIDED, pytest.approx(20))


def permutations(whole: float, split: float, tied: float) -> Evidence:
    """One capacity of the batch, one of each device, and the first with equal scores."""
    kinds = [("score", 1, True, whole), ("score", 8, True, split), ("score", 1, False, tied)]
    rows = [
        {
            "model": model,
            "method": method,
            "ranks": ranks,
            "is_distinct": is_distinct,
            "changed": changed,
        }
        for model in ("olmoe", "another")
        for method, ranks, is_distinct, changed in [*kinds, ("order", 1, True, 0.5)]
    ]
    bench = Bench(Path(), evaluations={"permutation": {"permutations": rows}})
    records = (record_of(create_method("baseline"), model="olmoe"),)
    return Evidence("zoo", results_of(records), bench=bench)


@pytest.mark.parametrize(
    ("whole", "split", "outcomes"),
    [
        (0.0, 0.01, [Outcome.HOLDS, Outcome.HOLDS]),
        (0.0, 0.08, [Outcome.HOLDS, Outcome.FAILS]),
        (0.02, 0.0, [Outcome.FAILS, Outcome.HOLDS]),
    ],
)
def test_order_of_a_batch_is_judged_for_one_capacity_and_for_those_of_devices(
    whole: float, split: float, outcomes: list[Outcome]
) -> None:
    findings = found_by("permuted", permutations(whole, split, 0.145))
    assert {finding.records for finding in findings} == {("permutation.json",)}
    assert [finding.verdict for finding in findings] == outcomes
    assert [finding.models for finding in findings] == [
        {"olmoe": 100 * whole},
        {"olmoe": pytest.approx(100 * split)},
    ]
    assert "olmoe 14.5 %" in findings[0].note
    assert findings[1].note == ""


@pytest.mark.parametrize(("families", "is_conditional"), [(4, True), (5, False)])
def test_a_count_on_few_families_speaks_of_these_models(
    families: int, is_conditional: bool
) -> None:
    records = [
        record_of(create_method(name, gamma), model=model, parts={"load": {"drop_rate": share}})
        for model in ("a", "a_s1", *"bcde"[: families - 1])
        for name, gamma, share in (("score", 2.0, 0.2), ("expert_drop", None, 0.1))
    ]
    home = {"ep_size": 1, "batch_size": 16, "gamma": 2.0}
    homes = {record.model: home for record in records}
    evidence = Evidence("zoo", results_of(records), defaults=homes)
    (finding,) = found_by("removed", evidence)
    assert finding.verdict is Outcome.HOLDS
    assert len(finding.models) == families + 1  # two are training seeds of one family
    assert finding.conditional is is_conditional
