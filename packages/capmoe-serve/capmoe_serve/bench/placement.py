"""Benchmark `placement`: what lossless load balancing gives, on the routing of trained models."""

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from capmoe_bench.benchmarks import check_names
from capmoe_bench.rounds import CPU, finish
from capmoe_bench.timings import Target
from capmoe_eval.errors import UsageError, shown
from capmoe_eval.evaluation.run import run as compute
from capmoe_eval.experiment.composition import composed, load_option
from capmoe_eval.experiment.configuration import plans
from capmoe_eval.routing.capacity import capacity
from capmoe_eval.routing.knobs import LARGEST
from capmoe_eval.routing.registry import CONTIGUOUS

from capmoe_serve.placements import judge, placements
from capmoe_serve.trace import Trace, load_trace

# Shape suffixes: S steps, L layers, E experts.

GAMMAS: Final = (2.0, 1.5, 1.0)
"""Capacity factors of Token Drop beside the balancing methods."""


def run(arguments: argparse.Namespace) -> None:
    """Record the routing, balance it, print the stragglers and write ``placement.json``."""
    for model in arguments.models:
        check_names(model, arguments.tasks)
    rows = [row for model in arguments.models for row in _of_model(model, arguments)]
    options = ("models", "tasks", "batch", "limit")
    finish(arguments, CPU, list(map(_target, rows)), options, balances=rows)


def _of_model(model: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what each method makes of a model's routing, on each task and with stale plans."""
    ranks = int(load_option("model", model).ep_size)
    words = [f"model={model}", f"tasks=[{','.join(arguments.tasks)}]"]
    words += [f"batch_size={arguments.batch}", f"limit={shown(arguments.limit)}"]
    words += ["method=baseline", "shuffle=0", "device=cpu", f"trace_tokens={LARGEST}"]
    routed = {}
    with tempfile.TemporaryDirectory(prefix="capmoe-bench-") as folder:
        planned = plans(composed([*words, f"results_dir={folder}", f"save_trace={folder}/traces"]))
        summary = compute(planned)
        for cell, why in summary.failures:
            raise UsageError(f"{cell}: {why}")
        for plan in planned:
            (observer,) = plan.observers
            trace = load_trace(observer.path(plan))
            # Of a task whose answers are generated, decode steps are balanced, else prompts.
            trace = trace.only("decode" if trace.decode_steps else "prompts")
            if trace.n_steps < 4:
                raise UsageError(
                    f"--limit={plan.cell.limit}: {plan.cell.task.name} makes {trace.n_steps} steps "
                    f"of {plan.cell.batch_size} sequences; at least 4 are needed, half of them to "
                    "plan on"
                )
            routed[plan.cell.task.name] = trace
    for (planned_on, before), (judged_on, after) in itertools.product(routed.items(), repeat=2):
        if bool(before.decode_steps) != bool(after.decode_steps):
            continue  # decode steps and prompts are never planned on one another
        for method, outcome in outcomes(before, after, ranks).items():
            yield {
                "model": model,
                "ranks": ranks,
                "planned_on": planned_on,
                "judged_on": judged_on,
                "of": "decode steps" if after.decode_steps else "prompts",
                "method": method,
                **outcome,
            }


def outcomes(before: Trace, after: Trace, ranks: int) -> dict[str, dict[str, float]]:
    """Return what each method gives on the second half of one trace, planned on the first of one.

    Where both are not the same, the plan is stale: then only methods that plan are judged.
    """
    planned_SLE, judged_SLE = before.loads()[: before.n_steps // 2], after.second_half().loads()
    steps = min(len(planned_SLE), len(judged_SLE))
    judged_SLE = judged_SLE[:steps]
    plans = placements(planned_SLE[:steps].sum(axis=0), ranks)
    judged = {name: judge(judged_SLE, placement) for name, placement in plans.items()}
    home = plans[CONTIGUOUS]
    if before is not after:
        del judged[CONTIGUOUS]
    else:
        top_k = after.top_k or 1
        step_tokens = (judged_SLE[:, 0].sum(axis=1) // top_k).tolist()
        for gamma in GAMMAS:
            # All tokens of a step are one capacity group.
            limits = [capacity(gamma, tokens, top_k, judged_SLE.shape[2]) for tokens in step_tokens]
            kept_SLE = np.minimum(judged_SLE, np.array(limits)[:, None, None])
            judged[f"Token Drop γ={gamma:g}"] = judge(kept_SLE, home, judged_SLE)
    return {name: {"steps": steps, **outcome} for name, outcome in judged.items()}


def _target(row: dict[str, Any]) -> Target:
    """Return a row's straggler factor as a number of the efficiency page."""
    lost = row["drop_rate"]
    plan = "" if row["planned_on"] == row["judged_on"] else f", planned on {row['planned_on']}"
    return Target.of(
        f"{row['model']}, {row['judged_on']}{plan}: {row['method']}",
        f"Fullest of {row['ranks']} ranks over the mean load before any drop, mean over layers and "
        f"{row['steps']} steps ({row['of']}) that were not planned on, "
        f"{f'{100 * lost:.1f} % dropped' if lost else 'nothing dropped'}",
        [row["straggler"]],
    )
