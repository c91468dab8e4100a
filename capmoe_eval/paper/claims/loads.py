"""Checks of load statistics, and of the promises that every record keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, model_validator

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.record_part import Proofs
from capmoe_eval.paper.claims.result import CheckResult
from capmoe_eval.paper.evidence import Evidence, Side
from capmoe_eval.paper.verdicts import Finding, Outcome, unanimous, weigh


def _share(record: Record, pairs: float) -> float:
    """Return some pairs over all pairs of the tokens' top-k."""
    return pairs / sum(layer.assignments for layer in record.layers)


def added_share(record: Record) -> float:
    """Return computed pairs beyond a token's own top-k, over all its top-k pairs."""
    return _share(record, record.load.added)


def computed_share(record: Record) -> float:
    """Return computed pairs over those of the dropless model."""
    return 1 + _share(record, record.load.added - record.load.dropped)


def rank_ratio(record: Record) -> float | None:
    """Return the mean gate score of rank k+1 over rank k's, averaged over layers (Figure 8)."""
    ratios = []
    for layer in record.layers:
        scores, k = layer.score_by_rank, layer.top_k
        if scores and k < len(scores) and scores[k - 1]:
            ratios.append(scores[k] / scores[k - 1])
    return _mean(ratios)


def share_dropped_at(gamma: float) -> Callable[[Record], float | None]:
    """Return Equation 11's share of dropped pairs at γ, from the grid in a record."""

    def read(record: Record) -> float | None:
        dropped = 0.0
        for layer in record.layers:
            if gamma not in layer.grid.gamma:
                return None
            dropped += layer.grid.drop_rate[layer.grid.gamma.index(gamma)] * layer.assignments
        return _share(record, dropped)

    return read


QUANTITIES: Final[Mapping[str, Callable[[Record], float | None]]] = {
    **{
        name: attrgetter(f"load.{name}")
        for name in ("drop_rate", "pad_waste", "peak_before", "mean_peak_before")
    },
    "added_share": added_share,
    "computed_share": computed_share,
    "rank_ratio": rank_ratio,
}
"""The quantities of a record's load; ``drop_rate_at`` takes a γ besides."""


