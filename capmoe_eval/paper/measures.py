"""Tests of claims by load statistics, training seeds and changed answers."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from capmoe_eval.experiment.names import is_stock
from capmoe_eval.paper.contrasts import Expectation
from capmoe_eval.paper.effects import documents
from capmoe_eval.paper.evidence import Batches, Evidence, Side, Training, not_paired
from capmoe_eval.paper.pairing import Unpaired, pair
from capmoe_eval.paper.printed import figure
from capmoe_eval.paper.statistics import binomial_tail
from capmoe_eval.paper.verdicts import LEVEL, Finding, Outcome, unanimous

CHANGED: Final = 1.0
"""Percent of the answers that must change, in the mean over pairs of batches, for dependence."""


def removed(evidence: Evidence) -> list[Finding]:
    """Ask if Expert Drop removes fewer of the router's choices than Token Drop at its own γ."""
    token, expert = Side(method="score", gamma="own"), Side(method="expert_drop")
    found = {model: evidence.dropped((token, expert), model) for model in evidence.models}
    shares = {model: 100 * (both[0] - both[1]) for model, both in found.items() if both}
    outcome = unanimous([share > 0 for share in shares.values()])
    label = "share removed: score own γ − expert drop"
    return [_by_model(label, "% of assignments", shares, outcome)]


def balance(evidence: Evidence) -> list[Finding]:
    """Compare trainings from scratch with upcycled ones of equal seeds (Figures 1, 2, 13).

    A training counts if its model answers better than chance does (:func:`_knows`).
    """
    studies: dict[tuple[str, int], list[Training]] = {}
    for training in evidence.trainings:
        studies.setdefault((training.name, training.steps), []).append(training)
    findings = []
    for (name, steps), trainings in studies.items():
        known = [training for training in trainings if _knows(training)]
        peaks = {(one.origin, one.seed): statistics.fmean(one.peaks) for one in known}
        gaps = {
            f"seed {seed}": peaks[origin, seed] - peaks["upcycled", seed]
            for origin, seed in sorted(peaks)
            if origin == "scratch" and ("upcycled", seed) in peaks
        }
        left_out = len(trainings) - len(known)
        note = f"{left_out} trainings of {name} are left out: not above chance" if left_out else ""
        label = f"{name}: peak load from scratch − upcycled, {len(gaps)} seeds of {steps} steps"
        findings.append(_by_seed(label, gaps, note))
    absent = Finding("peak load from scratch − upcycled", Outcome.ABSENT, unit="points")
    return findings or [absent]


_COIN: Final = ("piqa", "rte", "winogrande", "boolq")
"""Tasks of two answers; all others have four."""


def _knows(training: Training) -> bool:
    """Return True if the answers to all tasks together are better than chance (binomial, p < 5 %).

    A training whose accuracy is not known counts for nothing.
    """
    accuracy, asked = training.accuracy, training.documents
    if not accuracy:
        return False
    right = sum(round(percent / 100 * asked) for percent in accuracy.values())
    chance = statistics.fmean(0.5 if task in _COIN else 0.25 for task in accuracy)
    return binomial_tail(right, asked * len(accuracy), chance) < LEVEL


def decay(evidence: Evidence) -> list[Finding]:
    """Ask if gate scores fall gently behind the top-k, and not as a random router's (Figure 8).

    The step from rank K to K+1, as the logarithm of the scores' ratio, fails where it is larger
    than the mean step inside the top-k. Noise has no such cliff either, so it holds only where the
    step is also smaller than :data:`FLATTER` of that of Gaussian router logits whose scores fall as
    fast inside the top-k.
    """
    ratios, outcomes, notes = {}, [], []
    for model in evidence.models:
        steps, inside, sizes = [], [], (0, 0)
        for record in itertools.chain(*evidence.find(Side(method="baseline"), model).values()):
            for layer in record.layers:
                scores, k = layer.score_by_rank, layer.top_k
                if scores and k > 1 and scores[k] > 0:
                    sizes = layer.n_experts, k
                    steps.append(math.log(scores[k - 1] / scores[k]))
                    inside.append(math.log(scores[0] / scores[k - 1]) / (k - 1))
        if steps:
            step, fall = statistics.fmean(steps), statistics.fmean(inside)
            noise = noise_step(*sizes, max(fall, 1e-3))
            ratios[model] = step / noise
            gentle = Outcome.HOLDS if step < FLATTER * noise else Outcome.UNDECIDED
            outcomes.append(gentle if step < fall else Outcome.FAILS)
            notes.append(f"{model} {math.exp(-step):.2f}, noise {math.exp(-noise):.2f}")
    note = f"score of rank K+1 over that of rank K: {', '.join(notes)}" if notes else ""
    label = f"step from rank K to K+1, over that of noise; asked below {FLATTER:g}"
    outcome = outcomes[0] if len(set(outcomes)) == 1 else Outcome.MIXED
    return [_by_model(label, "× noise", ratios, outcome, note)]


FLATTER: Final = 0.9
"""Share of the noise's step below which a tail is flatter than noise."""


@cache
def noise_step(experts: int, top_k: int, fall: float) -> float:
    """Return the step behind the top-k of a router whose logits are Gaussian noise, seeded.

    The noise's spread is that with which the mean step inside the top-k is ``fall``.
    """
    import numpy as np

    logits = np.random.default_rng(20260103).standard_normal((4096, experts))  # of as many tokens
    ranked = -np.sort(-logits, axis=1)
    below = ranked - ranked[:, :1]

    def steps(spread: float) -> tuple[float, float]:
        scores = np.exp(spread * below)
        shares = scores[:, [0, top_k - 1, top_k]] / scores.sum(axis=1, keepdims=True)
        first, last, behind = shares.mean(axis=0)
        return math.log(first / last) / (top_k - 1), math.log(last / behind)

    low, high = 0.0, 50.0  # the step inside grows with the spread; scipy.optimize imports slowly
    while high - low > 1e-6:
        spread = (low + high) / 2
        low, high = (spread, high) if steps(spread)[0] < fall else (low, spread)
    return steps(high)[1]


