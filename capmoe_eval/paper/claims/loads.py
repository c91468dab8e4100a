"""Checks of load statistics, and of the promises that every record keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.record_part import Proofs
from capmoe_eval.paper.claims.result import CheckResult
from capmoe_eval.paper.evidence import Evidence, Side
from capmoe_eval.paper.verdicts import Finding, Outcome, unanimous, weigh

Recorded = Literal["drop_rate", "pad_waste", "peak_before", "mean_peak_before"]
"""Quantities that a record's load has as fields."""
Derived = Literal["added_share", "computed_share", "rank_ratio", "drop_rate_at"]
"""Quantities that follow from a record, see :func:`_quantity`."""


class LoadQuestion(BaseModel):
    """A quantity of the load of a side, alone or against that of another."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    quantity: Literal[Recorded, Derived]
    of: Side = Side(method="baseline")
    against: Side | None = None  # the side whose value is subtracted
    above: float = -math.inf  # the value must lie above
    below: float = math.inf  # the value must lie below
    gamma: float | None = None  # of "drop_rate_at"
    # Models (beginnings of their names) that must each lie above every one of ``lower``.
    higher: tuple[str, ...] = ()
    lower: tuple[str, ...] = ()
    every_gamma: bool = False  # ask it of the side at every γ that there are records of

    @model_validator(mode="after")
    def _checked(self) -> LoadQuestion:
        if not (self.higher or math.isfinite(self.above) or math.isfinite(self.below)):
            raise ValueError("needs above, below, or higher and lower")
        return self

    def __str__(self) -> str:
        """Return the quantity and the sides, for people."""
        text = f"{self.quantity}{gamma_suffix(self.gamma)} of {self.of}"
        return text if self.against is None else f"{text} − {self.against}"


def _quantity(question: LoadQuestion, record: Record) -> float | None:
    """Return the quantity that is asked for, or None where the record does not have it."""
    load, layers = record.load, record.layers
    pairs = sum(layer.assignments for layer in layers)
    match question.quantity:
        case "added_share":  # computed pairs beyond a token's top-k, over all its top-k pairs
            return load.added / pairs
        case "computed_share":  # computed pairs over those of the dropless model
            return 1 + (load.added - load.dropped) / pairs
        case "rank_ratio":  # the mean gate score of rank k+1 over rank k's (Figure 8)
            ranks = [(layer.score_by_rank, layer.top_k) for layer in layers]
            return _mean([s[k] / s[k - 1] for s, k in ranks if s and k < len(s) and s[k - 1]])
        case "drop_rate_at":  # Equation 11's share of dropped pairs at γ, from the record's grids
            dropped, gamma = 0.0, question.gamma or 0.0
            for layer in layers:
                if gamma not in layer.grid.gamma:
                    return None
                rate = layer.grid.drop_rate[layer.grid.gamma.index(gamma)]
                dropped += rate * layer.assignments
            return dropped / pairs
        case name:
            value: float | None = getattr(load, name)
            return value


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _values(question: LoadQuestion, evidence: Evidence) -> tuple[dict[str, float], set[str]]:
    """Return the value of each model that has records, and the paths of the records.

    It is the mean over the model's tasks, for a peak the highest of them.
    """
    asked = [side for side in (question.of, question.against) if side is not None]
    left_out = evidence.left_out(asked[0], asked[-1])
    is_peak = question.quantity == "peak_before" and question.against is None
    values, paths = {}, set()
    for model in evidence.models:
        if model in left_out:
            continue
        tasks = []
        for sides in evidence.find_tasks(asked, model):
            means = [_mean([_quantity(question, record) for record in side]) for side in sides]
            known = [mean for mean in means if mean is not None]
            if len(known) == len(asked):
                tasks.append(known[0] - sum(known[1:]))
                paths |= {str(record.path) for side in sides for record in side}
        if tasks:
            values[model] = max(tasks) if is_peak else sum(tasks) / len(tasks)
    return values, paths


def check(raw: Mapping[str, Any], evidence: Evidence) -> CheckResult:
    """Return what the load statistics say: true of every model, of none, or of some.

    Loads are counted, not sampled: they have no intervals, and a claim holds if it is true of every
    model present. A question that cannot be read is a ValueError.
    """
    question = LoadQuestion.model_validate(raw)
    asked = [question]
    if question.every_gamma:
        factors = {g for model in evidence.models for g in evidence.gammas(question.of, model)}
        sides = [question.of.model_copy(update={"gamma": gamma}) for gamma in sorted(factors)]
        asked = [question.model_copy(update={"of": side}) for side in sides] or asked
    results = [_answer(one, evidence) for one in asked]
    outcome = weigh([result.outcome for result in results])
    findings = tuple(found for result in results for found in result.findings)
    return CheckResult("load", outcome, " ".join(result.text for result in results), findings)


def _answer(question: LoadQuestion, evidence: Evidence) -> CheckResult:
    values, paths = _values(question, evidence)
    if not values:
        return CheckResult("load", Outcome.ABSENT, f"No records of: {question}.")
    if question.higher:
        high, low = (
            {model: value for model, value in values.items() if model.startswith(names)}
            for names in (question.higher, question.lower)
        )
        fits = [first > second for first in high.values() for second in low.values()]
        count = f"the first is higher in {sum(fits)} of {len(fits)} pairs"
        said = f"{_listed(high)} against {_listed(low)}"
        text = f"{said}; {count if fits else 'one side has no records'}."
    else:
        fits = [question.above < value < question.below for value in values.values()]
        bounds = [("> ", question.above), ("< ", question.below)]
        asked = " and ".join(f"{sign}{bound:g}" for sign, bound in bounds if math.isfinite(bound))
        count = f"true of {sum(fits)} of {len(fits)} models"
        text = f"{_listed(values)}; asked {asked}, {count}."
    # Groups of which one has no records decide nothing.
    outcome = unanimous(fits) if fits else Outcome.UNDECIDED
    mean, records = sum(values.values()) / len(values), tuple(sorted(paths))
    finding = Finding(
        str(question), outcome, mean, unit=question.quantity, models=values, records=records
    )
    return CheckResult("load", outcome, f"{question}: {text}", (finding,))


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{model} {value:.3g}" for model, value in values.items()) or "none"


def check_promise(name: str, evidence: Evidence) -> CheckResult:
    """Return whether a promise was kept by every record to which it applies.

    One that no record can have is a ValueError.
    """
    if name not in Proofs.model_fields:
        raise ValueError(f"promise: {name!r} is none of {', '.join(Proofs.model_fields)}")
    kept, broken = (
        [
            str(one.path)
            for one in evidence.records
            if (promise := getattr(one.proofs, name)) is not None and promise.passed is answer
        ]
        for answer in (True, False)
    )
    if not kept and not broken:
        return CheckResult("promise", Outcome.ABSENT, f"No record to which {name} applies.")
    outcome = Outcome.FAILS if broken else Outcome.HOLDS
    text = f"{name}: kept in {len(kept)} records, broken in {len(broken)}."
    finding = Finding(name, outcome, float(len(kept)), unit="records", records=tuple(broken))
    return CheckResult("promise", outcome, text, (finding,))
