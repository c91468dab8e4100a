"""For each claim: made records that refute it, and made records that support it."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from capmoe_eval.experiment.record import Record
from capmoe_eval.results.frames import results_of
from fabricate import trainings
from tests.records import layer, record_of

from capmoe_report.contrasts import Contrast
from capmoe_report.evidence import Evidence, Side
from capmoe_report.judge import Claim, judge, replication_claims
from capmoe_report.verdicts import JudgedClaim

CLAIMS = {claim.id: claim for claim in replication_claims()}
MODELS = ("zoo_a", "zoo_b", "zoo_c")
# So many that a document is worth less than every margin.
GOOD, BAD, MIDDLE = ([0.0] * wrong + [1.0] * (900 - wrong) for wrong in (0, 450, 150))
# From best to worst as the paper has it; what stands on no line is as good as its method.
ORDER = {
    "score": GOOD,
    "random": MIDDLE,
    "reverse_order": [0.0] * 300 + [1.0] * 600,
    "order": BAD,
    "expert_drop": BAD,
}


def made(side: Side, correct: list[float], model: str, **parts: Any) -> Record:
    method = side.routing(2, 1.5, 2)
    fields: dict[str, Any] = {"batch_size": side.batch_size} if side.batch_size else {}
    if side.max_num_batched_tokens:
        fields |= {"backend": "vllm", "max_num_batched_tokens": side.max_num_batched_tokens}
    answers: Any = correct
    if side.batches != "single":
        fields = {"task": "zero_shot_mix", "shuffle": 0}
        answers = {"piqa": correct}
    if side.task:
        fields["task"] = side.task
    return record_of(method, answers, model=model, parts=parts, **fields)


# What keeps a claim that is no list of independent contrasts, by side.
SUPPORT: dict[str, Callable[[Side], list[float]]] = {
    **dict.fromkeys(("a", "a2"), lambda side: ORDER[side.method]),
    "b": lambda side: BAD if side.gamma in (0.0, 0.25, 0.5) else GOOD,
    "l": lambda side: {"image_first": GOOD, None: MIDDLE, "text_first": BAD}[
        side.knobs.get("modality")
    ],
}


def supporting(claim: Claim) -> dict[Side, list[float]]:
    """Answers of every side: the first is right, the second wrong, or right where both are alike.

    Where the effect must be negative, it is the other way round.
    """
    answers: dict[Side, list[float]] = {}
    for contrast in claim.contrasts:
        up = contrast.expect.low != float("-inf")
        alike = contrast.expect.low < 0 < contrast.expect.high < float("inf")
        answers[contrast.first] = GOOD if up or alike else BAD
        answers.setdefault(contrast.second, BAD if up and not alike else GOOD)
    if claim.id in SUPPORT:
        return {side: SUPPORT[claim.id](side) for side in answers}
    if claim.id == "k":  # most records are of the deployment, as in results/zoo
        answers |= {Side(method=name, gamma=1.0): GOOD for name in ("score", "random")}
    return answers


def records(claim: Claim, hold: bool) -> Iterator[Record]:
    """Records that keep the contrasts of a claim; in shares dropped (d) it may fail."""
    # A knob without effect makes two sides one record; the first stands.
    paths = set()
    for side, model in itertools.product(answers := supporting(claim), MODELS):
        resolved = side.at(1.0) if side.gamma == "matched" else side
        dropped = {"score": 0.3, "expert_drop": 0.1 if hold else 0.5}.get(side.method, 0.0)
        record = made(resolved, answers[side], model, load={"drop_rate": dropped})
        if record.path not in paths:
            paths.add(record.path)
            yield record


def routers(hold: bool) -> Iterator[Record]:
    scores = [0.4, 0.2, 0.19, 0.18] if hold else [0.4, 0.3, 0.01, 0.01]
    for model in MODELS:
        yield made(Side(method="baseline"), GOOD, model, layers=[layer(scores=scores)])


def companies(hold: bool) -> Iterator[Record]:
    """Two compositions, and two sizes, of the batches; answers change under a capacity, or not."""
    for method in ("baseline", "order", "reverse_order", "random", "score", "expanded_drop"):
        routing = Side(method=method, gamma=None if method == "baseline" else 1.0)
        other = BAD if hold and method != "baseline" else GOOD
        batches: list[dict[str, Any]] = [{"shuffle": 0}, {"shuffle": 1}, {}, {"batch_size": 4}]
        for number, model in itertools.product(range(len(batches)), MODELS):
            answers = {"piqa": other if number % 2 else GOOD}
            fields = {"model": model, "task": "zero_shot_mix", **batches[number]}
            yield record_of(routing.routing(2, 1.5, 2), answers, **fields)


def texts(hold: bool) -> Iterator[Record]:
    """Half of the mean load with images first: few text pairs are dropped, or many."""
    image = {"tokens": 80, "dropped": 40, "added": 0, "lost_all": 0, "drop_rate": 0.5}
    text = image | {"tokens": 8, "drop_rate": 0.01 if hold else 0.2}
    for task in ("mmbench", "seedbench"):
        for method in ("score", "expanded_drop"):
            knobs = {"method": method, "gamma": 0.5, "modality": "image_first", "task": task}
            load = {"modalities": {"text": text, "image": image}}
            for model in MODELS:
                yield made(Side.model_validate(knobs), GOOD, model, load=load)


def judged(claim: Claim, records: Iterable[Record], hold: bool = False) -> JudgedClaim:
    peaks = [6.0, 6.1, 6.2], [2.0, 2.1, 2.2]
    material = Evidence(
        "zoo", results_of(records), trainings=trainings(*peaks[:: 1 if hold else -1])
    )
    (verdict,) = judge(material, [claim])
    return verdict


@pytest.mark.parametrize(
    ("name", "hold"), [*((name, True) for name in CLAIMS), *((name, False) for name in "dfgin")]
)
def test_made_records_support_a_claim_or_refute_what_it_counts(name: str, hold: bool) -> None:
    claim = CLAIMS[name]
    made = {"g": routers, "i": companies, "n": texts}.get(name, lambda hold: records(claim, hold))
    verdict = judged(claim, made(hold), hold)
    expected = "confirmed" if hold else "contradicted"
    assert verdict.verdict == expected
    (decided,) = (row for row in verdict.contrasts if row.label == verdict.decided_by)
    assert decided.verdict == expected


@pytest.mark.parametrize("name", [name for name in CLAIMS if CLAIMS[name].contrasts])
def test_every_contrast_can_contradict_its_claim(name: str) -> None:
    claim = CLAIMS[name]
    for contrast in claim.contrasts:
        check = {"measured": {"contrasts": [contrast]}}
        fields = {"id": "x", "place": "", "refuted_by": "It.", "beyond": claim.beyond}
        verdict = judged(Claim.model_validate(fields | {"check": check}), refuting(contrast))
        assert verdict.verdict == "contradicted", str(contrast)


def refuting(contrast: Contrast) -> Iterator[Record]:
    first, second = (GOOD, BAD) if contrast.expect.low == float("-inf") else (BAD, GOOD)
    for model in MODELS:
        for side, answers in ((contrast.first, first), (contrast.second, second)):
            yield made(side.at(1.0) if side.gamma == "matched" else side, answers, model)
