"""Quantities of the load statistics, and the promises that every record keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.record_part import Proofs
from capmoe_eval.paper.claims.evidence import Choice, Evidence
from capmoe_eval.paper.claims.finding import Detail, Finding
from capmoe_eval.paper.verdicts import Outcome


def _assignments(record: Record) -> int:
    return sum(layer.assignments for layer in record.layers)


def added_share(record: Record) -> float:
    """Return computed pairs beyond a token's own top-k, over all its top-k pairs."""
    return record.load.added / _assignments(record)


def computed_share(record: Record) -> float:
    """Return computed pairs over those of the dropless model."""
    total = _assignments(record)
    return (total - record.load.dropped + record.load.added) / total


def rank_ratio(record: Record) -> float | None:
    """Return the mean gate score of rank k+1 over rank k's, averaged over layers (Figure 8)."""
    ratios = []
    for layer in record.layers:
        scores, k = layer.score_by_rank, layer.top_k
        if scores and k < len(scores) and scores[k - 1]:
            ratios.append(scores[k] / scores[k - 1])
    return sum(ratios) / len(ratios) if ratios else None


def share_dropped_at(gamma: float) -> Callable[[Record], float | None]:
    """Return Equation 11's share of dropped pairs at γ, from the grid in a record."""

    def read(record: Record) -> float | None:
        dropped, total = 0.0, 0
        for layer in record.layers:
            if gamma not in layer.grid.gamma:
                return None
            dropped += layer.grid.drop_rate[layer.grid.gamma.index(gamma)] * layer.assignments
            total += layer.assignments
        return dropped / total

    return read


QUANTITIES: Final[Mapping[str, Callable[[Record], float | None]]] = {
    **{
        name: attrgetter(f"load.{name}")
        for name in (
            "drop_rate",
            "pad_waste",
            "peak_before",
            "peak_after",
            "mean_peak_before",
            "mean_peak_after",
        )
    },
    "added_share": added_share,
    "computed_share": computed_share,
    "rank_ratio": rank_ratio,
}
"""What a claim can ask of a record's load; ``drop_rate_at`` takes a γ besides."""


@dataclass(frozen=True)
class LoadQuestion:
    """A quantity of the load of some runs, alone or against that of others.

    Attributes:
        quantity: One of :data:`QUANTITIES`, or "drop_rate_at".
        of: The runs.
        against: Runs whose value is taken from it, or None.
        above: The value must lie above; None for no bound.
        below: The value must lie below.
        gamma: Of "drop_rate_at".
        higher: Models (beginnings of their names) that must each lie above every one of ``lower``.
        lower: See ``higher``.
    """

    quantity: str
    of: Choice
    against: Choice | None = None
    above: float | None = None
    below: float | None = None
    gamma: float | None = None
    higher: tuple[str, ...] = ()
    lower: tuple[str, ...] = ()

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> LoadQuestion:
        """Read a question.

        Raises:
            ValueError: If something of it is missing or unknown.
        """
        named = dict(raw)
        named["of"] = Choice.of(named.get("of", {"method": "baseline"}))
        if "against" in named:
            named["against"] = Choice.of(named["against"])
        for name in ("higher", "lower"):
            named[name] = tuple(named.get(name, ()))
        try:
            question = cls(**named)
        except TypeError as error:
            raise ValueError(f"load: {error}") from error
        if question.quantity not in QUANTITIES and question.quantity != "drop_rate_at":
            raise ValueError(
                f"load: quantity {question.quantity!r} is none of {', '.join(QUANTITIES)}"
            )
        if question.above is None and question.below is None and not question.higher:
            raise ValueError("load: needs above, below, or higher and lower")
        return question

    @property
    def reader(self) -> Callable[[Record], float | None]:
        """The function that reads the quantity from a record."""
        if self.quantity == "drop_rate_at":
            return share_dropped_at(float(self.gamma or 0.0))
        return QUANTITIES[self.quantity]

    @property
    def label(self) -> str:
        """The quantity and the runs, for people."""
        name = f"{self.quantity}{gamma_suffix(self.gamma)}"
        text = f"{name} of {self.of}"
        return text if self.against is None else f"{text} − {self.against}"


