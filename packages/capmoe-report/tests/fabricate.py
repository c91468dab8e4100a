"""Records as claims ask for them: by method, all of models with the same settings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from capmoe_eval.experiment.files import read_yaml
from capmoe_eval.experiment.record import Record
from capmoe_eval.results.frames import results_of
from capmoe_eval.routing.registry import create_method

from capmoe_report.evidence import Evidence, trainings_of
from capmoe_report.judge import Claim, judge
from capmoe_report.verdicts import JudgedClaim
from tests import records


def record(
    method: str,
    gamma: float | None = None,
    correct: records.Correct = (1, 0, 1, 1),
    *,
    model: str = "zoo_olmoe",
    task: str = "obqa",
    load: Mapping[str, Any] | None = None,
    parts: Mapping[str, Any] | None = None,
    cell: Mapping[str, Any] | None = None,
    root: Path = Path("results/zoo"),
    **knobs: Any,
) -> Record:
    """Return a record of a model on two ranks, with eight experts; nothing is written."""
    loads = {"peak_before": 4.0, "mean_peak_before": 3.0, **(load or {})}
    layers = [records.layer([30, 20, 10, 10, 10, 10, 5, 5])]
    routing = create_method(method, gamma, **{"ep_size": 2, **knobs})
    parts = {"load": loads, "layers": layers, **(parts or {})}
    return records.record_of(
        routing, correct, model=model, task=task, root=root, parts=parts, **(cell or {})
    )


def evidence(*records: Record, profile: str = "zoo", **rest: Any) -> Evidence:
    """Return what claims are judged by."""
    return Evidence(profile, results_of(records), **rest)


def trainings(
    scratch: Sequence[float], upcycled: Sequence[float], accuracy: Mapping[str, float] | None = None
) -> pd.DataFrame:
    """Return trainings of one name by the mean peak of each seed, from scratch and upcycled."""
    common = {"name": "mixtral", "steps": 600, "accuracy": accuracy or {"boolq": 90.0}}
    return trainings_of(
        [
            {**common, "origin": origin, "seed": seed, "peaks": [peak - 1, peak + 1]}
            for origin, peaks in (("scratch", scratch), ("upcycled", upcycled))
            for seed, peak in enumerate(peaks)
        ]
    )


def claim_of(check: str) -> Claim:
    """Return a claim that has one check, from YAML."""
    return Claim.model_validate(read_yaml(f"{{id: one, section: S, place: P, check: {check}}}"))


def judged(check: str, material: Evidence) -> JudgedClaim:
    """Return a claim that has one check, judged."""
    (verdict,) = judge(material, [claim_of(check)])
    return verdict


def label(claim: JudgedClaim) -> str:
    """Return the verdict on a claim with its scope."""
    return f"{claim.verdict} {claim.scope}".strip()


def texts(claim: JudgedClaim) -> str:
    """Return what the checks of a claim say."""
    return " ".join(check.text for _, (check, *_) in claim.checks)
