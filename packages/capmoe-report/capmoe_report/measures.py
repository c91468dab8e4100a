"""Checks of claims by quantities: loads, invariants, training seeds, the paper's own values."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any, Final, Literal

import numpy as np
from capmoe_eval.experiment.files import read_data
from capmoe_eval.experiment.names import family, gamma_suffix
from capmoe_eval.lazy import pd
from capmoe_eval.paper.layout import ALL_TASKS, LAYOUTS
from capmoe_eval.paper.pairing import answered_by_cells, pair
from capmoe_eval.paper.printed import PrintedRow, figure, find_rows
from capmoe_eval.paper.statistics import binomial_tail, mean_interval
from pydantic import BaseModel, ConfigDict

from capmoe_report.evidence import TRAININGS, Evidence, Side, clauses_by_family, not_paired
from capmoe_report.margins import Expectation
from capmoe_report.verdicts import BEYOND, LEVEL, Finding, Outcome, unanimous, weigh

# Columns of cells, what follows from them, and what is counted otherwise (:data:`_COUNTED`).
_Column = Literal["drop_rate", "pad_waste", "peak_before", "mean_peak_before"]
_Derived = Literal["added_share", "computed_share", "imbalance_after", "drop_rate_at"]
_Counted = Literal["answers_changed", "next_tokens_changed", "step_over_noise", "text_dropped"]
_FORMULAS: Final = {
    "mean_peak_before": "`load.mean_peak_before`",
    # computed pairs beyond a token's top-k, over all its top-k pairs
    "added_share": "`load.added` / pairs",
    # computed pairs over those of the dropless model
    "computed_share": "1 + (`load.added` / pairs - `load.dropped` / pairs)",
    # the fullest expert's pairs over the mean, of those computed
    "imbalance_after": "`load.mean_peak_after` / (1 + (`load.added` - `load.dropped`) / pairs)",
    "text_dropped": "`load.modalities.text.drop_rate`",
}
"""Quantities of cells, where they are no column, as expressions over their columns."""

_COIN: Final = ("piqa", "rte", "winogrande", "boolq")  # tasks of two answers; others have four
_TASKS: Final = {column.heading: column.task for column in ALL_TASKS}
_SIMULATIONS: Final = 2000


class Question(BaseModel):
    """A quantity of a side, alone or against that of another, and where it must lie."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    quantity: Literal[_Column, _Derived, _Counted]
    of: Side = Side(method="baseline")
    against: Side | None = None  # the side whose value is subtracted
    above: float = -math.inf  # the value must lie above
    below: float = math.inf  # the value must lie below
    at_most: float = math.inf  # the value may be that
    label: str = ""  # a template of the sides, where the quantity's name says too little
    unit: str = ""  # the quantity's name where it is empty
    scale: float = 1.0  # of the unit: 100 for percent
    gamma: float | None = None  # of "drop_rate_at"
    # Models (beginnings of their names) that must each lie above every one of ``lower``.
    higher: tuple[str, ...] = ()
    lower: tuple[str, ...] = ()
    beyond_uniform: bool = False  # subtract what a uniform router exceeds in 5 % of simulations
    every_gamma: bool = False  # ask it of the side at every γ that there are records of

    def __str__(self) -> str:
        """Return the quantity and the sides, for people."""
        if self.label:
            return self.label.format(of=self.of, against=self.against)
        beyond = " beyond a uniform router's" if self.beyond_uniform else ""
        text = f"{self.quantity}{gamma_suffix(self.gamma)} of {self.of}{beyond}"
        return text if self.against is None else f"{text} − {self.against}"


def load(raw: Mapping[str, Any], evidence: Evidence) -> list[Finding]:
    """Return what a question of load says: true of every model, of none, or of some.

    Loads are counted, not sampled: they have no intervals, and a claim holds if it is true of every
    model present. It speaks of these models alone where so few families would agree by chance
    (sign test).
    """
    question = Question.model_validate(raw)
    questions = [question]
    if question.every_gamma:
        sides = [question.of.at(g) for g in evidence.gammas(question.of, *evidence.models)]
        questions = [question.model_copy(update={"of": side}) for side in sides] or questions
    return _all_of([_answer(question, evidence) for question in questions])


