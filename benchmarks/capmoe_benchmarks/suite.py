"""Benchmark `suite`: a grid of cells, and a single cell, against plain lm-eval."""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from capmoe_bench.benchmarks import check_names
from capmoe_bench.rounds import CPU, alternate, finish, ratio, say
from capmoe_bench.timings import Target
from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.loading import load_lm
from capmoe_eval.evaluation.tasks import task_manager
from capmoe_eval.experiment.composition import composed
from capmoe_eval.experiment.configuration import CellPlan, plans
from capmoe_eval.zoo.hub import ready

GAMMAS: Final = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5)
"""Capacity factors of the grid."""


def run(arguments: argparse.Namespace) -> None:
    """Time both sides in turn, print the ratios and write ``suite.json``."""
    check_names(arguments.model, arguments.tasks)
    arguments.tasks = list(dict.fromkeys(arguments.tasks))
    tasks = f"tasks=[{','.join(arguments.tasks)}]"
    with tempfile.TemporaryDirectory() as scratch:
        say("suite: saving the model and the tasks for plain lm-eval")
        planned = plans(composed([f"model={arguments.model}", tasks]))
        lm = load_lm(planned[0].cell.model, "cpu")
        for part in (lm.model, lm.tokenizer):  # as any Hugging Face model, for lm-eval's loader
            part.save_pretrained(f"{scratch}/model")
        names = _save_tasks(planned, Path(scratch, "tasks"))
        runs = itertools.count()
        of_model = ["--model", "hf", "--model_args", f"pretrained={scratch}/model,dtype=float32"]
        of_model += ["--batch_size", str(planned[0].cell.batch_size), "--device", "cpu"]
        of_task = ["--include_path", f"{scratch}/tasks", "--limit", str(arguments.limit)]
        common = [f"model={arguments.model}", "method=score", f"limit={arguments.limit}"]

        def ours(*words: str) -> float:
            results = f"results_dir={scratch}/results-{next(runs)}"
            return seconds_of("capmoe_eval", "run", *words, *common, "device=cpu", results)

        def plain(task: str) -> float:
            output = ["--tasks", task, "--output_path", f"{scratch}/plain-{next(runs)}"]
            return seconds_of("lm_eval", *of_model, *of_task, *output)

        sides = {
            "grid, ours": lambda: ours("-m", f"gamma={','.join(map(str, GAMMAS))}", tasks),
            # The cells of a task do the same without a capacity: one counts for all.
            "grid, plain": lambda: len(GAMMAS) * sum(map(plain, names)),
            "cell, ours": lambda: ours("gamma=1.0", f"tasks={arguments.tasks[0]}"),
            "cell, plain": lambda: plain(names[0]),
        }
        seconds = alternate(sides, rounds=arguments.rounds, warmup=1, title="suite")
    n_tasks, limit = len(arguments.tasks), arguments.limit
    cells = len(GAMMAS) * n_tasks
    targets = [
        Target.of(
            f"grid of {cells} cells over plain lm-eval",
            f"Time of {cells} lm_eval processes over that of one process that computes the grid of "
            f"{len(GAMMAS)} γ × {n_tasks} tasks with {limit} documents each",
            ratio(seconds["grid, plain"], seconds["grid, ours"]),
            at_least=6.0,
        ),
        Target.of(
            "single cell over plain lm-eval",
            f"Time of one lm_eval process over that of one of ours, {limit} documents",
            ratio(seconds["cell, plain"], seconds["cell, ours"]),
            at_least=1.2,
        ),
    ]
    asked = ("model", "tasks", "limit")
    finish(arguments, CPU, targets, asked, gammas=GAMMAS, seconds=seconds)


def seconds_of(module: str, *words: str) -> float:
    """Run a module with some words, without the network, and return the seconds it takes.

    Raises:
        UsageError: If it fails.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    began, command = time.perf_counter(), [sys.executable, "-m", module, *words]
    done = subprocess.run(command, check=False, env=environment, **options)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise UsageError(f"{module}: said {last!r}")
    return time.perf_counter() - began


def _save_tasks(planned: Sequence[CellPlan], directory: Path) -> list[str]:
    """Write the tasks again, with their documents from where ours come; return their names."""
    directory.mkdir()
    names = []
    for plan in planned:
        task = plan.cell.task
        documents = ready(plan.source).directory(task.dataset)
        if documents is None:
            raise UsageError(f"model: {plan.cell.model.name} has no embedded documents")
        names.append(f"plain_{task.name}")
        fields = {
            "include": str(task_manager(task.lm_eval).task_index[task.lm_eval].yaml_path),
            "task": names[-1],
            "dataset_path": str(documents),
            "num_fewshot": task.fewshot or 0,
        }
        (directory / f"{names[-1]}.yaml").write_text(json.dumps(fields))  # which is YAML
    return names
