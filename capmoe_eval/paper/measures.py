"""Tests of claims by load statistics, training seeds and changed answers."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from capmoe_eval.experiment.names import family, is_stock
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.contrasts import Expectation
from capmoe_eval.paper.evidence import Batches, Evidence, Side, clauses_by_family, not_paired
from capmoe_eval.paper.nulls import FLATTER, noise_step
from capmoe_eval.paper.pairing import Unpaired, answered_by_cells, pair
from capmoe_eval.paper.printed import figure
from capmoe_eval.paper.statistics import binomial_tail
from capmoe_eval.paper.trainings import SeedTraining
from capmoe_eval.paper.verdicts import LEVEL, Finding, Outcome, unanimous

CHANGED: Final = 1.0
"""Percent of the answers that must change, in the mean over pairs of batches, for dependence."""
TEXT_LOST: Final = 5.0
"""Percent of the text pairs that may be dropped where almost all are said to stay."""
_COIN: Final = ("piqa", "rte", "winogrande", "boolq")  # tasks of two answers; others have four
_ORDERS: Final = ("order", "reverse_order")
_VARIED: Final[Mapping[Batches, str]] = {"mixed": "the company", "sized": "the batch size"}


def measured(name: str, evidence: Evidence) -> list[Finding]:
    """Return the findings of the measure that a claim names, or raise ValueError."""
    if name not in _MEASURES:
        raise ValueError(f"measure {name!r} is none of {', '.join(_MEASURES)}")
    return _MEASURES[name](evidence)


def removed(evidence: Evidence) -> list[Finding]:
    """Ask if Expert Drop removes fewer of the router's choices than Token Drop at its own γ."""
    sides = Side(method="score", gamma="own"), Side(method="expert_drop")
    dropped = {model: evidence.dropped(sides, model) for model in evidence.models}
    shares = {model: 100 * (both[0] - both[1]) for model, both in dropped.items() if both}
    outcome = unanimous([share > 0 for share in shares.values()])
    label = "share removed: score own γ − expert drop"
    records = [
        record
        for model in shares
        for tasks in evidence.find_tasks(sides, model)
        for record in itertools.chain(*tasks)
    ]
    return [_by_model(label, "% of assignments", shares, outcome, records=_paths(records))]


def balance(evidence: Evidence) -> list[Finding]:
    """Compare trainings from scratch with upcycled ones of equal seeds (Figures 1, 2, 13).

    A training counts if its model answers better than chance does.
    """
    studies: dict[tuple[str, int], list[SeedTraining]] = {}
    for training in evidence.trainings:
        studies.setdefault((training.name, training.steps), []).append(training)
    findings = []
    for (name, steps), trainings in studies.items():
        able = [training for training in trainings if _is_better_than_chance(training)]
        peaks = {(t.origin, t.seed): statistics.fmean(t.peaks) for t in able}
        gaps = {
            f"seed {seed}": peaks[origin, seed] - peaks["upcycled", seed]
            for origin, seed in sorted(peaks)
            if origin == "scratch" and ("upcycled", seed) in peaks
        }
        left_out = len(trainings) - len(able)
        note = f"{left_out} trainings of {name} are left out: not above chance" if left_out else ""
        label = f"{name}: peak load from scratch − upcycled, {len(gaps)} seeds of {steps} steps"
        paths = tuple(sorted({str(training.path) for training in able}))
        findings.append(_by_seed(label, gaps, note, paths))
    absent = Finding("peak load from scratch − upcycled", Outcome.ABSENT, unit="points")
    return findings or [absent]


def _is_better_than_chance(training: SeedTraining) -> bool:
    """Return whether the answers to all tasks are better than chance (binomial, p < 5 %)."""
    accuracy, documents = training.accuracy, training.documents
    if not accuracy:  # it is not known
        return False
    right = sum(round(percent / 100 * documents) for percent in accuracy.values())
    chance = statistics.fmean(0.5 if task in _COIN else 0.25 for task in accuracy)
    return binomial_tail(right, documents * len(accuracy), chance) < LEVEL


def decay(evidence: Evidence) -> list[Finding]:
    """Ask if gate scores fall gently behind the top-k, and not as a random router's (Figure 8).

    The step from rank K to K+1, as the logarithm of the scores' ratio, fails where it is larger
    than the mean step inside the top-k. Noise has no such cliff either, so it holds only where the
    step is also smaller than :data:`FLATTER` of that of Gaussian router logits whose scores fall as
    fast inside the top-k.
    """
    ratios, outcomes, tails, records = {}, [], {}, list[Record]()
    for model in evidence.models:
        steps, inside, sizes = [], [], (0, 0)
        for record in itertools.chain(*evidence.find(Side(method="baseline"), model).values()):
            records.append(record)
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
            tails[model] = math.exp(-step), math.exp(-noise)
    ranks = clauses_by_family(tails, "{}, noise {}", ("{:.2f}", "{:.2f}"))
    note = f"score of rank K+1 over that of rank K: {ranks}" if ranks else ""
    label = f"step from rank K to K+1, over that of noise; asked below {FLATTER:g}"
    outcome = outcomes[0] if len(set(outcomes)) == 1 else Outcome.MIXED
    return [_by_model(label, "× noise", ratios, outcome, note, _paths(records))]


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
        records = []
        for model in evidence.models:
            for record in evidence.find(side, model).get(task, []):
                by = record.load.modalities or {}
                if by.keys() >= {"text", "image"}:
                    records.append(record)
                    dropped[model] = 100 * by["text"].drop_rate
                    shares[model] = by["text"].tokens / sum(part.tokens for part in by.values())
        outcome = unanimous([lost <= TEXT_LOST for lost in dropped.values()])
        if outcome is not Outcome.HOLDS and any(share > small for share in shares.values()):
            outcome = Outcome.UNDECIDED
        texts = ", ".join(f"{model} {share:.1%}" for model, share in shares.items())
        note = f"text is of all tokens: {texts}; Figure 10: {small:.1%}" if texts else ""
        label = f"{side}: at most {TEXT_LOST:g} % of the text pairs dropped"
        findings.append(
            _by_model(label, "% of text pairs", dropped, outcome, note, _paths(records))
        )
    return findings