def measure(name: str, evidence: Evidence) -> list[Finding]:
    """Return what the measure of a name says; ``balance`` has its own test, others ask loads."""
    if name == balance.__name__:
        return balance(evidence.trainings)
    questions = read_data(__package__, "data/measures.yaml", dict[str, tuple[Question, ...]])
    return _all_of([_answer(question, evidence) for question in questions[name]])


def _all_of(answers: Iterable[Sequence[Finding]]) -> list[Finding]:
    """Return the check of several questions, of which all must hold, and their findings."""
    checks, findings = zip(*answers, strict=True)
    text = " ".join(check.text for check in checks)
    return [Finding(verdict=weigh(findings), text=text), *findings]


def _answer(question: Question, evidence: Evidence) -> list[Finding]:
    """Return the check of a question, and its finding."""
    counted = _COUNTED.get(question.quantity, _of_cells)(question, evidence)
    values, label = counted.models, str(question)
    about: dict[str, Any] = {"label": label, "unit": question.unit or question.quantity}
    if not values:
        check = Finding(verdict=Outcome.ABSENT, text=f"No records of: {question}.")
        return [check, Finding(verdict=Outcome.ABSENT, **about)]
    if question.higher:
        high, low = (
            {model: value for model, value in values.items() if model.startswith(names)}
            for names in (question.higher, question.lower)
        )
        fits = [first > second for first in high.values() for second in low.values()]
        count = f"the first is higher in {sum(fits)} of {len(fits)} pairs"
        text = f"{_listed(high)} against {_listed(low)}; "
        text += f"{count if fits else 'one side has no records'}."
        # Groups of which one has no records decide nothing.
        outcome = unanimous(fits) if fits else Outcome.UNDECIDED
    else:
        bounds = [(">", question.above), ("<", question.below), ("≤", question.at_most)]
        asked = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if math.isfinite(bound))
        fits = [
            question.above < value < question.below and value <= question.at_most
            for value in values.values()
        ]
        text = f"{_listed(values)}; asked {asked}, true of {sum(fits)} of {len(fits)} "
        text += f"models{f' ({counted.note})' if counted.note else ''}."
        outcome = unanimous(fits)
        outcome = counted.verdict if outcome is Outcome.FAILS else outcome
    about |= {"effect": fmean(values.values()), "verdict": outcome}
    about["conditional"] = 0.5 ** len(set(map(family, values))) >= LEVEL
    about["records"] = tuple(sorted(set(counted.records)))
    return [Finding(verdict=outcome, text=f"{label}: {text}"), counted.model_copy(update=about)]


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{model} {value:.3g}" for model, value in values.items()) or "none"


def _counted(
    values: Mapping[str, float], records: Iterable[str], note: str = "", *, refutes: bool = True
) -> Finding:
    """Return the value of each model, and whether values beyond the bounds refute a claim."""
    verdict = Outcome.FAILS if refutes else Outcome.UNDECIDED
    return Finding(verdict=verdict, models=values, records=tuple(records), note=note)


def _of_cells(question: Question, evidence: Evidence) -> Finding:
    """Return the mean of a quantity over each model's tasks, for a peak the highest of them."""
    sides = [side for side in (question.of, question.against) if side is not None]
    left_out = evidence.left_out(sides[0], sides[-1])
    is_peak = question.quantity == "peak_before" and question.against is None
    models = [
        model
        for model, deployed in evidence.deployments.items()
        if model not in left_out
        # No expert can have more than all tokens.
        and not (is_peak and deployed["n_experts"] / deployed["top_k"] <= question.above)
    ]
    picked = [evidence.pick(side, *models) for side in sides]
    if any(cells.empty for cells in picked):
        return _counted({}, [])
    means = [
        _of_cell(question, cells, evidence.results.layers)
        .groupby([cells["model"], cells["task"]])
        .agg(lambda of_task: of_task.mean(skipna=False))
        for cells in picked
    ]
    of_tasks = (means[0] - sum(means[1:])).dropna()
    of_models = of_tasks.groupby("model").agg("max" if is_peak else "mean") * question.scale
    paths = [
        path
        for cells in picked
        for *names, path in cells[["model", "task", "path"]].itertuples(index=False)
        if tuple(names) in of_tasks
    ]
    return _counted({model: of_models[model] for model in models if model in of_models}, paths)


