"""Trainings of several seeds, from scratch and upcycled: how balanced each is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final, Literal

from capmoe_eval.errors import UsageError, field_problem
from capmoe_eval.experiment.files import read_bytes
from capmoe_eval.paper.statistics import binomial_tail
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from capmoe_report.margins import Expectation
from capmoe_report.verdicts import LEVEL, Finding, Outcome, weigh

_COIN: Final = ("piqa", "rte", "winogrande", "boolq")  # tasks of two answers; others have four

TRAININGS: Final = Path("results/training_seeds.json")
"""The file of the balance of the trained tiny models of several training seeds."""


class SeedTraining(BaseModel):
    """One training of a tiny model, from scratch or upcycled."""

    name: str
    origin: str  # "scratch" or "upcycled"
    seed: int
    steps: int
    peaks: tuple[float, ...] = Field(min_length=1)  # highest load of each layer over the mean load
    accuracy: Mapping[str, float] = {}  # percent, by task
    documents: int = 60  # number of each task
    path: Path = TRAININGS  # the file that it was read from


_FILE: Final = TypeAdapter(dict[Literal["trainings"], tuple[SeedTraining, ...]])


def read_trainings(path: Path | None, profile: str) -> tuple[SeedTraining, ...]:
    """Return the trainings of several seeds, none where there is no file.

    Where no path is given it is :data:`TRAININGS` in profile zoo, and none in the others: trained
    tiny models say nothing of them. A damaged file is a UsageError, and so is a path that was named
    and is no file.
    """
    if path is None and (profile != "zoo" or not TRAININGS.is_file()):
        return ()
    path = path or TRAININGS
    try:
        trainings = _FILE.validate_json(read_bytes(path))["trainings"]
    except (OSError, KeyError, ValidationError) as error:
        reason = field_problem(error) if isinstance(error, ValidationError) else error
        raise UsageError(
            f"{path}: not a whole file of trainings ({reason}); delete it, or make it anew with "
            "`capmoe-eval train --origins`"
        ) from error
    return tuple(training.model_copy(update={"path": path}) for training in trainings)


def balance(all_seeds: Sequence[SeedTraining]) -> list[Finding]:
    """Compare trainings from scratch with upcycled ones of equal seeds (Figures 1, 2, 13).

    A training counts if its model answers better than chance does. The interval over the seeds is
    Student's.
    """
    studies: dict[tuple[str, int], list[SeedTraining]] = {}
    for training in all_seeds:
        studies.setdefault((training.name, training.steps), []).append(training)
    findings = []
    for (name, steps), trainings in studies.items():
        able = [training for training in trainings if _is_better_than_chance(training)]
        peaks = {(t.origin, t.seed): fmean(t.peaks) for t in able}
        gaps = {
            f"seed {seed}": peaks[origin, seed] - peaks["upcycled", seed]
            for origin, seed in sorted(peaks)
            if origin == "scratch" and ("upcycled", seed) in peaks
        }
        left_out = len(trainings) - len(able)
        note = f"{left_out} trainings of {name} are left out: not above chance" if left_out else ""
        label = f"{name}: peak load from scratch − upcycled, {len(gaps)} seeds of {steps} steps"
        about: dict[str, Any] = {"label": label, "note": note, "models": gaps}
        outcome = Outcome.ABSENT
        if len(gaps) > 1:
            from scipy.special import stdtrit

            mean, error = fmean(gaps.values()), stdev(gaps.values()) / math.sqrt(len(gaps))
            reach = float(stdtrit(len(gaps) - 1, 0.975)) * error
            outcome = Expectation.of("greater").judge(mean - reach, mean + reach)
            about |= {"effect": mean, "low": mean - reach, "high": mean + reach}
            about["records"] = tuple(sorted({str(training.path) for training in able}))
        findings.append(Finding(verdict=outcome, unit="× the mean load", **about))
    if not findings:
        label = "peak load from scratch − upcycled"
        findings = [Finding(label=label, verdict=Outcome.ABSENT)]
    return [Finding(verdict=weigh(findings), text=" ".join(map(_sentence, findings))), *findings]


def _is_better_than_chance(training: SeedTraining) -> bool:
    """Return whether the answers to all tasks are better than chance (binomial, p < 5 %)."""
    accuracy, documents = training.accuracy, training.documents
    if not accuracy:  # it is not known
        return False
    right = sum(round(percent / 100 * documents) for percent in accuracy.values())
    chance = fmean(0.5 if task in _COIN else 0.25 for task in accuracy)
    return binomial_tail(right, documents * len(accuracy), chance) < LEVEL


def _sentence(finding: Finding) -> str:
    bounds = "" if finding.low is None else f" [{finding.low:+.2f}, {finding.high:+.2f}]"
    number = "" if finding.effect is None else f"{finding.effect:+.2f}{bounds} {finding.unit}; "
    note = f" ({finding.note})" if finding.note else ""
    return f"{finding.label}: {number}{finding.verdict.value}{note}."
