"""Blocks from the verdicts and the records of the embedded models."""

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any, Final

import numpy as np
import pandas as pd
from capmoe_methods.trial import by_model, outcomes, primary, sentence, verdicts
from capmoe_report.contrasts import printed_gap, table_1
from capmoe_report.effects import Effect, by_family, contrast, pair_cells
from capmoe_report.evidence import NEEDED, Side, dev_losses
from capmoe_report.judge import judge, replication_claims
from capmoe_report.margins import pairs
from capmoe_report.records import RECORDS, line_numbers, paths_of
from capmoe_report.verdicts import Finding, JudgedClaim, Outcome, VerdictFile
from numpy.typing import NDArray

from capmoe_eval.experiment.names import family
from capmoe_eval.experiment.record import VERDICTS, read_record
from capmoe_eval.paper.layout import ALL_TASKS
from capmoe_eval.paper.printed import AVERAGE
from capmoe_eval.paper.statistics import mean_interval
from capmoe_eval.report.texts import shown
from capmoe_eval.results.frames import Results, pick, results_of
from pages import DOCS, ROOT, bullets, change, paragraph, signed, span, table
from pages.names import FAMILIES, card, exploratory, results


@cache
def verdicts_in(root: str) -> VerdictFile:
    """Return the committed verdicts of a directory of results."""
    return VerdictFile.model_validate_json((ROOT / root / VERDICTS).read_bytes())


def replication() -> VerdictFile:
    """Return the committed verdicts on the embedded models."""
    return verdicts_in("results/zoo")


def claim_of(name: str) -> JudgedClaim:
    """Return a claim with its verdict on the embedded models."""
    return next(claim for claim in replication().claims if claim.id == name)


def findings(claim: str, label: str = "") -> list[Finding]:
    """Return the findings of a claim whose labels begin so."""
    return [each for each in claim_of(claim).contrasts if each.label.startswith(label)]


def effect(finding: Finding, digits: int = 2) -> str:
    """Return a finding's effect with its interval over documents."""
    assert finding.effect is not None
    assert finding.low is not None
    assert finding.high is not None
    return signed(finding.effect, finding.low, finding.high, digits)


@cache
def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((DOCS / "zoo" / RECORDS).read_bytes())
    return rows


def anchor(rows: Sequence[Mapping[str, Any]], claim: str, *labels: str) -> str:
    """Return the lines of contrasts that stand below each other in a file of records."""
    numbers = line_numbers(rows)
    ends = (f"L{numbers[claim, label]}" for label in (labels[0], labels[-1]))
    return f"#{'-'.join(dict.fromkeys(ends))}"


def lines_of(claim: str, *labels: str) -> str:
    """Return where the records of contrasts that stand below each other are named, from docs/."""
    return f"zoo/{RECORDS}{anchor(_rows(), claim, *labels)}"


def _linked(claim: str, finding: Finding) -> str:
    """Return a finding's effect with its interval, which leads to its records."""
    mean, interval = effect(finding).split(" ", 1)
    return f"[{mean}](../{lines_of(claim, finding.label)}) {interval}"


def leads(gamma: float) -> list[Finding]:
    """Return by how much Token Drop is better than each other rule, in batches of one task."""
    of_gamma = findings("a", f"score γ={gamma:g} ")
    return [finding for finding in of_gamma if "mixed" not in finding.label]