def _of_cell(question: Question, cells: pd.DataFrame, layers: pd.DataFrame) -> Any:
    """Return the quantity that is asked for, of each cell; NaN where it does not have it."""
    if question.quantity == "drop_rate_at":  # Equation 11's share of dropped pairs at γ
        layers = layers[layers["cell"].isin(cells["cell"])]
        grids = zip(layers["grid.gamma"], layers["grid.drop_rate"], strict=True)
        rates = [dict(zip(*grid, strict=True)).get(question.gamma, math.nan) for grid in grids]
        of_cells = (layers["assignments"] * rates).groupby(layers["cell"])
        dropped = of_cells.agg(lambda of_layers: of_layers.sum(skipna=False))
        return cells["cell"].map(dropped).astype(float) / cells["pairs"]
    values: Any = cells.eval(_FORMULAS.get(question.quantity, question.quantity))
    if question.beyond_uniform:
        sizes = cells[["n_experts", "top_k", "load.mean_load"]].itertuples(index=False)
        values = values - [uniform_bound(question.quantity, *size) for size in sizes]
    return values


def _text_dropped(question: Question, evidence: Evidence) -> Finding:
    """Return the share of text pairs that are dropped (Appendix C).

    The paper speaks of queries of which text is a small part: a model whose queries have a larger
    part of text than Figure 10 refutes nothing.
    """
    counted = _of_cells(question, evidence)
    small = sum(figure("fig10_text_pixels_pm0.03")) / sum(figure("fig10_total_pixels_pm0.03"))
    cells = evidence.pick(question.of, *counted.models).set_index("model")
    text, image = (cells[f"load.modalities.{name}.tokens"] for name in ("text", "image"))
    shares = dict(text / (text + image))
    texts = ", ".join(f"{model} {share:.1%}" for model, share in shares.items())
    note = f"text is of all tokens: {texts}; Figure 10: {small:.1%}" if texts else ""
    is_small = all(share <= small for share in shares.values())
    return _counted(counted.models, counted.records, note, refutes=is_small)


def _step_over_noise(question: Question, evidence: Evidence) -> Finding:
    """Return the step of gate scores from rank K to K+1 over that of a random router (Figure 8).

    The step is the logarithm of the scores' ratio. Noise is that of Gaussian router logits whose
    scores fall as fast inside the top-k; it has no cliff behind it either. A step that is smaller
    than the mean step inside the top-k is no cliff, and refutes nothing.
    """
    values, tails, has_cliff = {}, {}, True
    records = evidence.pick(question.of, *evidence.models)
    layers = records[["cell", "model"]].merge(evidence.results.layers, on="cell")
    layers = layers[layers["score_by_rank"].notna() & (layers["top_k"] > 1)]
    for model, of_model in layers.groupby("model", sort=False):
        k = of_model["top_k"].iloc[0]
        scores = np.stack(of_model["score_by_rank"])  # [layers, experts]
        scores = scores[scores[:, k] > 0]
        if len(scores):
            first, last, behind = np.log(scores[:, [0, k - 1, k]]).T
            step, fall = (last - behind).mean(), (first - last).mean() / (k - 1)
            noise = noise_step(of_model["n_experts"].iloc[0], k, max(fall, 1e-3))
            values[str(model)] = step / noise
            tails[str(model)] = math.exp(-step), math.exp(-noise)
            has_cliff &= bool(step >= fall)
    ranks = clauses_by_family(tails, "{}, noise {}", ("{:.2f}", "{:.2f}"))
    note = f"score of rank K+1 over that of rank K: {ranks}" if ranks else ""
    return _counted(values, records["path"], note, refutes=has_cliff)


def _answers_changed(question: Question, evidence: Evidence) -> Finding:
    """Return the percent of answers that differ between two compositions of the batches."""
    cells = evidence.pick(question.of, *evidence.models)
    shares: dict[str, list[float]] = {}
    for (model, task), runs in answered_by_cells(evidence.results, cells).items():
        flips = []
        for first, second in itertools.combinations(runs, 2):
            paired = pair([first], [second])
            if isinstance(paired, str):
                raise not_paired(model, task, paired)
            flips.append(paired.flips)
        if flips:
            shares.setdefault(model, []).append(fmean(flips))
    values = {model: question.scale * fmean(of_tasks) for model, of_tasks in shares.items()}
    return _counted(values, cells["path"][cells["model"].isin(shares)])