def companions(evidence: Evidence) -> list[Finding]:
    """Ask if answers change with the documents that share their batch; the baseline's may not."""
    return _company(evidence, ("baseline", *_ORDERS, "random", "score", "expanded_drop"))


def orders(evidence: Evidence) -> list[Finding]:
    """Ask if what Order and Reverse Order drop depends on a batch's other sequences (§4)."""
    return _company(evidence, _ORDERS)


def permuted(evidence: Evidence) -> list[Finding]:
    """Ask if the order of a batch's sequences changes next tokens under Score (§4).

    Judged are batches whose sequences begin with distinct tokens. Of equal gate scores, which
    sequences that begin alike have, the order decides; a note has the share where they occur.
    """
    side = Side(method="score", gamma=1.0)
    rows = [
        row
        for file in evidence.bench.evaluations
        for row in file.permutations
        if row.method == side.method and row.model in evidence.models
    ]
    findings = []
    for is_split, where in ((False, "one capacity of the batch"), (True, "one of each device")):
        shares = [
            {
                model: 100 * statistics.fmean(row.changed for row in same)
                for model in evidence.models
                if (same := [row for row in of_kind if row.model == model])
            }
            for is_distinct in (True, False)
            for of_kind in [
                [r for r in rows if (r.ranks > 1, r.is_distinct) == (is_split, is_distinct)]
            ]
        ]
        outcome = unanimous([share <= CHANGED for share in shares[0].values()])
        texts = ", ".join(f"{model} {share:.1f} %" for model, share in shares[1].items())
        note = f"with prompts as they are, which begin alike: {texts}" if texts else ""
        label = (
            f"score γ=1, {where}: at most {CHANGED:g} % of the next tokens change with the order"
        )
        paths = tuple(str(file.path) for file in evidence.bench.evaluations if file.permutations)
        findings.append(_by_model(label, "% of next tokens", shares[0], outcome, note, paths))
    return findings


def _company(evidence: Evidence, methods: Sequence[str]) -> list[Finding]:
    findings = []
    for (batches, varied), name in itertools.product(_VARIED.items(), methods):
        stable = is_stock(name)
        side = Side(method=name, gamma=None if stable else 1.0, batches=batches)
        changed = {model: _changed(evidence, model, side) for model in evidence.models}
        shares = {model: 100 * share for model, share in changed.items() if share is not None}
        if shares:
            # The baseline's answers must not depend on their batch, those of the others do.
            fits = [(share > CHANGED) is not stable for share in shares.values()]
            bound = f"{'at most' if stable else 'more than'} {CHANGED:g} %"
            label = f"{side}: {bound} of the answers change with {varied}"
            by_task = [evidence.find(side, model) for model in shares]
            records = _paths(r for tasks in by_task for r in itertools.chain(*tasks.values()))
            findings.append(
                _by_model(label, "% of answers", shares, unanimous(fits), records=records)
            )
    absent = Finding("answers that change with their batch", Outcome.ABSENT, unit="points")
    return findings or [absent]


def _changed(evidence: Evidence, model: str, side: Side) -> float | None:
    """Return the mean share of documents whose score differs between two compositions."""
    cells = evidence.cells(itertools.chain(*evidence.find(side, model).values()))
    shares = []
    for (_, task), runs in answered_by_cells(evidence.results, cells).items():
        flips = []
        for first, second in itertools.combinations(runs, 2):
            paired = pair([first], [second])
            if isinstance(paired, Unpaired):
                raise not_paired(model, task, paired.reason)
            flips.append(paired.flips)
        shares += [statistics.fmean(flips)] if flips else []
    return statistics.fmean(shares) if shares else None


def _paths(records: Iterable[Record]) -> tuple[str, ...]:
    return tuple(sorted({str(record.path) for record in records}))


def _by_model(
    label: str,
    unit: str,
    models: Mapping[str, float],
    outcome: Outcome,
    note: str = "",
    records: tuple[str, ...] = (),
) -> Finding:
    """Return a finding on models that are no sample; it is absent where there are none.

    It speaks of these models alone where so few families would agree by chance (sign test).
    """
    if not models:
        return Finding(label, Outcome.ABSENT, unit="points")
    effect, families = statistics.fmean(models.values()), len(set(map(family, models)))
    few = 0.5**families >= LEVEL
    return Finding(
        *(label, outcome, effect),
        unit=unit,
        models=models,
        note=note,
        conditional=few,
        records=records,
    )


def _by_seed(
    label: str, seeds: Mapping[str, float], note: str, records: tuple[str, ...]
) -> Finding:
    """Return a finding on training seeds, with Student's interval over them."""
    values, unit = list(seeds.values()), "× the mean load"
    if len(values) < 2:
        return Finding(label, Outcome.ABSENT, unit=unit, models=seeds, note=note)
    from scipy.special import stdtrit

    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    reach = float(stdtrit(len(values) - 1, 0.975)) * error
    low, high = mean - reach, mean + reach
    outcome = Expectation.of("greater").judge(low, high)
    return Finding(
        *(label, outcome, mean, low, high), unit=unit, models=seeds, note=note, records=records
    )


_MEASURES: Final = {
    measure.__name__: measure
    for measure in (removed, balance, decay, companions, orders, permuted, text_kept)
}
