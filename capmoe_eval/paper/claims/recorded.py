"""Checks of claims by records: published values, load statistics, and invariants."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.experiment.record_part import Proofs
from capmoe_eval.paper.contrasts import Expectation
from capmoe_eval.paper.evidence import Evidence, Side
from capmoe_eval.paper.layout import ALL_TASKS, LAYOUTS
from capmoe_eval.paper.nulls import uniform_bound
from capmoe_eval.paper.printed import PrintedRow, find_rows
from capmoe_eval.paper.statistics import binomial_tail
from capmoe_eval.paper.verdicts import BEYOND, LEVEL, Finding, Outcome, unanimous, weigh

if TYPE_CHECKING:
    import pandas as pd

_TASKS: Final = {column.heading: column.task for column in ALL_TASKS}


def check_value(where: Mapping[str, Any], evidence: Evidence) -> list[Finding]:
    """Compare rows of a printed table with records of the same checkpoints, number by number.

    z is the difference over the standard error of a difference of two runs, each with ours: the
    paper prints none, and it asked as many documents. Only profile paper has these checkpoints. A
    row that the paper does not print is a LookupError.
    """
    rows = find_rows(where)
    if evidence.profile != "paper":
        names = ", ".join(dict.fromkeys(row.model for row in rows))
        text = f"Needs the weights of {names}: profile=paper compares."
        return [Finding(verdict=Outcome.IMPOSSIBLE, text=text)]
    findings: list[Finding] = []
    # By number: the size of its z, its difference and our standard error.
    compared: list[tuple[float, float, float]] = []
    for row in rows:
        model, side = _counterpart(row)
        cells = evidence.pick(side, model)
        for heading, printed in row.tasks.items():
            of_task = cells[cells["task"] == _TASKS[heading]]
            if of_task.empty or of_task["stderr"].isna().any():
                continue
            ours, error = (100 * of_task[name].mean() for name in ("value", "stderr"))
            z = (ours - printed) / (math.sqrt(2) * error) if error else math.inf
            label = f"{row.label} {heading}: printed {printed:g}, z = {z:+.2f}"
            about: dict[str, Any] = {"effect": ours, "records": (of_task["path"].iloc[0],)}
            finding = Finding(label=label, verdict=Outcome.UNDECIDED, unit="percent", **about)
            findings.append(finding)
            compared.append((abs(z), ours - printed, error))
    numbers = sum(len(row.tasks) for row in rows)
    if not compared:
        text = f"None of {numbers} numbers has a record."
        return [Finding(verdict=Outcome.ABSENT, text=text)]
    sizes, gaps, errors = zip(*compared, strict=True)
    beyond = sum(z >= BEYOND for z in sizes)
    worst = findings[sizes.index(max(sizes))]
    mean = sum(gaps) / len(gaps)
    reach = BEYOND * math.sqrt(2 * sum(error**2 for error in errors)) / len(gaps)
    text = (
        f"{len(compared)} of {numbers} numbers have records; {beyond} differ by {BEYOND} standard "
        f"errors or more, {0.05 * len(compared):.1f} would by chance; the mean difference is "
        f"{mean:+.2f} ± {reach:.2f} points. Furthest: {worst.label}, ours {worst.effect:.1f}."
    )
    # A whole table fails if too many numbers lie beyond; it holds only if, besides, the mean
    # difference is known to be within the margin.
    outcome = Outcome.UNDECIDED
    if len(compared) == numbers:
        tail = binomial_tail(beyond, numbers, 0.05)
        within = Expectation.of({"within": "comparable"}).judge(mean - reach, mean + reach)
        outcome = Outcome.FAILS if tail < LEVEL else within
    return [Finding(verdict=outcome, text=text), *findings]


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


def _quantity(question: LoadQuestion, cells: pd.DataFrame, layers: pd.DataFrame) -> pd.Series:
    """Return the quantity that is asked for, of each cell; NaN where it does not have it."""
    added, dropped = (cells[f"load.{name}"] / cells["pairs"] for name in ("added", "dropped"))
    match question.quantity:
        case "added_share":  # computed pairs beyond a token's top-k, over all its top-k pairs
            return added
        case "computed_share":  # computed pairs over those of the dropless model
            return 1 + (added - dropped)
        case "imbalance_after":  # the fullest expert's pairs over the mean, of those computed
            return cells["load.mean_peak_after"] / (1 + (added - dropped))
        case "drop_rate_at":  # Equation 11's share of dropped pairs at γ, from the record's grids
            of_cells = layers[layers["cell"].isin(cells["cell"])]
            columns = ["grid.gamma", "grid.drop_rate"]
            grid = of_cells[["cell", "assignments", *columns]].explode(columns)
            grid = grid[grid["grid.gamma"] == question.gamma]
            pairs = (grid["grid.drop_rate"] * grid["assignments"]).groupby(grid["cell"]).sum()
            has_all = grid["cell"].value_counts() == of_cells["cell"].value_counts()
            dropped = cells["cell"].map(pairs[has_all.reindex(pairs.index)]).astype(float)
            return dropped / cells["pairs"]
        case name:
            values = cells[name if name in cells else f"load.{name}"]
            if question.beyond_uniform:
                sizes = cells[["n_experts", "top_k", "load.mean_load"]].itertuples(index=False)
                bounds = [
                    math.nan if math.isnan(load) else uniform_bound(name, experts, top_k, load)
                    for experts, top_k, load in sizes
                ]
                values = values - bounds
            return values


def _values(question: LoadQuestion, evidence: Evidence) -> tuple[dict[str, float], set[str]]:
    """Return the value of each model that has records, and the paths of the records.

    It is the mean over the model's tasks, for a peak the highest of them.
    """
    sides = [side for side in (question.of, question.against) if side is not None]
    left_out = evidence.left_out(sides[0], sides[-1])
    is_peak = question.quantity == "peak_before" and question.against is None
    values: dict[str, float] = {}
    paths: set[str] = set()
    for model, deployed in evidence.deployments.items():
        # No expert can have more than all tokens.
        beyond_reach = is_peak and deployed["n_experts"] / deployed["top_k"] <= question.above
        if model in left_out or beyond_reach:
            continue
        picked = evidence.shared(sides, model)
        means = [
            _quantity(question, cells, evidence.results.layers)
            .groupby(cells["task"])
            .agg(lambda of_task: of_task.mean(skipna=False))
            for cells in picked
        ]
        tasks = (means[0] - sum(means[1:])).dropna()
        if len(tasks):
            paths |= {p for cells in picked for p in cells["path"][cells["task"].isin(tasks.index)]}
            values[model] = float(tasks.max() if is_peak else tasks.mean())
    return values, paths


def check_load(raw: Mapping[str, Any], evidence: Evidence) -> list[Finding]:
    """Return what the load statistics say: true of every model, of none, or of some.

    Loads are counted, not sampled: they have no intervals, and a claim holds if it is true of every
    model present. A question that cannot be read is a ValueError.
    """
    question = LoadQuestion.model_validate(raw)
    questions = [question]
    if question.every_gamma:
        sides = [question.of.at(g) for g in evidence.gammas(question.of, *evidence.models)]
        questions = [question.model_copy(update={"of": side}) for side in sides] or questions
    answers = [_answer(question, evidence) for question in questions]
    text = " ".join(check.text for check, *_ in answers)
    verdict = weigh(check for check, *_ in answers)
    findings = [finding for _, *findings in answers for finding in findings]
    return [Finding(verdict=verdict, text=text), *findings]


def _answer(question: LoadQuestion, evidence: Evidence) -> list[Finding]:
    values, paths = _values(question, evidence)
    if not values:
        return [Finding(verdict=Outcome.ABSENT, text=f"No records of: {question}.")]
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
    about: dict[str, Any] = {"effect": fmean(values.values()), "unit": question.quantity}
    about |= {"models": values, "records": tuple(sorted(paths))}
    check = Finding(verdict=outcome, text=f"{question}: {text}")
    return [check, Finding(label=str(question), verdict=outcome, **about)]


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{model} {value:.3g}" for model, value in values.items()) or "none"


def check_invariant(name: str, evidence: Evidence) -> list[Finding]:
    """Return whether an invariant held in every record to which it applies.

    One that no record can have is a ValueError.
    """
    if name not in Proofs.model_fields:
        raise ValueError(f"invariant: {name!r} is none of {', '.join(Proofs.model_fields)}")
    cells = evidence.results.cells
    passed = cells[f"proofs.{name}"]
    kept, broken = (cells["path"][passed.isin([is_kept])] for is_kept in (True, False))
    if kept.empty and broken.empty:
        return [Finding(verdict=Outcome.ABSENT, text=f"No record to which {name} applies.")]
    outcome = Outcome.HOLDS if broken.empty else Outcome.FAILS
    text = f"{name}: kept in {len(kept)} records, broken in {len(broken)}."
    about: dict[str, Any] = {"effect": float(len(kept)), "records": tuple(broken)}
    return [
        Finding(verdict=outcome, text=text),
        Finding(label=name, verdict=outcome, unit="records", **about),
    ]
