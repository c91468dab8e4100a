"""Tests of claims by load statistics, training seeds and changed answers."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.paper.claims.loads import LoadQuestion, load_values
from capmoe_eval.paper.evidence import Batches, Evidence, Side, not_paired
from capmoe_eval.paper.pairing import Unpaired, pair
from capmoe_eval.paper.verdicts import Finding, Outcome, unanimous

Trainings = Sequence[Mapping[str, Any]]
"""The trainings of ``results/training_seeds.json``, one mapping each."""

CHANGED: Final = 1.0
"""Percent of the answers that must change, in the mean over pairs of batches, for dependence."""


def removed(evidence: Evidence, _trainings: Trainings) -> list[Finding]:
    """Expert Drop removes fewer of the router's assignments than Token Drop (Table 2)."""
    findings = []
    for gamma in (1.0, 1.5, 2.0):
        token, expert = Side(method="score", gamma=gamma), Side(method="expert_drop")
        question = LoadQuestion(quantity="drop_rate", of=token, against=expert, above=0)
        shares = {m: 100 * value for m, (value, _) in load_values(question, evidence).items()}
        label = f"share removed: score{gamma_suffix(gamma)} > expert drop"
        findings.append(_by_model(label, "% of assignments", shares))
    return findings


def balance(_evidence: Evidence, trainings: Trainings) -> list[Finding]:
    """From scratch against upcycled: the same class, data, steps and seeds (Figures 1, 2, 13)."""
    studies: defaultdict[tuple[str, int], defaultdict[str, dict[int, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for training in trainings:
        origins = studies[training["name"], training["steps"]]
        origins[training["origin"]][training["seed"]] = statistics.fmean(training["peaks"])
    findings = []
    for (name, steps), origins in studies.items():
        scratch, upcycled = origins["scratch"], origins["upcycled"]
        seeds = sorted(scratch.keys() & upcycled.keys())
        label = f"{name}: peak load from scratch > upcycled, {len(seeds)} seeds of {steps} steps"
        by_seed = {f"seed {seed}": scratch[seed] - upcycled[seed] for seed in seeds}
        findings.append(_by_seed(label, "× the mean load", by_seed))
    absent = Finding("peak load from scratch > upcycled", Outcome.ABSENT, unit="points")
    return findings or [absent]


def decay(evidence: Evidence, _trainings: Trainings) -> list[Finding]:
    """Behind the top-k a gate score falls no faster than inside it, rank by rank (Figure 8).

    The step from rank K to K+1, as the logarithm of the scores' ratio, is compared with the mean
    step inside the top-k.
    """
    gentler, ratios = {}, []
    for model in evidence.models:
        steps, inside = [], []
        for record in itertools.chain(*evidence.find(Side(method="baseline"), model).values()):
            for layer in record.layers:
                scores, k = layer.score_by_rank, layer.top_k
                if scores and k > 1 and scores[k] > 0:
                    steps.append(math.log(scores[k - 1] / scores[k]))
                    inside.append(math.log(scores[0] / scores[k - 1]) / (k - 1))
        if steps:
            gentler[model] = statistics.fmean(inside) - statistics.fmean(steps)
            ratios.append(f"{model} {math.exp(-statistics.fmean(steps)):.2f}")
    note = f"score of rank K+1 over that of rank K: {', '.join(ratios)}" if ratios else ""
    label = "step inside the top-k > step from rank K to K+1"
    return [_by_model(label, "log score", gentler, note)]


def companions(evidence: Evidence, _trainings: Trainings) -> list[Finding]:
    """Share of answers that change when the same documents share batches with others."""
    findings = []
    for batches, varied in _VARIED.items():
        for name in _COMPANIONS:
            gamma = None if name in ("baseline", "expert_drop") else 1.0
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


_VARIED: Final[Mapping[Batches, str]] = {"mixed": "the company", "sized": "the batch size"}
_COMPANIONS: Final = (
    "baseline",
    "order",
    "reverse_order",
    "random",
    "score",
    "expert_drop",
    "expanded_drop",
)


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


def _by_model(label: str, unit: str, models: Mapping[str, float], note: str = "") -> Finding:
    """Return a finding whose sign counts model by model: they are no sample of anything."""
    if not models:
        return Finding(label, Outcome.ABSENT, unit="points")
    outcome = unanimous([value > 0 for value in models.values()])
    effect = statistics.fmean(models.values())
    return Finding(label, outcome, effect, unit=unit, models=models, note=note)


def _by_seed(label: str, unit: str, seeds: Mapping[str, float]) -> Finding:
    """Return a finding on training seeds, with Student's interval over them."""
    values = list(seeds.values())
    if len(values) < 2:
        return Finding(label, Outcome.ABSENT, unit=unit, models=seeds)
    from scipy.stats import t

    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    reach = float(t.ppf(0.975, len(values) - 1)) * error
    low, high = mean - reach, mean + reach
    outcome = Outcome.HOLDS if low > 0 else Outcome.FAILS if high < 0 else Outcome.UNDECIDED
    return Finding(label, outcome, mean, low, high, unit=unit, models=seeds)


MEASURES: Final[Mapping[str, Callable[[Evidence, Trainings], list[Finding]]]] = {
    measure.__name__: measure for measure in (removed, balance, decay, companions)
}
"""Every measure, by the name that a claim gives."""
