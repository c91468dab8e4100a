"""What the load statistics and the flips of answers say of a claim."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Documents, Unpaired, pair
from capmoe_eval.paper.replication.claims import BASELINE, Composition, Side
from capmoe_eval.paper.replication.records import SideRecords, not_paired
from capmoe_eval.paper.replication.verdict import Finding
from capmoe_eval.paper.verdicts import CONFIRMED, CONTRADICTED, MIXED, NOT_MEASURED, NOT_SHOWN

Trainings = Sequence[Mapping[str, Any]]
"""The trainings of ``results/training_seeds.json``, one mapping each."""

FLIPPED: Final = 1.0
"""Percent of the answers that change, in the mean over two batches, to be called dependence."""


def removed(evidence: SideRecords, _trainings: Trainings) -> list[Finding]:
    """Expert Drop removes fewer of the router's assignments than Token Drop (Table 2)."""
    findings = []
    for gamma in (1.0, 1.5, 2.0):
        shares = {}
        for model in evidence.models:
            token = evidence.of(model, Side("score", gamma))
            expert = evidence.of(model, Side("expert_drop"))
            if token and expert:
                shares[model] = 100 * (_dropped(token) - _dropped(expert))
        label = f"share removed: score{gamma_suffix(gamma)} > expert drop"
        findings.append(_each(label, "% of assignments", shares))
    return findings


def _dropped(records: Sequence[Record]) -> float:
    """Return the dropped share of a model's records, tasks counting equally."""
    return statistics.fmean(record.load.drop_rate for record in records)


def balance(_evidence: SideRecords, trainings: Trainings) -> list[Finding]:
    """From scratch against upcycled: the same class, data, steps and seeds (Figures 1, 2, 13)."""
    found: defaultdict[tuple[str, int], defaultdict[str, dict[int, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for training in trainings:
        peak = statistics.fmean(training["peaks"])
        study = training["name"], training["steps"]
        found[study][training["origin"]][training["seed"]] = peak
    findings = []
    for (name, steps), origins in found.items():
        scratch, upcycled = origins["scratch"], origins["upcycled"]
        seeds = sorted(scratch.keys() & upcycled.keys())
        label = f"{name}: peak load from scratch > upcycled, {len(seeds)} seeds of {steps} steps"
        by_seed = {f"seed {seed}": scratch[seed] - upcycled[seed] for seed in seeds}
        findings.append(_sampled(label, "× the mean load", by_seed))
    return findings or [Finding("peak load from scratch > upcycled", NOT_MEASURED)]


def decay(evidence: SideRecords, _trainings: Trainings) -> list[Finding]:
    """Behind the top-k a gate score falls no faster than inside it, rank by rank (Figure 8).

    The step from rank K to K+1, as the logarithm of the scores' ratio, is held against the mean
    step inside the top-k.
    """
    gentler, ratios = {}, {}
    for model in evidence.models:
        steps, inside = [], []
        for record in evidence.of(model, BASELINE):
            for layer in record.layers:
                scores, k = layer.score_by_rank, layer.top_k
                if scores and k > 1 and scores[k] > 0:
                    steps.append(math.log(scores[k - 1] / scores[k]))
                    inside.append(math.log(scores[0] / scores[k - 1]) / (k - 1))
        if steps:
            gentler[model] = statistics.fmean(inside) - statistics.fmean(steps)
            ratios[model] = math.exp(-statistics.fmean(steps))
    note = "score of rank K+1 over that of rank K: " + ", ".join(
        f"{model} {ratio:.2f}" for model, ratio in ratios.items()
    )
    label = "step inside the top-k > step from rank K to K+1"
    return [_each(label, "log score", gentler, note if ratios else "")]


def companions(evidence: SideRecords, _trainings: Trainings) -> list[Finding]:
    """Share of answers that change when the same documents share batches with others."""
    findings = []
    for said, batches in _COMPANY.items():
        for side in _MIXED_SIDES:
            flips = {}
            for model in evidence.models:
                rate = _flips(evidence, model, side, batches)
                if rate is not None:
                    flips[model] = 100 * rate
            if flips:
                findings.append(_flipped(side, said, flips))
    return findings or [Finding("answers that change with their batch", NOT_MEASURED)]


_COMPANY: Final[Mapping[str, Composition]] = {"the company": "mixed", "the batch size": "sized"}
_MIXED_SIDES: Final = (
    BASELINE,
    *(Side(name, 1.0) for name in ("order", "reverse_order", "random", "score")),
    Side("expert_drop"),
    Side("expanded_drop", 1.0),
)


def _flips(evidence: SideRecords, model: str, side: Side, batches: Composition) -> float | None:
    """Return the mean share of documents whose score differs between two compositions."""
    rates = []
    for task, several in evidence.documents(model, side, batches).items():
        if len(several) > 1:
            two = itertools.combinations(several, 2)
            rates.append(statistics.fmean(_flipped_share(model, task, *sides) for sides in two))
    return statistics.fmean(rates) if rates else None


def _flipped_share(model: str, task: str, one: Documents, other: Documents) -> float:
    found = pair([one], [other])
    if isinstance(found, Unpaired):
        raise not_paired(model, task, found.reason)
    return found.flips


def _flipped(side: Side, batches: str, flips: Mapping[str, float]) -> Finding:
    """Return a finding: the answers depend on the batch; the baseline's do not."""
    effect = statistics.fmean(flips.values())
    depends = [flip > FLIPPED for flip in flips.values()]
    if side == BASELINE:
        depends = [not yes for yes in depends]
    name = side.name.replace("_", " ") + gamma_suffix(side.gamma)
    share = "at most" if side == BASELINE else "more than"
    return Finding(
        label=f"{name}: {share} {FLIPPED:g} % of the answers change with {batches}",
        verdict=_unanimous(depends),
        unit="% of answers",
        effect=effect,
        models=flips,
    )


def _each(label: str, unit: str, models: Mapping[str, float], note: str = "") -> Finding:
    """Return a finding whose sign counts model by model: they are no sample of anything."""
    if not models:
        return Finding(label, NOT_MEASURED)
    verdict = _unanimous([value > 0 for value in models.values()])
    effect = statistics.fmean(models.values())
    return Finding(label, verdict, unit, effect, models=models, note=note)


def _unanimous(yes: Sequence[bool]) -> str:
    return CONFIRMED if all(yes) else MIXED if any(yes) else CONTRADICTED


def _sampled(label: str, unit: str, by_seed: Mapping[str, float]) -> Finding:
    """Return a finding on training seeds, with Student's interval over them."""
    values = list(by_seed.values())
    freedom = len(values) - 1
    if freedom < 1:
        return Finding(label, NOT_MEASURED, unit, models=by_seed)
    from scipy.stats import t

    mean = statistics.fmean(values)
    reach = float(t.ppf(0.975, freedom)) * statistics.stdev(values) / math.sqrt(len(values))
    verdict = CONFIRMED if mean - reach > 0 else CONTRADICTED if mean + reach < 0 else NOT_SHOWN
    return Finding(label, verdict, unit, mean, mean - reach, mean + reach, models=by_seed)


MEASURES: Final[Mapping[str, Callable[[SideRecords, Trainings], list[Finding]]]] = {
    "removed": removed,
    "balance": balance,
    "decay": decay,
    "companions": companions,
}
"""Every measure, by the name that a claim gives."""