def _next_tokens_changed(question: Question, evidence: Evidence) -> Finding:
    """Return the percent of next tokens that the order of a batch's sequences changes.

    Judged are batches whose sequences begin with distinct tokens. Of equal gate scores, which
    sequences that begin alike have, the order decides; the note has the share where they occur.
    """
    columns = ["model", "method", "ranks", "is_distinct", "changed"]
    file = evidence.bench.evaluations.get("permutation", {})
    rows = pd.DataFrame(file.get("permutations", []), columns=columns)
    is_split = question.of.knobs.get("ep_size") != 1
    rows = rows[(rows["method"] == question.of.method) & ((rows["ranks"] > 1) == is_split)]
    means = question.scale * rows.groupby(["is_distinct", "model"])["changed"].mean()
    distinct, alike = (
        {m: float(means[kind, m]) for m in evidence.models if (kind, m) in means}
        for kind in (True, False)
    )
    texts = ", ".join(f"{model} {share:.1f} %" for model, share in alike.items())
    note = f"with prompts as they are, which begin alike: {texts}" if texts else ""
    return _counted(distinct, [str(evidence.bench.folder / "permutation.json")], note)


_COUNTED: Final[Mapping[str, Callable[[Question, Evidence], Finding]]] = {
    "answers_changed": _answers_changed,
    "next_tokens_changed": _next_tokens_changed,
    "step_over_noise": _step_over_noise,
    "text_dropped": _text_dropped,
}


def balance(trainings: pd.DataFrame) -> list[Finding]:
    """Compare trainings from scratch with upcycled ones of equal seeds (Figures 1, 2, 13).

    A training counts if its model answers better than chance does. The interval over the seeds is
    Student's.
    """
    findings = []
    for (name, steps), study in trainings.groupby(["name", "steps"], sort=False):
        able = study[study.apply(_is_better_than_chance, axis="columns")]
        peaks = able.assign(peak=able["peaks"].map(fmean)).pivot(
            index="seed", columns="origin", values="peak"
        )
        both = peaks.reindex(columns=["scratch", "upcycled"]).dropna()
        gaps = {f"seed {seed}": scratch - upcycled for seed, scratch, upcycled in both.itertuples()}
        left_out = len(study) - len(able)
        note = f"{left_out} trainings of {name} are left out: not above chance" if left_out else ""
        label = f"{name}: peak load from scratch − upcycled, {len(gaps)} seeds of {steps} steps"
        about: dict[str, Any] = {"label": label, "note": note, "models": gaps}
        outcome = Outcome.ABSENT
        if (interval := mean_interval([*gaps.values()])) is not None:
            mean, low, high = interval
            outcome = Expectation.of("greater").judge(low, high)
            about |= {"effect": mean, "low": low, "high": high, "records": (str(TRAININGS),)}
        findings.append(Finding(verdict=outcome, unit="× the mean load", **about))
    if not findings:
        label = "peak load from scratch − upcycled"
        findings = [Finding(label=label, verdict=Outcome.ABSENT)]
    return [Finding(verdict=weigh(findings)), *findings]


