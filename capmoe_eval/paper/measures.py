"""Tests of claims by load statistics, training seeds and changed answers."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.paper.contrasts import Expectation
from capmoe_eval.paper.evidence import Batches, Evidence, Side, not_paired
from capmoe_eval.paper.pairing import Unpaired, pair
from capmoe_eval.paper.verdicts import LEVEL, Finding, Outcome, unanimous

CHANGED: Final = 1.0
"""Percent of the answers that must change, in the mean over pairs of batches, for dependence."""


def removed(evidence: Evidence) -> list[Finding]:
    """Expert Drop removes fewer of the router's assignments than Token Drop at its own γ."""
    token, expert = Side(method="score", gamma="own"), Side(method="expert_drop")
    found = {model: evidence.dropped((token, expert), model) for model in evidence.models}
    shares = {model: 100 * (both[0] - both[1]) for model, both in found.items() if both}
    outcomes = {m: Outcome.HOLDS if share > 0 else Outcome.FAILS for m, share in shares.items()}
    label = "share removed: score own γ − expert drop"
    return [_by_model(label, "% of assignments", shares, outcomes)]


def balance(evidence: Evidence) -> list[Finding]:
    """From scratch against upcycled: the same class, data, steps and seeds (Figures 1, 2, 13).

    A training counts if its model answers better than chance does (:func:`_knows`).
    """
    studies: defaultdict[tuple[str, int], defaultdict[str, dict[int, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    ignorant: Counter[tuple[str, int]] = Counter()
    for training in evidence.trainings:
        study = training["name"], training["steps"]
        if _knows(training):
            peaks = statistics.fmean(training["peaks"])
            studies[study][training["origin"]][training["seed"]] = peaks
        else:
            ignorant[study] += 1
            studies[study]  # asked of, if only to say why it was not measured
    findings = []
    for (name, steps), origins in studies.items():
        scratch, upcycled = origins["scratch"], origins["upcycled"]
        seeds = sorted(scratch.keys() & upcycled.keys())
        label = f"{name}: peak load from scratch − upcycled, {len(seeds)} seeds of {steps} steps"
        by_seed = {f"seed {seed}": scratch[seed] - upcycled[seed] for seed in seeds}
        left_out = ignorant[name, steps]
        note = f"{left_out} trainings of {name} are left out: not above chance" if left_out else ""
        findings.append(_by_seed(label, "× the mean load", by_seed, note))
    absent = Finding("peak load from scratch − upcycled", Outcome.ABSENT, unit="points")
    return findings or [absent]


_COIN: Final = ("piqa", "rte", "winogrande", "boolq")
"""Tasks of two answers; all others have four."""
_DOCUMENTS: Final = 60
"""Documents of each task that a training is measured on, where the file names no number."""


def _knows(training: Mapping[str, Any]) -> bool:
    """Return True if the answers to all tasks together are better than chance (binomial, p < 5 %).

    A training whose accuracy is not known counts for nothing.
    """
    from scipy.stats import binomtest

    accuracy: Mapping[str, float] = training.get("accuracy") or {}
    asked = training.get("documents", _DOCUMENTS)
    right = sum(round(percent / 100 * asked) for percent in accuracy.values())
    chance = [0.5 if task in _COIN else 0.25 for task in accuracy]
    if not chance:
        return False
    total, mean = asked * len(chance), statistics.fmean(chance)
    return bool(binomtest(right, total, mean, alternative="greater").pvalue < LEVEL)


def decay(evidence: Evidence) -> list[Finding]:
    """Behind the top-k a gate score falls gently, and more so than a random router's (Figure 8).

    The step from rank K to K+1, as the logarithm of the scores' ratio, fails where it is larger
    than the mean step inside the top-k. Noise has no such cliff either, so it holds only where the
    step is also smaller than :data:`FLATTER` of that of Gaussian router logits whose scores fall as
    fast inside the top-k.
    """
    ratios, outcomes, notes = {}, {}, []
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
            outcomes[model] = gentle if step < fall else Outcome.FAILS
            notes.append(f"{model} {math.exp(-step):.2f}, noise {math.exp(-noise):.2f}")
    note = f"score of rank K+1 over that of rank K: {', '.join(notes)}" if notes else ""
    label = f"step from rank K to K+1, over that of noise; asked below {FLATTER:g}"
    return [_by_model(label, "× noise", ratios, outcomes, note)]


FLATTER: Final = 0.9
"""Share of the noise's step below which a tail is flatter than noise."""
_TOKENS: Final = 4096


@cache
def noise_step(experts: int, top_k: int, fall: float) -> float:
    """Return the step behind the top-k of a router whose logits are Gaussian noise, seeded.

    Args:
        experts: Number of experts.
        top_k: K.
        fall: Mean step inside the top-k, which sets the noise's spread.
    """
    import numpy as np
    from scipy.optimize import brentq

    logits = np.random.default_rng(20260103).standard_normal((_TOKENS, experts))
    ranked = -np.sort(-logits, axis=1)

    def steps(spread: float) -> tuple[float, float]:
        scores = np.exp(spread * (ranked - ranked[:, :1]))
        means = (scores / scores.sum(axis=1, keepdims=True)).mean(axis=0)
        inside = math.log(means[0] / means[top_k - 1]) / (top_k - 1)
        return inside, math.log(means[top_k - 1] / means[top_k])

    spread = brentq(lambda value: steps(value)[0] - fall, 0.0, 50.0, xtol=1e-6)
    return steps(float(spread))[1]


def companions(evidence: Evidence) -> list[Finding]:
    """Answers change when the same documents share batches with others; the baseline's do not."""
    return _company(evidence, ("baseline", *_ORDERS, "random", "score", "expanded_drop"))


def orders(evidence: Evidence) -> list[Finding]:
    """What Order and Reverse Order drop depends on the other sequences of the batch (§4)."""
    return _company(evidence, _ORDERS)


_ORDERS: Final = ("order", "reverse_order")
_VARIED: Final[Mapping[Batches, str]] = {"mixed": "the company", "sized": "the batch size"}


def _company(evidence: Evidence, methods: Sequence[str]) -> list[Finding]:
    findings = []
    for batches, varied in _VARIED.items():
        for name in methods:
            gamma = None if name == "baseline" else 1.0
            side = Side(method=name, gamma=gamma, batches=batches)
            changed = {model: _changed(evidence, model, side) for model in evidence.models}
            shares = {model: 100 * share for model, share in changed.items() if share is not None}
            if not shares:
                continue
            # The baseline's answers must not depend on their batch, those of the others do.
            stable = name == "baseline"
            fits = [(share > CHANGED) is not stable for share in shares.values()]
            method = name.replace("_", " ") + gamma_suffix(gamma)
            bound = f"{'at most' if stable else 'more than'} {CHANGED:g} %"
            findings.append(
                Finding(
                    f"{method}: {bound} of the answers change with {varied}",
                    unanimous(fits),
                    statistics.fmean(shares.values()),
                    unit="% of answers",
                    models=shares,
                )
            )
    absent = Finding("answers that change with their batch", Outcome.ABSENT, unit="points")
    return findings or [absent]


def _changed(evidence: Evidence, model: str, side: Side) -> float | None:
    """Return the mean share of documents whose score differs between two compositions."""
    shares = []
    for task, runs in evidence.documents(side, model).items():
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
    label: str,
    unit: str,
    models: Mapping[str, float],
    outcomes: Mapping[str, Outcome],
    note: str = "",
) -> Finding:
    """Return a finding that holds or fails if it does on every model: they are no sample."""
    if not models:
        return Finding(label, Outcome.ABSENT, unit="points")
    found = set(outcomes.values())
    outcome = found.pop() if len(found) == 1 else Outcome.MIXED
    effect = statistics.fmean(models.values())
    return Finding(label, outcome, effect, unit=unit, models=models, note=note)


def _by_seed(label: str, unit: str, seeds: Mapping[str, float], note: str) -> Finding:
    """Return a finding on training seeds, with Student's interval over them."""
    values = list(seeds.values())
    if len(values) < 2:
        return Finding(label, Outcome.ABSENT, unit=unit, models=seeds, note=note)
    from scipy.stats import t

    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    reach = float(t.ppf(0.975, len(values) - 1)) * error
    outcome = Expectation.of("greater").judge(mean - reach, mean + reach)
    return Finding(
        *(label, outcome, mean, mean - reach, mean + reach), unit=unit, models=seeds, note=note
    )


Measure = Literal["removed", "balance", "decay", "companions", "orders"]
"""The names of the measures."""

MEASURES: Final[Mapping[str, Callable[[Evidence], list[Finding]]]] = {
    measure.__name__: measure for measure in (removed, balance, decay, companions, orders)
}
"""Every measure, by the name that a claim gives."""
