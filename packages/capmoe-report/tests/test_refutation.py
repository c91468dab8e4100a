"""For each claim: made records that refute it, and made records that support it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from capmoe_eval.experiment.record import Record
from capmoe_eval.results.frames import results_of
from tests.records import layer, record_of

from capmoe_report.contrasts import Contrast
from capmoe_report.evidence import Evidence, Side
from capmoe_report.judge import Claim, judge, replication_claims
from capmoe_report.trainings import SeedTraining

if TYPE_CHECKING:
    import pandas as pd

CLAIMS = {claim.id: claim for claim in replication_claims()}
MODELS = ("zoo_a", "zoo_b", "zoo_c")
HOME = {"ep_size": 2, "batch_size": 16, "gamma": 1.5}
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


def of_contrasts(claim: Claim, hold: bool) -> dict[tuple[Side, str], list[float]]:
    """Answers of every side: the first is right, and the second wrong where the claim holds.

    Where the claim says that both are alike, both are right where it holds.
    """
    answers: dict[tuple[Side, str], list[float]] = {}
    for contrast in claim.contrasts:
        up = (contrast.expect.low != float("-inf")) is hold
        alike = contrast.expect.low < 0 < contrast.expect.high < float("inf") and hold
        for model in MODELS:
            answers[contrast.first, model] = GOOD if up or alike else BAD
            answers.setdefault((contrast.second, model), BAD if up and not alike else GOOD)
    return answers


def records(claim: Claim, hold: bool) -> Iterator[Record]:
    if claim.id in ("a", "a2"):
        ranks = list(ORDER.values())
        chosen = ORDER if hold else dict(zip(ORDER, reversed(ranks), strict=True))
        sides = {s for c in claim.contrasts for s in (c.first, c.second)}
        found = {(side, m): chosen[side.method] for side in sides for m in MODELS}
    elif claim.id == "l":
        sides = {s for c in claim.contrasts for s in (c.first, c.second)}
        ranks = [GOOD, MIDDLE, BAD] if hold else [BAD, MIDDLE, GOOD]
        by = dict(zip(("image_first", None, "text_first"), ranks, strict=True))
        found = {(side, m): by[side.knobs.get("modality")] for side in sides for m in MODELS}
    elif claim.id == "b":
        fits = {2.0: GOOD, 2.5: GOOD, 3.0: GOOD, 0.0: BAD, 0.25: BAD, 0.5: BAD}
        swap = {id(GOOD): BAD, id(BAD): GOOD}
        found = {(Side(method="baseline"), m): GOOD for m in MODELS}
        for gamma, answers in fits.items():
            own = answers if hold else swap[id(answers)]
            found |= {(Side(method="score", gamma=gamma), m): own for m in MODELS}
    else:
        found = of_contrasts(claim, hold)
    # A knob without effect makes two sides one record; the first stands.
    seen = set()
    for (side, model), answers in found.items():
        resolved = side.model_copy(update={"gamma": 1.0}) if side.gamma == "matched" else side
        dropped = {"score": 0.3, "expert_drop": 0.1 if hold else 0.5}.get(side.method, 0.0)
        record = made(resolved, answers, model, load={"drop_rate": dropped})
        if record.path not in seen:
            seen.add(record.path)
            yield record


def trainings(hold: bool) -> tuple[SeedTraining, ...]:
    common: dict[str, Any] = {"name": "mixtral", "steps": 600, "accuracy": {"boolq": 90.0}}
    high, low = ("scratch", "upcycled") if hold else ("upcycled", "scratch")
    return tuple(
        SeedTraining(**common, origin=origin, seed=seed, peaks=(peak + seed / 10,))
        for origin, peak in ((high, 6.0), (low, 2.0))
        for seed in range(3)
    )


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


def judged(claim: Claim, records: Iterable[Record], hold: bool = False) -> pd.DataFrame:
    homes = dict.fromkeys(MODELS, HOME)
    material = Evidence("zoo", results_of(records), defaults=homes, trainings=trainings(hold))
    return judge(material, [claim])


@pytest.mark.parametrize("name", CLAIMS)
@pytest.mark.parametrize("hold", [True, False])
def test_data_made_to_support_or_refute_a_claim_do_so(name: str, hold: bool) -> None:
    claim = CLAIMS[name]
    made = {"g": routers, "i": companies, "n": texts}.get(name, lambda hold: records(claim, hold))
    rows = judged(claim, made(hold), hold)
    expected = "confirmed" if hold else "contradicted"
    assert rows["conclusion"][0] == expected
    assert (rows["verdict"][rows["decides"]] == expected).all()
    assert rows["decides"].sum() == 1


@pytest.mark.parametrize("name", [name for name in CLAIMS if CLAIMS[name].contrasts])
def test_one_contrast_that_fails_is_enough(name: str) -> None:
    """Every contrast of a claim can contradict it, whatever the others say."""
    claim = CLAIMS[name]
    for contrast in claim.contrasts:
        check = {"measured": {"contrasts": [contrast]}}
        fields = {"id": "x", "place": "", "refuted_by": "It.", "beyond": claim.beyond}
        rows = judged(Claim.model_validate(fields | {"check": check}), refuting(contrast))
        assert rows["conclusion"][0] == "contradicted", str(contrast)


def refuting(contrast: Contrast) -> Iterator[Record]:
    first, second = (GOOD, BAD) if contrast.expect.low == float("-inf") else (BAD, GOOD)
    for model in MODELS:
        for side, answers in ((contrast.first, first), (contrast.second, second)):
            yield made(side.at(1.0) if side.gamma == "matched" else side, answers, model)