def _is_better_than_chance(training: pd.Series[Any]) -> bool:
    """Return whether the answers to all tasks are better than chance (binomial, p < 5 %)."""
    accuracy, documents = training["accuracy"], training["documents"]
    if not accuracy:  # it is not known
        return False
    right = sum(round(percent / 100 * documents) for percent in accuracy.values())
    chance = fmean(0.5 if task in _COIN else 0.25 for task in accuracy)
    return binomial_tail(right, documents * len(accuracy), chance) < LEVEL


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
    numbers, compared = sum(len(row.tasks) for row in rows), []
    for row in rows:
        model, side = _counterpart(row)
        cells = evidence.pick(side, model)
        for heading, printed in row.tasks.items():
            of_task = cells[cells["task"] == _TASKS[heading]]
            if not (of_task.empty or of_task["stderr"].isna().any()):
                ours, error = (100 * of_task[name].mean() for name in ("value", "stderr"))
                z = (ours - printed) / (math.sqrt(2) * error) if error else math.inf
                label = f"{row.label} {heading}: printed {printed:g}, z = {z:+.2f}"
                path = of_task["path"].iloc[0]
                compared.append((label, ours, ours - printed, error, abs(z), path))
    if not compared:
        text = f"None of {numbers} numbers has a record."
        return [Finding(verdict=Outcome.ABSENT, text=text)]
    frame = pd.DataFrame(compared, columns=["label", "ours", "gap", "error", "z", "path"])
    beyond, worst = int((frame["z"] >= BEYOND).sum()), frame.loc[frame["z"].idxmax()]
    mean = frame["gap"].mean()
    reach = BEYOND * math.sqrt(2 * (frame["error"] ** 2).sum()) / len(frame)
    text = (
        f"{len(frame)} of {numbers} numbers have records; {beyond} differ by {BEYOND} standard "
        f"errors or more, {0.05 * len(frame):.1f} would by chance; the mean difference is "
        f"{mean:+.2f} ± {reach:.2f} points. Furthest: {worst['label']}, ours {worst['ours']:.1f}."
    )
    # A whole table fails if too many numbers lie beyond; it holds only if, besides, the mean
    # difference is known to be within the margin.
    outcome = Outcome.UNDECIDED
    if len(frame) == numbers:
        tail = binomial_tail(beyond, numbers, 0.05)
        within = Expectation.of({"within": "comparable"}).judge(mean - reach, mean + reach)
        outcome = Outcome.FAILS if tail < LEVEL else within
    unit: Any = {"verdict": Outcome.UNDECIDED, "unit": "percent"}
    findings = [
        Finding(label=number.label, effect=number.ours, records=(number.path,), **unit)
        for number in frame.itertuples()
    ]
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


def check_invariant(name: str, evidence: Evidence) -> list[Finding]:
    """Return whether an invariant held in every record to which it applies."""
    cells = evidence.results.cells
    passed = cells[f"proofs.{name}" if len(cells) else "proven"]
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


@cache
def noise_step(experts: int, top_k: int, fall: float) -> float:
    """Return the step behind the top-k of a router whose logits are Gaussian noise, seeded.

    The noise's spread is that with which the mean step inside the top-k is ``fall``.
    """
    logits = np.random.default_rng(20260103).standard_normal((4096, experts))  # of as many tokens
    ranked = -np.sort(-logits, axis=1)
    below = ranked - ranked[:, :1]

    def steps(spread: float) -> tuple[float, float]:
        scores = np.exp(spread * below)
        shares = scores[:, [0, top_k - 1, top_k]] / scores.sum(axis=1, keepdims=True)
        first, last, behind = shares.mean(axis=0)
        return math.log(first / last) / (top_k - 1), math.log(last / behind)

    low, high = 0.0, 50.0  # the step inside grows with the spread; scipy.optimize imports slowly
    while high - low > 1e-6:
        spread = (low + high) / 2
        low, high = (spread, high) if steps(spread)[0] < fall else (low, spread)
    return steps(high)[1]


@cache
def uniform_bound(
    quantity: Literal["pad_waste", "mean_peak_before"], experts: int, top_k: int, mean_load: float
) -> float:
    """Return what a uniform router exceeds in 5 % of simulated capacity groups, seeded.

    Each token chooses distinct experts, all with equal probability.

    Args:
        quantity: The share of empty slots at γ=1, or the highest load over the mean load.
        experts: Their number.
        top_k: The experts of a token.
        mean_load: Tokens of an expert in a group, in the mean; of NaN the bound is NaN.
    """
    if math.isnan(mean_load):
        return math.nan
    tokens, rng = max(1, round(mean_load * experts / top_k)), np.random.default_rng(20260104)
    mean = tokens * top_k / experts
    pairs = rng.multinomial(tokens * top_k, np.full(experts, 1 / experts), _SIMULATIONS)
    # A token's experts are distinct: loads vary less than those of pairs drawn one by one.
    narrower = math.sqrt((experts - top_k) / (experts - 1)) if experts > 1 else 1.0
    loads = mean + narrower * (pairs - mean)
    if quantity == "pad_waste":
        slots = math.ceil(mean)
        values = 1 - np.minimum(loads, slots).mean(axis=1) / slots
    else:
        values = loads.max(axis=1) / mean
    return float(np.quantile(values, 1 - LEVEL))
