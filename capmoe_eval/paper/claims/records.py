"""Checks of claims by records: published values, load statistics, and invariants."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.record_part import Proofs
from capmoe_eval.paper.contrasts import Expectation
from capmoe_eval.paper.evidence import Evidence, Side
from capmoe_eval.paper.layout import ALL_TASKS, LAYOUTS
from capmoe_eval.paper.nulls import uniform_bound
from capmoe_eval.paper.printed import PrintedRow, find_rows
from capmoe_eval.paper.statistics import binomial_tail
from capmoe_eval.paper.verdicts import (
    BEYOND,
    LEVEL,
    CheckResult,
    Finding,
    Outcome,
    unanimous,
    weigh,
)

_TASKS: Final = {column.heading: column.task for column in ALL_TASKS}


def check_value(where: Mapping[str, Any], evidence: Evidence) -> CheckResult:
    """Compare rows of a printed table with records of the same checkpoints, number by number.

    z is the difference over the standard error of a difference of two runs, each with ours: the
    paper prints none, and it asked as many documents. Only profile paper has these checkpoints. A
    row that the paper does not print is a LookupError.
    """
    rows = find_rows(where)
    if evidence.profile != "paper":
        names = ", ".join(dict.fromkeys(row.model for row in rows))
        text = f"Needs the weights of {names}: profile=paper compares."
        return CheckResult("value", Outcome.IMPOSSIBLE, text)
    findings: list[Finding] = []
    # By number: the size of its z, its difference and our standard error.
    compared: list[tuple[float, float, float]] = []
    for row in rows:
        model, side = _counterpart(row)
        by_task = evidence.find(side, model)
        for heading, printed in row.tasks.items():
            records = by_task.get(_TASKS[heading], [])
            if not records or any(record.stderr is None for record in records):
                continue
            ours = 100 * sum(record.value for record in records) / len(records)
            error = 100 * sum(record.stderr or 0.0 for record in records) / len(records)
            z = (ours - printed) / (math.sqrt(2) * error) if error else math.inf
            label = f"{row.label} {heading}: printed {printed:g}, z = {z:+.2f}"
            path = str(records[0].path)
            findings.append(
                Finding(label, Outcome.UNDECIDED, ours, unit="percent", records=(path,))
            )
            compared.append((abs(z), ours - printed, error))
    cells = sum(len(row.tasks) for row in rows)
    if not compared:
        return CheckResult("value", Outcome.ABSENT, f"None of {cells} numbers has a record.")
    sizes, gaps, errors = zip(*compared, strict=True)
    beyond = sum(z >= BEYOND for z in sizes)
    worst = findings[sizes.index(max(sizes))]
    mean = sum(gaps) / len(gaps)
    reach = BEYOND * math.sqrt(2 * sum(error**2 for error in errors)) / len(gaps)
    text = (
        f"{len(compared)} of {cells} numbers have records; {beyond} differ by {BEYOND} standard "
        f"errors or more, {0.05 * len(compared):.1f} would by chance; the mean difference is "
        f"{mean:+.2f} ± {reach:.2f} points. Furthest: {worst.label}, ours {worst.effect:.1f}."
    )
    # A whole table fails if too many numbers lie beyond; it holds only if, besides, the mean
    # difference is known to be within the margin.
    outcome = Outcome.UNDECIDED
    if len(compared) == cells:
        tail = binomial_tail(beyond, cells, 0.05)
        within = Expectation.of({"within": "comparable"}).judge(mean - reach, mean + reach)
        outcome = Outcome.FAILS if tail < LEVEL else within
    return CheckResult("value", outcome, text, tuple(findings))


def _counterpart(row: PrintedRow) -> tuple[str, Side]:
    """Return the model and the side that a printed row is of, by the layout of its table."""
    for layout in LAYOUTS:
        for slot, spec in itertools.product(layout.paper_models, itertools.chain(*layout.blocks)):
            with contextlib.suppress(LookupError):
                if layout.printed(slot, spec) is row:
                    fields = {"method": spec.method, "gamma": spec.gamma_on(slot), **spec.knobs}
                    return slot.key, Side.model_validate(fields)
    raise LookupError(f"{row.label}: no counterpart here")


# Fields of a record's load, and what follows from a record (:func:`_quantity`).
_Recorded = Literal["drop_rate", "pad_waste", "peak_before", "mean_peak_before"]
_Derived = Literal["added_share", "computed_share", "imbalance_after", "drop_rate_at"]


class LoadQuestion(BaseModel):
    """A quantity of the load of a side, alone or against that of another."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    quantity: Literal[_Recorded, _Derived]
    of: Side = Side(method="baseline")
    against: Side | None = None  # the side whose value is subtracted
    above: float = -math.inf  # the value must lie above
    below: float = math.inf  # the value must lie below
    gamma: float | None = None  # of "drop_rate_at"
    # Models (beginnings of their names) that must each lie above every one of ``lower``.
    higher: tuple[str, ...] = ()
    lower: tuple[str, ...] = ()
    beyond_uniform: bool = False  # subtract what a uniform router exceeds in 5 % of simulations
    every_gamma: bool = False  # ask it of the side at every γ that there are records of

    @model_validator(mode="after")
    def _checked(self) -> LoadQuestion:
        if not (self.higher or math.isfinite(self.above) or math.isfinite(self.below)):
            raise ValueError("needs above, below, or higher and lower")
        return self

    def __str__(self) -> str:
        """Return the quantity and the sides, for people."""
        beyond = " beyond a uniform router's" if self.beyond_uniform else ""
        text = f"{self.quantity}{gamma_suffix(self.gamma)} of {self.of}{beyond}"
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
        case "imbalance_after":  # the fullest expert's pairs over the mean, of those computed
            return load.mean_peak_after / (1 + (load.added - load.dropped) / pairs)
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
            if not question.beyond_uniform or value is None or load.mean_load is None:
                return None if question.beyond_uniform else value
            sizes = layers[0].n_experts, layers[0].top_k, load.mean_load
            return value - uniform_bound(name, *sizes)


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present and len(present) == len(values) else None


