"""Blocks on the fresh toys: the protocol's contrasts beside the exploratory ones.

The models have an unseen training seed and an unseen world. The numbers come from the records of
``results/fresh``, those of contrasts that name their documents from ``results/fresh_documents``.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache, partial
from statistics import fmean
from typing import Any, Final

from capmoe_report.effects import Effect, pair_cells, pooled
from capmoe_report.verdicts import Outcome

from capmoe_eval.experiment.composition import load_option
from capmoe_eval.experiment.names import base_name
from pages import change, paragraph, table
from pages.effects import claim_of, verdicts_in
from pages.names import FAMILIES, card, evidence_in, exploratory
from pages.protocol import NUMBERS, in_words, judged, numbers_of, planned, protocol

_RESULTS: Final[str] = protocol()["runs"]["fresh"]["results"]


def effect_of(row: Mapping[str, Any], *, every: bool = False) -> Effect:
    """Return the effect of a primary contrast on the fresh models, by the rule ``worth``.

    ``every`` is as for :meth:`Evidence.pairs`.
    """
    evidence = evidence_in("fresh", f"{_RESULTS}_documents" if "documents" in row else _RESULTS)
    pairs, *_ = evidence.pairs(row["contrast"].first, row["contrast"].second, every=every)
    return pooled(pairs, "answer")


@cache
def _judged() -> list[dict[str, Any]]:
    return judged("fresh", effect_of)


def _of_every_model() -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the contrasts that leave out models, judged on every model, with the others' names."""
    for row, every in zip(_judged(), judged("fresh", partial(effect_of, every=True)), strict=True):
        others = every["effect"].models.keys() - row["effect"].models.keys()
        if others:
            yield every, ", ".join(FAMILIES[model].partition(",")[0] for model in sorted(others))


def alike(row: Mapping[str, Any]) -> Effect:
    """Return the effect of a contrast on the exploratory models, on the fresh run's tasks alone.

    Each model is asked on all tasks that the fresh model of its family has: without documents where
    a model of a family has records and none has them of all these tasks.
    """
    first, second = row["contrast"].first, row["contrast"].second
    tasks_of = {base_name(model): set(tasks) for model, tasks in row["effect"].tasks.items()}
    models = [model for model in exploratory().pooled if base_name(model) in tasks_of]
    cells = (exploratory().pick(side, *models) for side in (first, second))
    pairs, _ = pair_cells(exploratory().results, *cells)
    whole = {
        model: {task: tasks[task] for task in sorted(tasks_of[base_name(model)])}
        for model, tasks in sorted(pairs.items())
        if tasks_of[base_name(model)] <= tasks.keys()
    }
    return pooled(whole if set(map(base_name, whole)) == tasks_of.keys() else {})


def tasks() -> str:
    """Return the tasks of each primary contrast on the fresh models, alike contrasts together."""
    names = {task.lm_eval: name for name, task in load_option("tasks", "all").items()}
    claims: dict[tuple[str, ...], list[str]] = {}
    for row in _judged():
        of_row = {names.get(task, task) for task in itertools.chain(*row["effect"].tasks.values())}
        claims.setdefault(tuple(sorted(of_row)), []).append(f"({row['claim']})")
    parts = (f"{', '.join(of)} {', '.join(on)}" for on, of in claims.items())
    return paragraph(f"Tasks, of a model those that need its experts. {'. '.join(parts)}.")


def verdicts() -> str:
    """Return the primary contrasts on the exploratory and on the fresh models, and the reading."""
    rows = []
    for row in _judged():
        effects = change(alike(row)), change(row["effect"])
        over_families = change(row["effect"], wide=True).partition(" ")[2] or "–"
        rows.append((*in_words(row), *effects, over_families, *numbers_of(row), row["verdict"]))
    head = ("claim", "expected", "exploratory [95 %]", "fresh [95 %]")
    return table((*head, "over families", *NUMBERS, "verdict"), rows) + f"\n{tasks()}\n{left_out()}"


def left_out() -> str:
    """Return what the contrasts that leave out models are with every model."""
    return "".join(
        paragraph(
            f"({row['claim']}) leaves out {others}. With {others} the effect is "
            f"{change(row['effect'])}, p {row['p']:.2g}: {row['verdict']}."
        )
        for row, others in _of_every_model()
    )