def caption() -> str:
    """Return the caption of the picture of the replication."""
    families = Counter(map(family, replication().models))
    seeds = span(map(float, families.values()), "{:g}")
    ordered = sorted(leads(1.0), key=lambda each: each.effect or 0.0)
    ends = (ordered[0], ordered[-1])
    scores = [f"[{each.effect:.1f}](../{lines_of('a', each.label)})" for each in ends]
    (expanded,) = findings("c2", "expanded drop own γ")
    gains = pairs({"table": 2, "method": "Expanded Drop"}, {"table": 2, "method": "Token Drop"})
    least = min(first.number(AVERAGE) - second.number(AVERAGE) for first, second in gains)
    printed, *grouped = replication().grouping
    rows = (grouped[0], grouped[-1])
    orders = [f"{_linked(row.label, row.gaps[2])} ({row.label})" for row in rows]
    assert printed.gaps[2].effect is not None
    priorities = ("all alike", "text first", "images first")
    of_images = zip(findings("o2"), priorities, strict=True)
    images = [f"{_linked('o2', finding)} with {priority}" for finding, priority in of_images]
    return paragraph(
        f"*{replication().summary}. "
        f"Effects of routing methods on {len(replication().models)} tiny trained models "
        f"({len(families)} architectures, at most {seeds} training seeds of each), a panel for "
        "each claim. 95 % intervals are over documents and, thin, over families and documents; "
        "dashed: the equivalence margin; grey: single models. In points of accuracy: at γ=1 "
        "Token Drop (“Score” in Table 1) beats the other selection metrics by "
        f"{' to '.join(scores)}. "
        "At the models' own γ Expanded Drop − Token Drop is "
        f"{_linked('c2', expanded)}; Table 2, at those of its models, prints gains from "
        f"{least:.2f}. On images (MME, γ=1) Expanded Drop − Token Drop is {', '.join(images)}; "
        "Table 4 prints gains in all three. "
        f"Reverse Order − Order at γ=1 is {printed.gaps[2].effect:.1f} in Table 1; here, by the "
        f"sequences that share a capacity, {' and '.join(orders)}. "
        "A number leads to the names of its records.*"
    )


def units_of(
    compared: Results, first: pd.DataFrame, second: pd.DataFrame
) -> dict[str, NDArray[np.float64]]:
    """Return the first side minus the second, in points, of one model: by task [units]."""
    (tasks,) = pair_cells(compared, first, second)[0].values()
    return {task: 100 * paired.units for task, paired in tasks.items()}


def placed_drops() -> str:
    """Return the sentence on a capacity of devices on EPLB's placement at γ=1."""
    compared = results("experiment=placed")
    sides = [pick(compared.cells, gamma=1.0, placement=name) for name in (None, "eplb")]
    changed = contrast(compared, sides[1], sides[0], exploratory().idle)
    tasks = sorted(set[str]().union(*changed.tasks.values()))
    of_tasks = [pick(side, task=tasks) for side in sides]
    shares = (100 * side.groupby("model")["drop_rate"].mean() for side in of_tasks)
    contiguous, eplb = (span(share, "{:.0f}") for share in shares)
    return paragraph(
        f"At γ=1 ({task_titles(tasks)}), `placement=eplb` drops {eplb} % of the pairs, contiguous "
        f"placement {contiguous} %; accuracy changes by {change(changed)} points."
    )


@cache
def _adaptive() -> pd.DataFrame:
    compared = outcomes(results("experiment=adaptive"))
    assert not compared.isna().any(axis=None)
    return compared


def adaptive() -> str:
    """Return the verdict on a γ for each layer in short."""
    verdict = primary(verdicts(_adaptive()))
    assert verdict is not None
    gain, model = min((value, model) for model, value in _gains().items())
    return paragraph(
        f"Against one γ for all on {len(_gains())} embedded models, over six budgets of pairs (the "
        f"primary endpoint): {sentence(verdict)} {FAMILIES[model]} changes most: "
        f"{shown(gain, '{:+.3f}')}."
    )


def _of_pairs() -> pd.DataFrame:
    return _adaptive().query("budget_of == 'pairs'")


def _gains() -> dict[str, float]:
    return dict(by_model(_of_pairs(), "gain"))


