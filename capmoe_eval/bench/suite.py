"""Benchmark `suite`: grids, cells and the start of commands against plain lm-eval."""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from capmoe_eval.bench.child import Command, spend
from capmoe_eval.bench.options import GAMMAS, check_names
from capmoe_eval.bench.rounds import CPU, alternate, finish, ratio, say, target_of
from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.loading import load_lm
from capmoe_eval.evaluation.tasks import task_manager
from capmoe_eval.experiment.configuration import Placement, Plan, plans
from capmoe_eval.experiment.selection import composed
from capmoe_eval.zoo.hub import ready


def run(given: argparse.Namespace) -> None:
    """Time both sides in turn, print the ratios and write ``suite.json``."""
    check_names(given.model, given.tasks)
    given.tasks = list(dict.fromkeys(given.tasks))
    tasks = f"tasks=[{','.join(given.tasks)}]"
    with tempfile.TemporaryDirectory() as scratch:
        say("suite: saving the model and the tasks for plain lm-eval")
        planned = plans(composed([f"model={given.model}", tasks]))
        lm = load_lm(planned[0].cell.model, Placement("cpu"))
        for part in (lm.model, lm.tokenizer):  # as any Hugging Face model, for lm-eval's loader
            part.save_pretrained(f"{scratch}/model")
        names = _save_tasks(planned, Path(scratch, "tasks"))
        runs = itertools.count()

        def ours(*words: str) -> float:
            common = [f"model={given.model}", "method=score", f"limit={given.limit}", "device=cpu"]
            results = f"results_dir={scratch}/results-{next(runs)}"
            return _seconds("capmoe_eval", *words, *common, results)

        def plain(task: str) -> float:
            options = {
                "model": "hf",
                "model_args": f"pretrained={scratch}/model,dtype=float32",
                "tasks": task,
                "include_path": f"{scratch}/tasks",
                "batch_size": planned[0].cell.batch_size,
                "limit": given.limit,
                "device": "cpu",
                "output_path": f"{scratch}/plain-{next(runs)}",
            }
            words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
            return _seconds("lm_eval", *words)

        def plain_grid() -> float:
            """Run plain lm-eval for every cell; or once for each task, counted for its cells."""
            times = len(GAMMAS) if given.every_cell else 1
            return len(GAMMAS) / times * sum(plain(name) for name in names for _ in range(times))

        seconds = alternate(
            {
                "grid, ours": lambda: ours("-m", f"gamma={','.join(map(str, GAMMAS))}", tasks),
                "grid, plain": plain_grid,
                "cell, ours": lambda: ours("gamma=1.0", f"tasks={given.tasks[0]}"),
                "cell, plain": lambda: plain(names[0]),
                "help": lambda: _seconds("capmoe_eval", "--help"),
                "tables": lambda: _seconds("capmoe_eval.tables", "table2", "--out", scratch),
            },
            rounds=given.rounds,
            warmup=1,
            title="suite",
        )
    words = {"gammas": len(GAMMAS), "tasks": len(given.tasks), "limit": given.limit}
    words["cells"] = words["gammas"] * words["tasks"]
    targets = [
        target_of("suite_grid", ratio(seconds["grid, plain"], seconds["grid, ours"]), words),
        target_of("suite_cell", ratio(seconds["cell, plain"], seconds["cell, ours"]), words),
        target_of("suite_help", seconds["help"]),
        target_of("suite_tables", seconds["tables"]),
    ]
    more = {"gammas": GAMMAS, "every_plain_cell_ran": given.every_cell, "seconds": seconds}
    finish(given, CPU, targets, ("model", "tasks", "limit"), **more)


def _seconds(module: str, *words: str) -> float:
    """Return the seconds that a module takes in a process of its own."""
    return spend(Command(module, ["-m", module, *words])).elapsed


def _save_tasks(planned: Sequence[Plan], directory: Path) -> list[str]:
    """Write the tasks again, with their documents from where ours come; return their names."""
    directory.mkdir()
    names = []
    for plan in planned:
        task = plan.cell.task
        documents = ready(plan.source).directory(task.dataset)
        if documents is None:
            raise UsageError(f"model: {plan.cell.model.name} has no embedded documents")
        names.append(f"plain_{task.name}")
        lines = [
            f"include: {task_manager(task.lm_eval).task_index[task.lm_eval].yaml_path}",
            f"task: {names[-1]}",
            f"dataset_path: {documents}",
            f"num_fewshot: {task.fewshot or 0}",
        ]
        (directory / f"{names[-1]}.yaml").write_text("\n".join(lines) + "\n")
    return names
