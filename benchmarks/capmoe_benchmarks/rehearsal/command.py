"""Benchmark `rehearsal`: does every method run on the paper's models, in the memory and the time?

Each model is written as the hub has it, with random weights, forecast as by ``plan=calibrate``,
loaded and evaluated under every method. So what would fail on a rented GPU fails here.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from capmoe_eval.bench.rounds import finish, measured_on, say
from capmoe_eval.errors import UsageError, check_choice, kind_and_place
from capmoe_eval.evaluation.evaluate import apply_calibration, evaluate
from capmoe_eval.evaluation.forecast import measured_rate
from capmoe_eval.evaluation.lm import CapmoeLM
from capmoe_eval.evaluation.loading import chosen_device, load_lm
from capmoe_eval.evaluation.memory import peak_bytes
from capmoe_eval.evaluation.preparation import with_documents
from capmoe_eval.evaluation.workload import CellWork, WorkCounter
from capmoe_eval.experiment.configuration import CellPlan, plans
from capmoe_eval.experiment.selection import composed
from capmoe_eval.results.timings import Target, read_evaluation

from capmoe_benchmarks.rehearsal.checkpoint import PUBLISHED, Checkpoint
from capmoe_benchmarks.rehearsal.grid import H100, grid_costs
from capmoe_benchmarks.targets import target_of

NOTE = "random weights and few layers; of a CPU, no time of this is about a GPU"


def run(arguments: argparse.Namespace) -> None:
    """Rehearse the models, print what each needed and write ``rehearsal.json``.

    What the file has of other models, and of the tables, stays there if it is of this machine.
    """
    names = [name for published in PUBLISHED for name in published.models]
    for name in arguments.models or ():
        check_choice("--models", name, names)
    cells = plans(composed(["experiment=rehearsal", *arguments.overrides]))
    device = chosen_device(cells[0].placement.device)
    rows, grid = _kept(arguments.out / "rehearsal.json", device)
    with ExitStack() as stack:
        scratch = Path(tempfile.mkdtemp(prefix="capmoe-rehearsal-", dir=arguments.dir))
        if not arguments.keep:
            stack.callback(shutil.rmtree, scratch)
        if arguments.new is not None:  # of every task that does not say how many itself
            stack.enter_context(mock.patch.object(CapmoeLM, "max_gen_toks", arguments.new))
        for name in arguments.models or names:
            of_model = [plan for plan in cells if plan.cell.model.name == name]
            rows[name] = _rehearsed(of_model, scratch, arguments)
            gc.collect()
            if arguments.keep:
                say(f"  {scratch / name}")
            else:
                shutil.rmtree(scratch / name)
        if arguments.grid:
            grid = grid_costs(scratch, arguments.tokenizer, arguments.overrides)
    ordered = [rows[name] for name in names if name in rows]
    targets = [target for row in ordered for target in _targets(row)]
    assumed = dataclasses.asdict(H100)
    finish(arguments, device, targets, rehearsal=NOTE, models=ordered, grid=grid, assumed=assumed)


def _kept(path: Path, device: torch.device) -> tuple[dict[str, Any], list[Any]]:
    """Return the models of a file by name, and its tables, if it is of this machine."""
    if not path.is_file():
        return {}, []
    file = read_evaluation(path)
    if file["machine"] != measured_on(device)["machine"]:
        return {}, []
    return {row["model"]: row for row in file["models"]}, file["grid"]


def _rehearsed(
    planned: Sequence[CellPlan], scratch: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return what the cells of a model need and what was forecast, JSON-ready."""
    model = planned[0].cell.model
    checkpoint = Checkpoint(model.name, scratch / model.name, arguments.tokenizer)
    checkpoint.cut(arguments.memory * 2**30)
    say(f"rehearsal: {model.name}, {checkpoint.layers} of {checkpoint.published_layers} layers")
    stored, shards = checkpoint.write_weights()
    model = dataclasses.replace(model, pretrained=checkpoint.model.pretrained)
    planned = with_documents(
        [
            dataclasses.replace(
                plan, root=scratch, cell=dataclasses.replace(plan.cell, model=model)
            )
            for plan in planned
        ]
    )
    counter = WorkCounter(planned)
    weights = counter.weights(model)
    if not isinstance(weights, int):
        raise UsageError(weights)
    row: dict[str, Any] = {
        "model": model.name,
        "layers": [checkpoint.layers, checkpoint.published_layers],
        "limit": planned[0].cell.limit,
        "new": arguments.new,
        "tokenizer": arguments.tokenizer and Path(arguments.tokenizer).name,
        "shards": shards,
        "stored": stored,
        "weights": weights,
        "cells": [],
    }
    lm: CapmoeLM | None = None
    rates: dict[str, float] = {}
    for plan in planned:
        task = plan.cell.task.name
        say(f"  {plan.cell}")
        needed: dict[str, Any] = {"task": task, "method": plan.cell.label}
        row["cells"].append(needed)
        try:
            lm = lm or load_lm(model, plan.placement)
            work = _with_new(counter.work(plan), arguments.new)
            if task not in rates:
                rate = measured_rate(plan, lm, counter.library, work.documents)
                rates[task] = rate.of(work.documents)
            needed |= {
                "documents": work.documents,
                "seconds_forecast": rates[task],
                "bytes_forecast": counter.batch(plan, work),
                **_evaluated(plan, lm, counter),
            }
        except Exception as error:  # of one cell: the others may still show something
            needed["failure"] = kind_and_place(error)
            say(f"  FAILED: {needed['failure']}")
    if lm is not None:
        row["loaded"] = sum(p.numel() * p.element_size() for p in lm.model.parameters())
    return row


def _with_new(work: CellWork, new: int | None) -> CellWork:
    """Return the work of a cell whose answers have at most so many tokens."""
    if new is None or not work.new_tokens:
        return work
    before = work.new_tokens // work.requests
    return dataclasses.replace(
        work, new_tokens=new * work.requests, longest=work.longest - before + new
    )


def _evaluated(plan: CellPlan, lm: CapmoeLM, counter: WorkCounter) -> dict[str, Any]:
    """Evaluate a cell; return its seconds, its peak beside the weights and what it dropped."""
    applied = apply_calibration(plan, lm)
    records = []

    def work() -> None:
        records.append(
            evaluate(plan.cell, lm, counter.library, plan.source, root=plan.root, applied=applied)
        )

    peak = _peak(lm.model.device, work)
    (record,) = records
    return {
        "seconds": record.provenance.seconds,
        "bytes": peak,
        "drop_rate": record.load.drop_rate,
        "tokens": record.load.tokens,
    }


def _peak(device: torch.device, work: Callable[[], object]) -> int:
    """Return the most bytes that were allocated for tensors while something ran."""
    if device.type != "cuda":
        return peak_bytes(work)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() - before


def _targets(row: dict[str, Any]) -> Iterator[Target]:
    """Yield how many cells of a model failed, and memory and time over their forecasts."""
    cells = row["cells"]
    words = {"model": row["model"], "layers": "{} of {}".format(*row["layers"]), "n": len(cells)}
    failed = sum("failure" in cell for cell in cells)
    yield target_of("rehearsal_failed", [float(failed)], words)
    for task in dict.fromkeys(cell["task"] for cell in cells):
        of_task = [cell for cell in cells if cell["task"] == task and "failure" not in cell]
        for what in ("bytes", "seconds") if of_task else ():
            ratios = [cell[what] / cell[f"{what}_forecast"] for cell in of_task]
            yield target_of(f"rehearsal_{what}", ratios, {**words, "task": task})