def adaptive_verdict() -> str:
    """Return what describes the verdict on a γ for each layer, uncorrected."""
    judged = verdicts(_adaptive())
    last = primary(judged)
    assert last is not None
    of_pairs = _of_pairs()
    alone = mean_interval(of_pairs.groupby(["model", "task"])["gain"].mean().tolist())
    is_all = (judged["budget_of"] == "scores") & judged["budget"].isna()
    (scores,) = judged[is_all].filter(regex="^straggler").to_numpy()
    assert alone is not None
    apart = 100 * of_pairs["apart"]
    beyond = 100 * (of_pairs["drop_rate"] - of_pairs["budget"]).abs()
    by_name = [f"{FAMILIES[model]} {shown(gain, '{:+.3f}')}" for model, gain in _gains().items()]
    points = [
        "The sampling units of the first interval are models (t), since the tasks of a model "
        f"share its routers; of the second, documents. If the {last['cells']} cells of models and "
        f"tasks were independent, the first would be {signed(*alone, 3).partition(' ')[2]}.",
        f"By model: {', '.join(by_name)}.",
        "Static factors around an adaptive setting lie "
        f"{np.median(apart):.1f} points of drops apart (median; {max(apart):.1f} at most). At "
        f"worst the change is {shown(last['most'], '{:+.3f}')}.",
        "A budget of scores changes the straggler factor at equal drops by "
        f"{signed(*scores, 3)}: it is chosen to lose few scores, not few pairs.",
        "On the evaluated documents the dropped share differs from the budget of pairs by "
        f"{np.mean(beyond):.1f} points in the mean, and by {max(beyond):.1f} at most.",
    ]
    return bullets(points)


def models() -> str:
    """Return README's sentence on the embedded models, from their cards."""
    cards = [card(model) for model in sorted(replication().models)]
    language = [each for each in cards if "openbookqa" in each["accuracy"]]
    sizes = span((each["parameters"] / 1e6 for each in language), "{:.1f}")
    kinds = sorted({str(each["class"]).removesuffix("ForCausalLM") for each in language})
    means = dev_losses(replication().models).mean(axis="columns")
    lost = {task: float(means[task]) for task in language[0]["accuracy"]}
    weak = [f"{task} {loss:.0f}" for task, loss in lost.items() if loss < NEEDED]
    return paragraph(
        f"The embedded models are real transformers classes ({', '.join(kinds)}) of {sizes} "
        "million parameters, trained on a closed mini-world of simple English. With all experts "
        f"disabled a task loses {span(lost.values(), '{:.0f}')} points in the mean over models "
        "(dev sets, from the models' [cards](capmoe_eval/zoo/weights))"
        + (f"; less than {NEEDED:g}: {', '.join(weak)}." if weak else ".")
    )


_LOADS: Final = ((64, 2048), (64, 256), (8, 2048), (256, 2048))
"""Requests at a time and most tokens of a step, as `experiment=server` has them."""


def server_steps() -> str:
    """Return accuracy in a server's steps minus that in static batches, by method and load."""
    methods = ("score γ=1", "expanded drop γ=1", "expert drop", "random γ=1", "order γ=1")
    rows = []
    for requests, tokens in _LOADS:
        load = f"ep_size=1 batch_size={requests} in steps of at most {tokens} tokens"
        of_load = (findings("q", f"{method} {load}") for method in methods)
        texts = (effect(of_method[0]) if of_method else "–" for of_method in of_load)
        rows.append([str(requests), f"{tokens:,}", *texts])
    titles = ("Token Drop", "Expanded Drop", "Expert Drop", "Random", "Order")
    return table(["requests at a time", "tokens of a step, at most", *titles], rows)