def _values(question: LoadQuestion, evidence: Evidence) -> tuple[dict[str, float], set[str]]:
    """Return the value of each model that has records, and the paths of the records.

    It is the mean over the model's tasks, for a peak the highest of them.
    """
    sides = [side for side in (question.of, question.against) if side is not None]
    left_out = evidence.left_out(sides[0], sides[-1])
    is_peak = question.quantity == "peak_before" and question.against is None
    values, paths = {}, set()
    for model in evidence.models:
        layer = evidence.layer(model)
        # No expert can have more than all tokens.
        beyond_reach = is_peak and layer.n_experts / layer.top_k <= question.above
        if model in left_out or beyond_reach:
            continue
        tasks = []
        for by_side in evidence.find_tasks(sides, model):
            means = [_mean([_quantity(question, record) for record in side]) for side in by_side]
            present = [mean for mean in means if mean is not None]
            if len(present) == len(sides):
                tasks.append(present[0] - sum(present[1:]))
                paths |= {str(record.path) for side in by_side for record in side}
        if tasks:
            values[model] = max(tasks) if is_peak else sum(tasks) / len(tasks)
    return values, paths


def check_load(raw: Mapping[str, Any], evidence: Evidence) -> CheckResult:
    """Return what the load statistics say: true of every model, of none, or of some.

    Loads are counted, not sampled: they have no intervals, and a claim holds if it is true of every
    model present. A question that cannot be read is a ValueError.
    """
    question = LoadQuestion.model_validate(raw)
    questions = [question]
    if question.every_gamma:
        factors = {g for model in evidence.models for g in evidence.gammas(question.of, model)}
        sides = [question.of.model_copy(update={"gamma": gamma}) for gamma in sorted(factors)]
        questions = [question.model_copy(update={"of": side}) for side in sides] or questions
    results = [_answer(question, evidence) for question in questions]
    outcome = weigh([result.outcome for result in results])
    findings = tuple(finding for result in results for finding in result.findings)
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
        text = f"{_listed(high)} against {_listed(low)}; "
        text += f"{count if fits else 'one side has no records'}."
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


def check_invariant(name: str, evidence: Evidence) -> CheckResult:
    """Return whether an invariant held in every record to which it applies.

    One that no record can have is a ValueError.
    """
    if name not in Proofs.model_fields:
        raise ValueError(f"invariant: {name!r} is none of {', '.join(Proofs.model_fields)}")
    paths: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    for record in evidence.records:
        proof = getattr(record.proofs, name)
        paths[proof and proof.passed].append(str(record.path))
    kept, broken = paths[True], paths[False]
    if not kept and not broken:
        return CheckResult("invariant", Outcome.ABSENT, f"No record to which {name} applies.")
    outcome = Outcome.FAILS if broken else Outcome.HOLDS
    text = f"{name}: kept in {len(kept)} records, broken in {len(broken)}."
    finding = Finding(name, outcome, float(len(kept)), unit="records", records=tuple(broken))
    return CheckResult("invariant", outcome, text, (finding,))
