"""Measures of load and of company, by hand."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from capmoe_bench.timings import Bench
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.files import read_data
from capmoe_eval.results.frames import results_of
from capmoe_eval.routing.registry import create_method
from fabricate import trainings
from tests.records import layer, record_of

from capmoe_report.evidence import TRAININGS, Evidence, read_trainings
from capmoe_report.measures import Question, measure, noise_step, uniform_bound
from capmoe_report.verdicts import Finding, Outcome


def found_by(name: str, evidence: Evidence) -> list[Finding]:
    """What a measure finds, without its check."""
    return measure(name, evidence)[1:]


def test_trainings_are_those_of_the_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdicts on trained models, their training seeds included, are of them alone."""
    monkeypatch.chdir(tmp_path)
    assert read_trainings("zoo").empty
    TRAININGS.parent.mkdir()
    one = {"name": "mixtral", "origin": "scratch", "seed": 0, "steps": 9, "peaks": [3.0]}
    TRAININGS.write_text(json.dumps({"trainings": [one]}))
    assert [len(read_trainings(profile)) for profile in ("zoo", "tiny")] == [1, 0]
    for text in ('{"trainings": [{}]}', "{}", "["):
        TRAININGS.write_text(text)
        with pytest.raises(UsageError, match="not a whole file of trainings"):
            read_trainings("zoo")


def balance(*peaks: list[float], accuracy: Mapping[str, float] | None = None) -> Finding:
    material = Evidence("zoo", trainings=trainings(*peaks, accuracy))
    (finding,) = found_by("balance", material)
    return finding


@pytest.mark.parametrize(
    ("accuracy", "outcome"),
    [
        # Of 60 documents 37 are above a coin's chance (p = 0.046), 36 are not (p = 0.077).
        ({"boolq": 100 * 37 / 60}, Outcome.HOLDS),
        ({"boolq": 100 * 36 / 60}, Outcome.ABSENT),
        # Four answers: 25 % of the documents is chance there.
        ({"openbookqa": 40.0}, Outcome.HOLDS),
    ],
)
def test_trainings_at_chance_are_left_out(accuracy: Mapping[str, float], outcome: Outcome) -> None:
    finding = balance([4.0, 4.0], [2.0, 2.1], accuracy=accuracy)
    assert finding.verdict is outcome
    left_out = "4 trainings of mixtral are left out: not above chance"
    assert finding.note == (left_out if outcome is Outcome.ABSENT else "")


def test_balance_has_students_interval_over_seeds() -> None:
    finding = balance([4.0, 4.0, 4.3], [2.0, 2.1, 2.0])
    differences = [2.0, 1.9, 2.3]
    mean = sum(differences) / 3
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / 2)
    assert finding.effect == pytest.approx(mean)
    assert finding.low == pytest.approx(mean - 4.302652729749464 * deviation / math.sqrt(3))
    assert finding.verdict == Outcome.HOLDS
    assert finding.models["seed 2"] == pytest.approx(2.3)
    assert balance([2.0, 2.1, 2.0], [4.0, 4.0, 4.3]).verdict == Outcome.FAILS
    assert balance([2.0, 4.0, 3.0], [3.0, 3.0, 3.0]).verdict == Outcome.UNDECIDED


def noise(experts: int, spread: float, seed: int) -> list[float]:
    """Mean scores by rank of a router that knows nothing."""
    logits = np.random.default_rng(seed).normal(0, spread, (4000, experts))
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    means: list[float] = (-np.sort(-scores, axis=1)).mean(axis=0).tolist()
    return means


@pytest.mark.parametrize("top_k", [2, 4, 8])
@pytest.mark.parametrize("scores", [noise(16, 1.0, 1), noise(64, 2.0, 2), noise(16, 0.1, 3)])
def test_noise_is_no_flat_tail(scores: list[float], top_k: int) -> None:
    """``test_refutation.py`` has a flat tail, which is one, and a cliff, which refutes."""
    layers = [layer([8] * len(scores), scores=scores, top_k=top_k)]
    record = record_of(create_method("baseline"), [1.0], parts={"layers": layers})
    (finding,) = found_by("decay", Evidence("zoo", results_of([record])))
    assert finding.verdict is Outcome.UNDECIDED
    assert finding.effect == pytest.approx(1.0, abs=0.09)


def test_much_text_refutes_nothing_that_is_said_of_little() -> None:
    """A third of the tokens are text, of which a fifth is dropped; Figure 10 has a twentieth."""
    image = {"tokens": 80, "dropped": 40, "added": 0, "lost_all": 0, "drop_rate": 0.5}
    load = {"modalities": {"image": image, "text": image | {"tokens": 40, "drop_rate": 0.2}}}
    method = create_method("score", 0.5, modality="image_first")
    record = record_of(method, task="mmbench", parts={"load": load})
    first, *_ = found_by("text_kept", Evidence("zoo", results_of([record])))
    assert (first.verdict, first.effect) == (Outcome.UNDECIDED, pytest.approx(20))


