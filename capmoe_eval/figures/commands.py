"""The command lines that measure what is missing."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from capmoe_eval.cell import Cell
from capmoe_eval.configuration import load_option
from capmoe_eval.method import Method

_COMMAND = "python -m capmoe_eval"


def commands(cells: Iterable[Cell], overrides: Sequence[str] = ()) -> list[str]:
    """Return commands that compute exactly these cells: few, since a sweep loads a model once.

    Args:
        cells: What is missing.
        overrides: What was said on the command line of the figure, such as ``limit=100``.
    """
    kept = [word for word in overrides if not _is_of_the_experiment(word)]
    said = {word.lstrip("+").partition("=")[0] for word in kept}
    # Cells that differ in nothing but the task share a run; then seeds, then γ are swept.
    tasks: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for cell in cells:
        gamma, seed = cell.method.gamma, _seed(cell.method)
        tasks[tuple(_words(cell, said)), gamma, seed].append(cell.task.name)
    seeds: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for (words, gamma, seed), names in tasks.items():
        seeds[words, gamma, tuple(names)].append(seed)
    gammas: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for (words, gamma, names), several in seeds.items():
        gammas[words, names, tuple(several)].append(gamma)
    return [
        _line(kept, words, names, gamma, seed) for (words, names, seed), gamma in gammas.items()
    ]


def _is_of_the_experiment(word: str) -> bool:
    """Whether an override only makes sense beside the experiment's grids."""
    return word.lstrip("+~").startswith(("grid", "parts", "profile"))


def _seed(method: Method) -> int | None:
    return method.seed if method.keep == "random" else None


def _words(cell: Cell, said: set[str]) -> list[str]:
    """Return the words that set a cell's model and method, without γ, seed and task."""
    model, method = load_option("model", cell.model.name), cell.method
    words = [f"model={cell.model.name}", f"method={method.name}"]
    defaults = Method(method.name, method.gamma)
    for knob, value in method.identity().items():
        usual = model.ep_size if knob == "ep_size" else getattr(defaults, knob, None)
        if knob not in ("method", "gamma", "seed") and value != usual and knob not in said:
            words.append(f"{knob}={str(value).lower() if isinstance(value, bool) else value}")
    if cell.batch_size != model.batch_size and "batch_size" not in said:
        words.append(f"batch_size={cell.batch_size}")
    if cell.shuffle is not None and "shuffle" not in said:
        words.append(f"shuffle={cell.shuffle}")
    return words


def _line(
    overrides: Sequence[str],
    words: Sequence[str],
    tasks: Sequence[str],
    gammas: Sequence[float | None],
    seeds: Sequence[int | None],
) -> str:
    line = [*overrides, *words]
    if gammas[0] is not None:
        line.append("gamma=" + ",".join(f"{gamma}" for gamma in gammas))
    if seeds[0] is not None:
        line.append("seed=" + ",".join(f"{seed}" for seed in seeds))
    # Hydra reads a bare comma as a sweep, so several tasks are a list in brackets.
    line.append(f"tasks={tasks[0]}" if len(tasks) == 1 else f"tasks=[{','.join(tasks)}]")
    if len(gammas) > 1 or len(seeds) > 1:
        line.insert(0, "-m")
    return f"{_COMMAND} {shlex.join(line)}"