class LoadQuestion(BaseModel):
    """A quantity of the load of a side, alone or against that of another.

    Attributes:
        quantity: One of :data:`QUANTITIES`, or "drop_rate_at".
        of: The side.
        against: The side whose value is subtracted, or None.
        above: The value must lie above.
        below: The value must lie below.
        gamma: Of "drop_rate_at".
        higher: Models (beginnings of their names) that must each lie above every one of ``lower``.
        lower: See ``higher``.
        every_gamma: Ask it of the side at every γ that there are records of.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    quantity: str
    of: Side = Side(method="baseline")
    against: Side | None = None
    above: float = -math.inf
    below: float = math.inf
    gamma: float | None = None
    higher: tuple[str, ...] = ()
    lower: tuple[str, ...] = ()
    every_gamma: bool = False

    @model_validator(mode="after")
    def _checked(self) -> LoadQuestion:
        known = (*QUANTITIES, "drop_rate_at")
        if self.quantity not in known:
            raise ValueError(f"quantity {self.quantity!r} is none of {', '.join(known)}")
        if not (self.higher or math.isfinite(self.above) or math.isfinite(self.below)):
            raise ValueError("needs above, below, or higher and lower")
        return self

    @property
    def reader(self) -> Callable[[Record], float | None]:
        """The function that reads the quantity from a record."""
        return QUANTITIES.get(self.quantity) or share_dropped_at(self.gamma or 0.0)

    def __str__(self) -> str:
        """Return the quantity and the sides, for people."""
        text = f"{self.quantity}{gamma_suffix(self.gamma)} of {self.of}"
        return text if self.against is None else f"{text} − {self.against}"


def load_values(
    question: LoadQuestion, evidence: Evidence
) -> dict[str, tuple[float, tuple[str, ...]]]:
    """Return the value of each model that has records, and their paths.

    It is the mean over the model's tasks, for a peak the highest of them.
    """
    asked = [side for side in (question.of, question.against) if side is not None]
    left_out = evidence.left_out(*asked) if len(asked) == 2 else []
    values = {}
    for model in evidence.models:
        if model in left_out:
            continue
        found, *others = (evidence.find(side, model) for side in asked)
        tasks, paths = [], set()
        for task in found:
            sides = [side[task] for side in (found, *others) if task in side]
            means = [_mean([question.reader(record) for record in side]) for side in sides]
            known = [mean for mean in means if mean is not None]
            if len(known) == len(asked):
                tasks.append(known[0] - sum(known[1:]))
                paths |= {str(record.path) for side in sides for record in side}
        if tasks:
            is_peak = question.quantity == "peak_before" and question.against is None
            value = max(tasks) if is_peak else sum(tasks) / len(tasks)
            values[model] = value, tuple(paths)
    return values


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present and len(present) == len(values) else None


def check(raw: Mapping[str, Any], evidence: Evidence) -> CheckResult:
    """Return what the load statistics say: true of every model, of none, or of some.

    Loads are counted, not sampled: they have no intervals, and a claim holds if it is true of every
    model present.

    Raises:
        ValueError: If the question cannot be read.
    """
    question = LoadQuestion.model_validate(raw)
    asked = [question]
    if question.every_gamma:
        factors = {g for model in evidence.models for g in evidence.gammas(question.of, model)}
        sides = [question.of.model_copy(update={"gamma": gamma}) for gamma in sorted(factors)]
        asked = [question.model_copy(update={"of": side}) for side in sides] or asked
    results = [_answer(one, evidence) for one in asked]
    return CheckResult(
        "load",
        weigh([result.outcome for result in results]),
        " ".join(result.text for result in results),
        tuple(found for result in results for found in result.findings),
    )


def _answer(question: LoadQuestion, evidence: Evidence) -> CheckResult:
    found = load_values(question, evidence)
    if not found:
        return CheckResult("load", Outcome.ABSENT, f"No records of: {question}.")
    values = {model: value for model, (value, _) in found.items()}
    fits, text = (_groups if question.higher else _bounds)(question, values)
    # Groups of which one has no records decide nothing.
    outcome = unanimous(fits) if fits else Outcome.UNDECIDED
    finding = Finding(
        str(question),
        outcome,
        sum(values.values()) / len(values),
        unit=question.quantity,
        models=values,
        records=tuple(sorted({path for _, paths in found.values() for path in paths})),
    )
    return CheckResult("load", outcome, f"{question}: {text}", (finding,))


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{model} {value:.3g}" for model, value in values.items())


def _bounds(question: LoadQuestion, values: Mapping[str, float]) -> tuple[list[bool], str]:
    fits = [question.above < value < question.below for value in values.values()]
    bounds = [("> ", question.above), ("< ", question.below)]
    asked = " and ".join(f"{sign}{bound:g}" for sign, bound in bounds if math.isfinite(bound))
    return fits, f"{_listed(values)}; asked {asked}, true of {sum(fits)} of {len(fits)} models."


def _groups(question: LoadQuestion, values: Mapping[str, float]) -> tuple[list[bool], str]:
    high, low = (
        {model: value for model, value in values.items() if model.startswith(names)}
        for names in (question.higher, question.lower)
    )
    text = f"{_listed(high) or 'none'} against {_listed(low) or 'none'}"
    if not high or not low:
        return [], f"{text}; one side has no records."
    fits = [first > second for first in high.values() for second in low.values()]
    return fits, f"{text}; the first is higher in {sum(fits)} of {len(fits)} pairs."


def check_promise(name: str, evidence: Evidence) -> CheckResult:
    """Return whether a promise was kept by every record to which it applies.

    Raises:
        ValueError: If no record can have such a promise.
    """
    if name not in Proofs.model_fields:
        raise ValueError(f"promise: {name!r} is none of {', '.join(Proofs.model_fields)}")
    passed = [(getattr(record.proofs, name).passed, record) for record in evidence.records]
    kept = sum(yes is True for yes, _ in passed)
    broken = tuple(str(record.path) for yes, record in passed if yes is False)
    if not kept and not broken:
        return CheckResult("promise", Outcome.ABSENT, f"No record to which {name} applies.")
    outcome = Outcome.FAILS if broken else Outcome.HOLDS
    text = f"{name}: kept in {kept} records, broken in {len(broken)}."
    finding = Finding(name, outcome, float(kept), unit="records", records=broken)
    return CheckResult("promise", outcome, text, (finding,))