def test_order_of_a_batch_is_judged_for_one_capacity_and_for_those_of_devices() -> None:
    """Shares of batches that begin with distinct tokens; the note has those that begin alike."""
    rows = [
        {"model": model, "method": "score", "ranks": ranks, "is_distinct": kind, "changed": share}
        for model in ("olmoe", "another")  # of which one has no records
        for ranks, kind, share in ((1, True, 0.0), (8, True, 0.08), (1, False, 0.145))
    ]
    rows.append(rows[0] | {"method": "order", "changed": 0.5})
    bench = Bench(Path(), evaluations={"permutation": {"permutations": rows}})
    results = results_of([record_of(create_method("baseline"), model="olmoe")])
    whole, split = found_by("permuted", Evidence("zoo", results, bench=bench))
    assert (whole.verdict, whole.models) == (Outcome.HOLDS, {"olmoe": 0.0})
    assert (split.verdict, split.models) == (Outcome.FAILS, {"olmoe": pytest.approx(8)})
    assert whole.records == split.records == ("permutation.json",)
    assert ("olmoe 14.5 %" in whole.note, split.note) == (True, "")


@pytest.mark.parametrize(("families", "is_conditional"), [(4, True), (5, False)])
def test_a_count_on_few_families_is_of_these_models(families: int, is_conditional: bool) -> None:
    records = [
        record_of(create_method(name, gamma), model=model, parts={"load": {"drop_rate": share}})
        for model in ("a", "a_s1", *"bcde"[: families - 1])
        for name, gamma, share in (("score", 2.0, 0.2), ("expert_drop", None, 0.1))
    ]
    (finding,) = found_by("removed", Evidence("zoo", results_of(records)))
    assert finding.verdict is Outcome.HOLDS
    assert len(finding.models) == families + 1  # two are training seeds of one family
    assert finding.conditional is is_conditional


def uniform_group(
    rng: np.random.Generator, experts: int, top_k: int, tokens: int
) -> dict[str, float]:
    """One capacity group of a router that chooses distinct experts, token by token."""
    loads = np.zeros(experts, int)
    for _ in range(tokens):
        loads[rng.choice(experts, top_k, replace=False)] += 1
    slots = math.ceil(tokens * top_k / experts)
    kept = sum(min(int(load), slots) for load in loads)
    mean = tokens * top_k / experts
    return {
        "pad_waste": 1 - kept / (slots * experts),
        "mean_peak_before": float(loads.max()) / mean,
    }


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(8, 2, 60), (32, 4, 60), (32, 2, 200)])
def test_a_uniform_router_exceeds_its_bound_rarely(experts: int, top_k: int, tokens: int) -> None:
    rng = np.random.default_rng(8)
    groups = [uniform_group(rng, experts, top_k, tokens) for _ in range(400)]
    for quantity in ("pad_waste", "mean_peak_before"):
        bound = uniform_bound(quantity, experts, top_k, tokens * top_k / experts)  # type: ignore[arg-type]
        beyond = np.mean([group[quantity] > bound for group in groups])
        # Three standard errors of 5 % of 400 are 3.3 %; loads are discrete, so fewer may be beyond.
        assert beyond <= 0.05 + 0.033
        at_least = np.mean([group[quantity] >= 0.95 * bound for group in groups])
        assert at_least > 0.05


def gate_step(rng: np.random.Generator, experts: int, top_k: int, spread: float) -> float:
    """The step behind the top-k over that of noise, of four layers with random linear gates."""
    steps, inside = [], []
    for _ in range(4):
        gate = rng.standard_normal((64, experts)) / 8
        logits = spread * rng.standard_normal((500, 64)) @ gate
        scores = np.exp(-np.sort(-logits, axis=1))
        mean = (scores / scores.sum(axis=1, keepdims=True)).mean(axis=0)
        steps.append(math.log(mean[top_k - 1] / mean[top_k]))
        inside.append(math.log(mean[0] / mean[top_k - 1]) / (top_k - 1))
    return float(np.mean(steps)) / noise_step(experts, top_k, round(float(np.mean(inside)), 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "top_k", "spread"), [(8, 2, 1.0), (32, 4, 1.0), (64, 8, 2.0), (60, 4, 0.5)]
)
def test_random_gates_are_hardly_ever_that_flat(experts: int, top_k: int, spread: float) -> None:
    (question,) = read_data("capmoe_report", "data/measures.yaml", dict[str, tuple[Question, ...]])[
        "decay"
    ]
    rng = np.random.default_rng(9)
    ratios = [gate_step(rng, experts, top_k, spread) for _ in range(100)]
    assert np.mean([ratio < question.below for ratio in ratios]) <= 0.05
    # The threshold is no lower than these simulations ask: nine tenths of that of before is.
    if experts == 64:
        assert np.mean([ratio < question.below + 0.04 for ratio in ratios]) > 0.05