def summary() -> str:
    """Return how many primary contrasts have each verdict, in a sentence."""
    rows = [row for row in _judged() if "secondary" not in row]
    counts = Counter(row["verdict"] for row in rows)
    parts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in sorted(counts, reverse=True))
    wide = Counter(row["verdict"] for row in rows if not row["conditional"])
    without = "".join(
        f" With {others}, which ({row['claim']}) leaves out, ({row['claim']}) is {row['verdict']}."
        for row, others in _of_every_model()
    )
    return paragraph(
        f"Of the {counts.total()} primary contrasts of the claims, on five models that were "
        f"trained after the rules had been committed: {parts}. Over families Holm's correction, "
        f"that of these verdicts, confirms {wide['confirmed']} of the {counts['confirmed']} "
        f"([the confirmatory run](docs/explanation/fresh.md)).{without}"
    )


def _scope(row: Mapping[str, Any]) -> str:
    """Return what decides a contrast over families: Holm's p, that of the contrast, or nothing."""
    if not row["conditional"]:
        return "corrected"
    effect = row["effect"]
    depth = row["contrast"].expect.depth(effect.points or 0.0)
    return "alone" if effect.p(depth, wide=True) < protocol()["level"] else ""


def readings() -> str:
    """Return what the protocol says of each exploratory verdict that was confirmed.

    It ends with the scope of the verdicts that were decided.
    """
    read: dict[str, list[str]] = {}
    for row in _judged():
        if claim_of(row["claim"]).verdict != Outcome.HOLDS:
            continue
        reading, name = "confirmed on fresh data", f"({row['claim']})"
        if row["verdict"] == Outcome.FAILS:
            reading = "withdrawn"
        elif row["verdict"] != Outcome.HOLDS:
            power, power_alike = _powers(row)
            reading = "not replicated" if power >= protocol()["power_wanted"] else "left open"
            at_table = f"at the table's exploratory effect {power_alike}"
            name += f" (power {100 * power:.0f} %; {at_table})"
        read.setdefault(reading, []).append(name)
    parts = "; ".join(f"{reading}: {', '.join(names)}" for reading, names in read.items())
    decided = [row for row in _judged() if row["verdict"] in ("confirmed", "contradicted")]
    wide, uncorrected, narrow = (
        ", ".join(f"({row['claim']})" for row in decided if _scope(row) == scope)
        for scope in ("corrected", "alone", "")
    )
    return paragraph(
        f"Of the exploratory verdicts *confirmed* these are {parts}. Over families, too, {wide} "
        f"are decided after Holm, {uncorrected or 'none'} uncorrected only; {narrow} are on these "
        "models alone."
    )


def _powers(row: Mapping[str, Any]) -> tuple[float, str]:
    """Return the share of studies that decide: within a margin at 0, else at the old effect.

    The second is that at the exploratory effect on the fresh run's tasks, or a dash.
    """
    expected, plan, on_tasks = row["contrast"].expect, planned("fresh", row), alike(row)
    before = row["contrast"].effect(exploratory()).points if expected.is_direction else None
    power_alike = plan.cdf(expected.depth(on_tasks.points or 0.0))
    text = f"{100 * power_alike:.0f} %" if on_tasks.documents else "–"
    return plan.cdf(expected.depth(before or 0.0)), text


def claims() -> str:
    """Return the verdicts by the exploratory rules, on the exploratory and on the fresh models."""
    fresh = verdicts_in(_RESULTS).claims
    asked = [claim for claim in fresh if claim.id not in protocol()["not_asked"]]
    others = [
        f"({claim.id}) was {before} and is {claim.verdict}"
        for claim in asked
        if claim.verdict != (before := claim_of(claim.id).verdict)
    ]
    same = len(asked) - len(others)
    return paragraph(
        f"{same} of {len(asked)} claims have the same verdict in both; {', '.join(others)}."
    )


def models() -> str:
    """Return what the fresh models answer on dev sets, and with all experts disabled."""
    rows = []
    for model in protocol()["runs"]["fresh"]["models"]:
        scores = (card(model)[key].values() for key in ("accuracy", "accuracy_silent"))
        title = FAMILIES[model].partition(",")[0]
        rows.append([title, *(f"{fmean(of_tasks):.0f}" for of_tasks in scores)])
    return table(("family", "all experts", "no expert"), rows)