def server_decode() -> str:
    """Return what a capacity on decode steps does to GSM8K, in static batches and in a server."""
    (finding,) = findings("q", "score γ=1 decode=constrained")
    (named,) = (row for row in _rows() if (row["claim"], row["label"]) == ("q", finding.label))
    cells = results_of(read_record((DOCS / "zoo" / path).resolve()) for path in paths_of(named))[0]
    is_static = cells["backend"] == "transformers"
    models = ",".join(finding.models)
    stock = results(f"experiment=table2 tasks=gsm8k grid.model=[{models}]").cells
    sides = (cells[is_static], cells[~is_static], pick(stock, method="baseline"))
    static, served, free = (span(100 * side["value"], "{:.0f}") for side in sides)
    titles = [FAMILIES[model] for model in finding.models]
    return paragraph(
        f"Decode steps under the capacity lose most. On GSM8K {free} % of the answers of the "
        f"embedded {', '.join(titles)} are right without a capacity. Under Token Drop at γ=1 with "
        f"`decode=constrained` {static} % are right in static batches, and {served} % in a server."
    )


def shared_tasks(effects: Iterable[Effect]) -> frozenset[str]:
    """Return the tasks of Table 1 that every effect is of on most of its models."""
    shared = set(table_1().values())
    for effect in effects:
        counts = Counter(itertools.chain(*effect.tasks.values()))
        shared &= {task for task, count in counts.items() if 2 * count > len(effect.tasks)}
    return frozenset(shared)


def task_titles(tasks: Collection[str]) -> str:
    """Return the printed names of tasks, in the order of the paper's tables."""
    return ", ".join(column.heading for column in ALL_TASKS if column.task in tasks)


_TABLE_1: Final = (
    *(("score", "baseline", gamma) for gamma in (1.0, 1.5, 2.0)),
    *(("score", other, 1.0) for other in ("random", "reverse_order", "order")),
    *(("random", "reverse_order", 1.0), ("reverse_order", "order", 1.0)),
)


def same_tasks() -> str:
    """Return the effects of Table 1 on all its tasks and on those of most models, beside ours.

    Ours are of the same tasks in every row, less those for which a model hardly needs experts.
    """
    sides = [
        [Side(method=name, gamma=None if name == "baseline" else gamma) for name in methods]
        for *methods, gamma in _TABLE_1
    ]
    shared = shared_tasks(exploratory().effect(first, second) for first, second in sides)
    rows = []
    for (first, second, gamma), (a, b) in zip(_TABLE_1, sides, strict=True):
        columns = (table_1().values(), shared)
        printed = (printed_gap(first, second, gamma, tasks)[0] for tasks in columns)
        ours = exploratory().effect(a, b, tasks=shared)
        in_print = (shown(points, "{:+.1f}") for points in printed)
        rows.append([f"{a} − {b}", *in_print, change(ours, 1)])
    head = ("points of accuracy", "Table 1, its eight tasks", f"Table 1, {task_titles(shared)}")
    return table((*head, "embedded models, the same tasks"), rows)


def rests_on() -> str:
    """Return what (k) and (d2) would be on other tasks and on other models."""
    (claim,) = (claim for claim in replication_claims() if claim.id == "k")
    every_task = dataclasses.replace(exploratory(), losses=pd.DataFrame(), _effects={})
    (everything,) = judge(every_task, [claim])
    scope, _, _ = everything.scope.partition(" (")  # without its batches
    (finding,) = findings("d2")
    families = by_family(finding.models)
    gains = ", ".join(f"{FAMILIES[name]} {shown(x, '{:+.2f}')}" for name, x in families.items())
    others = fmean(gain for name, gain in families.items() if name != "zoo_mixtral")
    (most,) = (each for each in findings("o2") if each.verdict is Outcome.FAILS)
    seeds = list(most.models.values())
    points = [
        f"(k) is *{claim_of('k').verdict}* because tasks that hardly need experts are left out. "
        f"On all tasks it would be *{everything.verdict}* {scope}.",
        f"(d2) rests on Mixtral: {gains}. Without it the mean is {shown(others, '{:+.2f}')}.",
        "(o2) rests on one training seed of the LLaVA: "
        f"{', '.join(shown(points, '{:+.2f}') for points in seeds)}. Without it the mean is "
        f"{shown(fmean(sorted(seeds)[1:]), '{:+.2f}')}.",
    ]
    return bullets(points)
