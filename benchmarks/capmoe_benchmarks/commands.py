"""Benchmark `commands`: the processor time of everyday commands, here and in another checkout."""

from __future__ import annotations

import argparse
import itertools
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from capmoe_eval.bench.rounds import CPU, alternate, finish, ratio, say
from capmoe_eval.errors import UsageError, check_choice
from capmoe_eval.results.timings import Target
from capmoe_serve.trace_file import save_trace

from capmoe_benchmarks.cost import cost_of
from capmoe_benchmarks.options import BENCHMARKS
from capmoe_benchmarks.targets import target_of
from capmoe_benchmarks.trace import made_trace

RESULTS: Final = "results/zoo"


class EverydayCommand(NamedTuple):
    """A command that users wait for."""

    goal: float  # processor seconds
    words: str  # after ``python -m capmoe_eval``, or after ``python`` if they begin with ``-c``
    status: int = 0
    fresh_cache: bool = False  # whether it finds an empty cache of the user


COMMANDS: Final = {
    "help": EverydayCommand(0.5, "--help"),
    "table": EverydayCommand(0.5, "table table2 --out {out}/tables"),
    "typo": EverydayCommand(0.5, "gama=1.0 method=score", status=2),
    "sweep": EverydayCommand(1.5, "profile=zoo experiment=table2 results_dir={out}/zoo"),
    "cell": EverydayCommand(
        5.0,
        "model=zoo_olmoe tasks=piqa method=score gamma=1.0 limit=8 device=cpu "
        "results_dir={out}/cell-{run}",
    ),
    "plan": EverydayCommand(15.0, "{plan} experiment=table2 plan=true", fresh_cache=True),
    "plan again": EverydayCommand(2.0, "{plan} experiment=table2 plan=true"),
    "report": EverydayCommand(
        2.0, "report --all --out {out}/reports profile=zoo results_dir={out}/zoo"
    ),
    "load_frame": EverydayCommand(
        1.0, "-c 'import capmoe_eval; print(len(capmoe_eval.load_frame(\"{out}/zoo\")))'"
    ),
    "advise": EverydayCommand(
        10.0, "advise {trace} --ranks 8 --at-least-speedup 1.2 --out {out}/advice"
    ),
}
"""In the warm-up round each command leaves what it finds later: caches, tables, the report."""

# The modules of these commands in checkouts from before there was one command.
_MODULES: Final = {"table": "tables", "report": "site", "advise": "advise"}


class Checkout:
    """A checkout of this repository whose commands are measured."""

    def __init__(self, folder: Path, python: str, out: Path, fields: Mapping[str, object]) -> None:
        self.folder = folder
        self._python, self._out, self._fields = python, out, fields
        self._runs = itertools.count()
        out.mkdir()
        shutil.copytree(folder / RESULTS, out / "zoo")  # so that no command changes the checkout's

    def seconds(self, name: str) -> float:
        """Return the processor seconds of a command."""
        command, number = COMMANDS[name], next(self._runs)
        words = shlex.split(command.words.format(out=self._out, run=number, **self._fields))
        if words[0] != "-c":
            module = f"capmoe_eval/{_MODULES.get(words[0])}.py"
            if (self.folder / module).is_file():
                words = ["-m", f"capmoe_eval.{_MODULES[words[0]]}", *words[1:]]
            else:
                words = ["-m", "capmoe_eval", *words]
        cache = self._out / (f"cache-{number}" if command.fresh_cache else "cache")
        return cost_of(
            f"{name} in {self.folder}",
            words,
            status=command.status,
            python=self._python,
            folder=self.folder,
            environment={"XDG_CACHE_HOME": str(cache)},
        ).seconds


def run(arguments: argparse.Namespace) -> None:
    """Time the commands, print processor seconds and ratios, and write ``commands.json``."""
    names = list(dict.fromkeys(arguments.only or COMMANDS))
    for name in names:
        check_choice("--only", name, COMMANDS)
    other = arguments.against and arguments.against / ".venv/bin/python"
    if other and not other.exists():
        raise UsageError(f"--against={arguments.against}: has no .venv; run `make install` there")
    with tempfile.TemporaryDirectory(prefix="capmoe-commands-") as scratch:
        place = Path(scratch)
        if "advise" in names:
            say("commands: drawing a trace")
            sizes = {**vars(arguments), **_shape()}
            save_trace(made_trace(argparse.Namespace(**sizes)), place / "trace.npz")
        data = arguments.data
        plan = "profile=zoo" if data is None else f"profile=paper data.root={data.absolute()}"
        fields = {"trace": place / "trace.npz", "plan": plan}
        checkouts = dict(_checkouts(arguments.against, place, fields))
        seconds: dict[str, dict[str, list[float]]] = {}
        for name in names:
            sides = {side: partial(of.seconds, name) for side, of in checkouts.items()}
            title = f"commands: {name}"
            seconds[name] = alternate(sides, rounds=arguments.rounds, warmup=1, title=title)
    targets = [target for name in names for target in _targets(name, seconds[name])]
    against = None if arguments.against is None else arguments.against.name
    finish(arguments, CPU, targets, ("tokens", "layers"), against=against, seconds=seconds)


def _shape() -> dict[str, int]:
    """Return the experts and the top-k of the traces of ``bench trace``."""
    options = BENCHMARKS.trace.options
    return {"experts": options["--experts"]["default"], "top_k": options["--top-k"]["default"]}


def _checkouts(
    against: Path | None, place: Path, fields: Mapping[str, object]
) -> Iterator[tuple[str, Checkout]]:
    """Yield this directory, and the other one where there is one."""
    yield "now", Checkout(Path.cwd(), sys.executable, place / "now", fields)
    if against is not None:
        python = str(against.absolute() / ".venv/bin/python")
        yield "before", Checkout(against.absolute(), python, place / "before", fields)


def _targets(name: str, seconds: dict[str, list[float]]) -> Iterator[Target]:
    """Yield a command's processor time, and the other checkout's over it."""
    command = COMMANDS[name].words
    yield target_of(
        "command_seconds",
        seconds["now"],
        {"name": name, "command": command},
        at_most=COMMANDS[name].goal,
    )
    if "before" in seconds:
        words = {"name": name, "command": command}
        yield target_of("command_ratio", ratio(seconds["before"], seconds["now"]), words)
