"""Tests of claims by load statistics, training seeds and changed answers."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.experiment.names import family, is_stock
from capmoe_eval.paper.contrasts import Expectation
from capmoe_eval.paper.evidence import Batches, Evidence, Side, clauses_by_family, not_paired
from capmoe_eval.paper.nulls import FLATTER, noise_step
from capmoe_eval.paper.pairing import Unpaired, answered_by_cells, pair
from capmoe_eval.paper.printed import figure
from capmoe_eval.paper.statistics import binomial_tail
from capmoe_eval.paper.trainings import SeedTraining
from capmoe_eval.paper.verdicts import LEVEL, Finding, Outcome, unanimous

if TYPE_CHECKING:
    import pandas as pd

CHANGED: Final = 1.0
"""Percent of the answers that must change, in the mean over pairs of batches, for dependence."""
TEXT_LOST: Final = 5.0
"""Percent of the text pairs that may be dropped where almost all are said to stay."""
_COIN: Final = ("piqa", "rte", "winogrande", "boolq")  # tasks of two answers; others have four
_BASELINE: Final = Side(method="baseline")
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
    cells = {model: evidence.shared(sides, model) for model in evidence.models}
    shares = {
        model: 100 * (token["drop_rate"].mean() - expert["drop_rate"].mean())
        for model, (token, expert) in cells.items()
        if len(token)
    }
    outcome = unanimous([share > 0 for share in shares.values()])
    label = "share removed: score own γ − expert drop"
    records = _paths(*itertools.chain(*cells.values()))
    return [_by_model(label, "% of assignments", shares, outcome, records=records)]


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
    return findings or [_absent("peak load from scratch − upcycled")]


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
    ratios, outcomes, tails, records = {}, [], {}, evidence.pick(_BASELINE, *evidence.models)
    for model, cells in records.groupby("model", sort=False):
        layers = evidence.results.layers
        layers = layers[layers["cell"].isin(cells["cell"])]
        steps, inside, sizes = [], [], (0, 0)
        rows = zip(layers["score_by_rank"], layers["n_experts"], layers["top_k"], strict=True)
        for scores, n_experts, k in rows:
            if scores is not None and len(scores) and k > 1 and scores[k] > 0:
                sizes = n_experts, k
                steps.append(math.log(scores[k - 1] / scores[k]))
                inside.append(math.log(scores[0] / scores[k - 1]) / (k - 1))
        if steps:
            step, fall = statistics.fmean(steps), statistics.fmean(inside)
            noise = noise_step(*sizes, max(fall, 1e-3))
            ratios[str(model)] = step / noise
            gentle = Outcome.HOLDS if step < FLATTER * noise else Outcome.UNDECIDED
            outcomes.append(gentle if step < fall else Outcome.FAILS)
            tails[str(model)] = math.exp(-step), math.exp(-noise)
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
        side = Side.model_validate(knobs)
        cells = evidence.pick(side, *evidence.models)
        by = {name: cells[f"load.modalities.{name}.tokens"] for name in ("text", "image")}
        cells = cells[by["text"].notna() & by["image"].notna()].set_index("model", drop=False)
        dropped = dict(100 * cells["load.modalities.text.drop_rate"])
        text, image = (cells[f"load.modalities.{name}.tokens"] for name in by)
        shares = dict(text / (text + image))
        outcome = unanimous([lost <= TEXT_LOST for lost in dropped.values()])
        if outcome is not Outcome.HOLDS and any(share > small for share in shares.values()):
            outcome = Outcome.UNDECIDED
        texts = ", ".join(f"{model} {share:.1%}" for model, share in shares.items())
        note = f"text is of all tokens: {texts}; Figure 10: {small:.1%}" if texts else ""
        label = f"{side}: at most {TEXT_LOST:g} % of the text pairs dropped"
        unit = "% of text pairs"
        findings.append(_by_model(label, unit, dropped, outcome, note, _paths(cells)))
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
        for row in evidence.bench.evaluations.get("permutation", {}).get("permutations", ())
        if row["method"] == side.method and row["model"] in evidence.models
    ]
    findings = []
    for is_split, where in ((False, "one capacity of the batch"), (True, "one of each device")):
        shares = [
            {
                model: 100 * statistics.fmean(row["changed"] for row in same)
                for model in evidence.models
                if (same := [row for row in of_kind if row["model"] == model])
            }
            for is_distinct in (True, False)
            for of_kind in [
                [r for r in rows if (r["ranks"] > 1, r["is_distinct"]) == (is_split, is_distinct)]
            ]
        ]
        outcome = unanimous([share <= CHANGED for share in shares[0].values()])
        texts = ", ".join(f"{model} {share:.1f} %" for model, share in shares[1].items())
        note = f"with prompts as they are, which begin alike: {texts}" if texts else ""
        label = (
            f"score γ=1, {where}: at most {CHANGED:g} % of the next tokens change with the order"
        )
        is_there = "permutation" in evidence.bench.evaluations
        paths = (str(evidence.bench.folder / "permutation.json"),) if is_there else ()
        findings.append(_by_model(label, "% of next tokens", shares[0], outcome, note, paths))
    return findings


def _company(evidence: Evidence, methods: Iterable[str]) -> list[Finding]:
    findings = []
    for (batches, varied), name in itertools.product(_VARIED.items(), methods):
        stable = is_stock(name)
        side = Side(method=name, gamma=None if stable else 1.0, batches=batches)
        cells = evidence.pick(side, *evidence.models)
        if shares := _changed(evidence, cells):
            # The baseline's answers must not depend on their batch, those of the others do.
            fits = [(share > CHANGED) is not stable for share in shares.values()]
            bound = f"{'at most' if stable else 'more than'} {CHANGED:g} %"
            label = f"{side}: {bound} of the answers change with {varied}"
            records = _paths(cells[cells["model"].isin(shares)])
            findings.append(
                _by_model(label, "% of answers", shares, unanimous(fits), records=records)
            )
    return findings or [_absent("answers that change with their batch")]


def _changed(evidence: Evidence, cells: pd.DataFrame) -> dict[str, float]:
    """Return by model the percent of documents whose score differs between two compositions."""
    shares: dict[str, list[float]] = {}
    for (model, task), runs in answered_by_cells(evidence.results, cells).items():
        flips = []
        for first, second in itertools.combinations(runs, 2):
            paired = pair([first], [second])
            if isinstance(paired, Unpaired):
                raise not_paired(model, task, paired.reason)
            flips.append(paired.flips)
        if flips:
            shares.setdefault(model, []).append(statistics.fmean(flips))
    return {model: 100 * statistics.fmean(of_tasks) for model, of_tasks in shares.items()}


def _paths(*cells: pd.DataFrame) -> tuple[str, ...]:
    return tuple(sorted(set(itertools.chain(*(of["path"] for of in cells)))))


def _absent(label: str, **about: Any) -> Finding:
    return Finding(label=label, verdict=Outcome.ABSENT, **{"unit": "points", **about})


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
        return _absent(label)
    few = 0.5 ** len(set(map(family, models))) >= LEVEL
    about: dict[str, Any] = {"models": models, "note": note, "conditional": few, "records": records}
    effect = statistics.fmean(models.values())
    return Finding(label=label, verdict=outcome, effect=effect, unit=unit, **about)


def _by_seed(
    label: str, seeds: Mapping[str, float], note: str, records: tuple[str, ...]
) -> Finding:
    """Return a finding on training seeds, with Student's interval over them."""
    values: Collection[float] = seeds.values()
    about: dict[str, Any] = {"unit": "× the mean load", "models": seeds, "note": note}
    if len(values) < 2:
        return _absent(label, **about)
    from scipy.special import stdtrit

    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    reach = float(stdtrit(len(values) - 1, 0.975)) * error
    outcome = Expectation.of("greater").judge(mean - reach, mean + reach)
    about |= {"effect": mean, "low": mean - reach, "high": mean + reach}
    return Finding(label=label, verdict=outcome, records=records, **about)


_MEASURES: Final = {
    measure.__name__: measure
    for measure in (removed, balance, decay, companions, orders, permuted, text_kept)
}
