"""Benchmark `answers`: how much a generated answer depends on the batch that it is generated in."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from capmoe_eval.bench.options import check_names, different_sizes
from capmoe_eval.bench.rounds import CPU, finish, say, target_of
from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.evaluate import evaluate
from capmoe_eval.evaluation.lm import CapmoeLM
from capmoe_eval.evaluation.loading import load_planned
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.selection import composed
from capmoe_eval.experiment.timings.spread import Target
from capmoe_eval.routing.registry import create_method
from capmoe_eval.zoo.hub import ready

SIDES = {
    "baseline": create_method("baseline"),
    "prompt alone": create_method("score", 1.0),
    "every step": create_method("score", 1.0, decode="constrained"),
}
"""Token Drop at γ = 1 in both modes, the batch being one group; the baseline shows rounding."""


class Batches(NamedTuple):
    """A way to deal questions into batches."""

    size: int  # sequences of a batch
    shuffle: int | None = None  # seed of random batches; None for batches by length

    def __str__(self) -> str:
        """Return it in a few words."""
        return f"batches of {self.size}" + ("" if self.shuffle is None else ", other company")


def run(given: argparse.Namespace) -> None:
    """Generate the answers, print the shares that change, and write ``answers.json``."""
    check_names(given.model, [given.task])
    sizes = different_sizes("--sizes", given.sizes)
    words = [f"model={given.model}", f"tasks={given.task}", f"limit={given.limit}", "device=cpu"]
    (plan, *_) = plans(composed(words))
    source = ready(plan.source)
    lm, library = load_planned(plan), TaskLibrary()
    dealt = [*map(Batches, sizes), Batches(sizes[-1], shuffle=0)]
    targets, steps = [], {}
    for side, method in SIDES.items():
        found: dict[Batches, dict[Any, str]] = {}
        for batches in dealt:
            say(f"answers: {side}, {batches}")
            cell = dataclasses.replace(
                plan.cell, method=method, batch_size=batches.size, shuffle=batches.shuffle
            )
            found[batches], decode = answers(cell, lm, library, source)
            if decode is not None:
                steps[str(batches)] = decode
        targets += _changed(side, found, Batches(sizes[-1]))
    options = ("model", "task", "limit", "sizes")
    finish(given, CPU, targets, options, gamma=1.0, decode_steps=steps)


def answers(
    cell: Cell, lm: CapmoeLM, library: TaskLibrary, source: Any
) -> tuple[dict[Any, str], dict[str, Any] | None]:
    """Return the answer to each question, and the record's statistics of its decode steps."""
    found: dict[Any, str] = {}

    def noted(requests: Sequence[Any], *args: Any, **kwargs: Any) -> list[str]:
        texts: list[str] = type(lm).generate_until(lm, requests, *args, **kwargs)
        questions = [(request.task_name, request.doc_id) for request in requests]
        found.update(zip(questions, texts, strict=True))
        return texts

    lm.generate_until = noted  # type: ignore[method-assign]
    try:
        record = evaluate(cell, lm, library, source, root=Path())  # nothing is written
    finally:
        del lm.generate_until
    if not found:
        raise UsageError(f"--task={cell.task.name}: nothing is generated for it; choose gsm8k")
    steps = record.load.decode
    return found, None if steps is None else steps.model_dump()


def _changed(side: str, found: Mapping[Batches, Mapping[Any, str]], first: Batches) -> list[Target]:
    """Return the share of answers that another way to deal changes."""
    targets = []
    for batches, texts in found.items():
        if batches != first:
            share = sum(texts[one] != found[first][one] for one in texts) / len(texts)
            words = {"side": side, "answers": len(texts), "batches": batches, "first": first}
            targets.append(target_of("answers", [share], words))
    return targets