TEXT_LOST: Final = 5.0
"""Percent of the text pairs that may be dropped where almost all are said to stay."""


def text_kept(evidence: Evidence) -> list[Finding]:
    """Ask if text pairs stay at γ = 0.5 where images are dropped first (Appendix C).

    The paper says so of queries of which text is a small part. It fails only where text is no
    larger a part than in Figure 10.
    """
    small = sum(figure("fig10_text_pixels_pm0.03")) / sum(figure("fig10_total_pixels_pm0.03"))
    findings = []
    for task, method in itertools.product(("mmbench", "seedbench"), ("score", "expanded_drop")):
        knobs = {"method": method, "gamma": 0.5, "task": task, "modality": "image_first"}
        side, dropped, shares = Side.model_validate(knobs), {}, {}
        for model in evidence.models:
            for record in evidence.find(side, model).get(task, []):
                by = record.load.modalities or {}
                if by.keys() >= {"text", "image"}:
                    dropped[model] = 100 * by["text"].drop_rate
                    shares[model] = by["text"].tokens / sum(part.tokens for part in by.values())
        outcome = unanimous([lost <= TEXT_LOST for lost in dropped.values()])
        if outcome is not Outcome.HOLDS and any(share > small for share in shares.values()):
            outcome = Outcome.UNDECIDED
        told = ", ".join(f"{model} {share:.1%}" for model, share in shares.items())
        note = f"text is of all tokens: {told}; Figure 10: {small:.1%}" if told else ""
        label = f"{side}: at most {TEXT_LOST:g} % of the text pairs dropped"
        findings.append(_by_model(label, "% of text pairs", dropped, outcome, note))
    return findings


def companions(evidence: Evidence) -> list[Finding]:
    """Ask if answers change with the documents that share their batch; the baseline's may not."""
    return _company(evidence, ("baseline", *_ORDERS, "random", "score", "expanded_drop"))


def orders(evidence: Evidence) -> list[Finding]:
    """Ask if what Order and Reverse Order drop depends on a batch's other sequences (§4)."""
    return _company(evidence, _ORDERS)


_ORDERS: Final = ("order", "reverse_order")
_VARIED: Final[Mapping[Batches, str]] = {"mixed": "the company", "sized": "the batch size"}


def _company(evidence: Evidence, methods: Sequence[str]) -> list[Finding]:
    findings = []
    for batches, varied in _VARIED.items():
        for name in methods:
            stable = is_stock(name)
            side = Side(method=name, gamma=None if stable else 1.0, batches=batches)
            changed = {model: _changed(evidence, model, side) for model in evidence.models}
            shares = {model: 100 * share for model, share in changed.items() if share is not None}
            if not shares:
                continue
            # The baseline's answers must not depend on their batch, those of the others do.
            fits = [(share > CHANGED) is not stable for share in shares.values()]
            bound = f"{'at most' if stable else 'more than'} {CHANGED:g} %"
            label = f"{side}: {bound} of the answers change with {varied}"
            findings.append(_by_model(label, "% of answers", shares, unanimous(fits)))
    absent = Finding("answers that change with their batch", Outcome.ABSENT, unit="points")
    return findings or [absent]


def _changed(evidence: Evidence, model: str, side: Side) -> float | None:
    """Return the mean share of documents whose score differs between two compositions."""
    shares = []
    for task, runs in documents(evidence.find(side, model)).items():
        of_task = []
        for one, other in itertools.combinations(runs, 2):
            paired = pair([one], [other])
            if isinstance(paired, Unpaired):
                raise not_paired(model, task, paired.reason)
            of_task.append(paired.flips)
        if of_task:
            shares.append(statistics.fmean(of_task))
    return statistics.fmean(shares) if shares else None


def _by_model(
    label: str, unit: str, models: Mapping[str, float], outcome: Outcome, note: str = ""
) -> Finding:
    """Return a finding on models that are no sample; it is absent where there are none."""
    if not models:
        return Finding(label, Outcome.ABSENT, unit="points")
    effect = statistics.fmean(models.values())
    return Finding(label, outcome, effect, unit=unit, models=models, note=note)


def _by_seed(label: str, seeds: Mapping[str, float], note: str) -> Finding:
    """Return a finding on training seeds, with Student's interval over them."""
    values, unit = list(seeds.values()), "× the mean load"
    if len(values) < 2:
        return Finding(label, Outcome.ABSENT, unit=unit, models=seeds, note=note)
    from scipy.special import stdtrit

    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    reach = float(stdtrit(len(values) - 1, 0.975)) * error
    low, high = mean - reach, mean + reach
    outcome = Expectation.of("greater").judge(low, high)
    return Finding(label, outcome, mean, low, high, unit=unit, models=seeds, note=note)


def measured(name: str, evidence: Evidence) -> list[Finding]:
    """Return the findings of the measure that a claim names, or raise ValueError."""
    measures = {
        one.__name__: one for one in (removed, balance, decay, companions, orders, text_kept)
    }
    if name not in measures:
        raise ValueError(f"measure {name!r} is none of {', '.join(measures)}")
    return measures[name](evidence)