def check(raw: Mapping[str, Any], evidence: Evidence) -> Finding:
    """Return what the load statistics say: true of every model, of none, or of some.

    A model's value is the mean over its tasks, a peak the highest of them. Loads are counted, not
    sampled: they have no intervals, and a claim holds if it is true of every model present.

    Raises:
        ValueError: If the question cannot be read.
    """
    question = LoadQuestion.read(raw)
    values: dict[str, float] = {}
    paths: set[str] = set()
    for model in evidence.models:
        value, used = _value(question, evidence, model)
        if value is not None:
            values[model] = value
            paths |= used
    if not values:
        return Finding("load", Outcome.ABSENT, f"No records of: {question.label}.")
    outcome, text = _groups(question, values) if question.higher else _bounds(question, values)
    mean = sum(values.values()) / len(values)
    detail = Detail(
        question.label, mean, unit=question.quantity, models=values, records=tuple(sorted(paths))
    )
    return Finding("load", outcome, text, (detail,))


def _value(question: LoadQuestion, evidence: Evidence, model: str) -> tuple[float | None, set[str]]:
    asked = [choice for choice in (question.of, question.against) if choice is not None]
    found, *others = (evidence.find(choice, model) for choice in asked)
    values, paths = [], set()
    for task in found:
        sides = [side[task] for side in (found, *others) if task in side]
        means = [_mean([question.reader(record) for record in side]) for side in sides]
        known = [mean for mean in means if mean is not None]
        if len(known) == len(asked):
            values.append(known[0] - sum(known[1:]))
            paths |= {str(record.path) for side in sides for record in side}
    if not values:
        return None, set()
    if question.quantity in ("peak_before", "peak_after") and question.against is None:
        return max(values), paths
    return sum(values) / len(values), paths


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present and len(present) == len(values) else None


def _bounds(question: LoadQuestion, values: Mapping[str, float]) -> tuple[Outcome, str]:
    fits = [
        (question.above is None or value > question.above)
        and (question.below is None or value < question.below)
        for value in values.values()
    ]
    bounds = [
        *([f"> {question.above:g}"] if question.above is not None else []),
        *([f"< {question.below:g}"] if question.below is not None else []),
    ]
    listed = ", ".join(f"{model} {value:.3g}" for model, value in values.items())
    text = (
        f"{question.label}: {listed}; asked {' and '.join(bounds)}, true of {sum(fits)} of "
        f"{len(fits)} models."
    )
    return _of_models(fits), text


def _groups(question: LoadQuestion, values: Mapping[str, float]) -> tuple[Outcome, str]:
    def group(prefixes: Sequence[str]) -> dict[str, float]:
        return {m: v for m, v in values.items() if m.startswith(tuple(prefixes))}

    high, low = group(question.higher), group(question.lower)
    listed = " against ".join(
        ", ".join(f"{model} {value:.3g}" for model, value in side.items()) or "none"
        for side in (high, low)
    )
    text = f"{question.label}: {listed}"
    if not high or not low:
        return Outcome.UNDECIDED, f"{text}; one side has no records."
    fits = [first > second for first in high.values() for second in low.values()]
    return _of_models(fits), f"{text}; the first is higher in {sum(fits)} of {len(fits)} pairs."


def _of_models(fits: Sequence[bool]) -> Outcome:
    if all(fits):
        return Outcome.HOLDS
    return Outcome.UNDECIDED if any(fits) else Outcome.FAILS


def check_promise(name: str, evidence: Evidence) -> Finding:
    """Return whether a promise was kept by every record to which it applies.

    Raises:
        ValueError: If no record can have such a promise.
    """
    if name not in Proofs.model_fields:
        raise ValueError(f"promise: {name!r} is none of {', '.join(Proofs.model_fields)}")
    kept, broken = 0, []
    for record in evidence.records:
        passed = getattr(record.proofs, name).passed
        kept += passed is True
        broken += [str(record.path)] if passed is False else []
    if not kept and not broken:
        return Finding("promise", Outcome.ABSENT, f"No record to which {name} applies.")
    text = f"{name}: kept in {kept} records, broken in {len(broken)}."
    outcome = Outcome.FAILS if broken else Outcome.HOLDS
    return Finding(
        "promise",
        outcome,
        text,
        (Detail(name, float(kept), unit="records", records=tuple(broken)),),
    )
