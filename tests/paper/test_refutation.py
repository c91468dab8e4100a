"""For each claim: made records that refute it, and made records that support it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.contrasts import Contrast
from capmoe_eval.paper.evidence import Evidence, ModelDefaults, Side
from capmoe_eval.paper.replication import ReplicationClaim, judged, replication_claims
from capmoe_eval.paper.trainings import SeedTraining
from capmoe_eval.paper.verdicts import WrittenClaim
from tests.records import layer, record_of

CLAIMS = {claim.id: claim for claim in replication_claims()}
MODELS = ("zoo_a", "zoo_b", "zoo_c")
HOME = ModelDefaults(ep_size=2, batch_size=16, gamma=1.5)
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
    method = side.routing(HOME, 2)
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


def of_contrasts(claim: ReplicationClaim, hold: bool) -> dict[tuple[Side, str], list[float]]:
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


def records(claim: ReplicationClaim, hold: bool) -> Iterator[Record]:
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
    """Two compositions of the batches; answers change under a capacity, or not."""
    for method in ("baseline", "order", "reverse_order", "random", "score", "expanded_drop"):
        for shuffle, answers in ((0, GOOD), (1, BAD if hold and method != "baseline" else GOOD)):
            routing = Side(method=method, gamma=None if method == "baseline" else 1.0)
            for model in MODELS:
                yield record_of(
                    routing.routing(HOME, 2),
                    {"piqa": answers},
                    model=model,
                    task="zero_shot_mix",
                    shuffle=shuffle,
                )


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


def verdict(claim: ReplicationClaim, hold: bool) -> WrittenClaim:
    material = {"g": routers, "i": companies, "n": texts}.get(
        claim.id, lambda hold: records(claim, hold)
    )
    evidence = Evidence(
        "zoo",
        tuple(material(hold)),
        defaults=dict.fromkeys(MODELS, HOME),
        trainings=trainings(hold),
    )
    return judged(claim, evidence)


@pytest.mark.parametrize("name", CLAIMS)
def test_data_made_to_support_a_claim_confirm_it(name: str) -> None:
    assert verdict(CLAIMS[name], True).verdict == "confirmed"


@pytest.mark.parametrize("name", CLAIMS)
def test_data_made_to_refute_a_claim_contradict_it(name: str) -> None:
    found = verdict(CLAIMS[name], False)
    assert found.verdict == "contradicted"
    by_label = {finding.label: finding.verdict for finding in found.contrasts}
    assert by_label[found.decided_by] == "contradicted"


@pytest.mark.parametrize("name", [name for name in CLAIMS if CLAIMS[name].contrasts])
def test_one_contrast_that_fails_is_enough(name: str) -> None:
    """Every contrast of a claim can contradict it, whatever the others say."""
    claim = CLAIMS[name]
    for contrast in claim.contrasts:
        alone = claim.model_copy(update={"contrasts": (contrast,), "measure": ""})
        assert refuting(alone, contrast).verdict == "contradicted", str(contrast)


def refuting(claim: ReplicationClaim, contrast: Contrast) -> WrittenClaim:
    first, second = (GOOD, BAD) if contrast.expect.low == float("-inf") else (BAD, GOOD)
    found = []
    for model in MODELS:
        for side, answers in ((contrast.first, first), (contrast.second, second)):
            own = side.model_copy(update={"gamma": 1.0}) if side.gamma == "matched" else side
            found.append(made(own, answers, model))
    evidence = Evidence("zoo", tuple(found), defaults=dict.fromkeys(MODELS, HOME))
    return judged(claim, evidence)


def test_every_claim_says_in_a_sentence_what_would_refute_it() -> None:
    for claim in CLAIMS.values():
        assert claim.refuted_by.endswith(".")
        assert len(claim.refuted_by) > 20
