"""Benchmark `chaos`: kill sweeps at random moments, restart them, and compare their records."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from capmoe_eval.bench.chaos.disturbance import Disturbance, Start, Starter, Story, free_port
from capmoe_eval.bench.chaos.faults import FAULTS, Disk
from capmoe_eval.bench.chaos.judge import Reference, Verdict
from capmoe_eval.bench.chaos.sweep import STAGES, Sweep, watch
from capmoe_eval.bench.rounds import CPU, finish, say, target_of
from capmoe_eval.errors import UsageError, check_choice
from capmoe_eval.evaluation.command import execute
from capmoe_eval.evaluation.tasks import task_manager
from capmoe_eval.experiment.application import run_program
from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.results import record_paths
from capmoe_eval.experiment.selection import composed
from capmoe_eval.experiment.timings.findings import Faults
from capmoe_eval.experiment.timings.spread import Target

_GRID: Final = (
    "grid.model=[tiny_olmoe,tiny_mixtral]",
    "grid.method=[score,random]",
    "grid.gamma=[1.0,2.0]",
    *("tasks=obqa", "limit=2", "batch_size=2", "ep_size=2", "device=cpu", "threads=1"),
)
_RANKS: Final = 2
_BY_COMMAND: Final = 5  # every fifth kill is of a command line, the others of forks
_LOADED: Final = ("run", "evaluate", "lm", "summary", "provenance", "loading")


def run(given: argparse.Namespace) -> None:
    """Let the faults happen, print what was lost or wrong, and write ``chaos.json``."""
    given.kinds = list(dict.fromkeys(given.kinds or FAULTS))
    for kind in given.kinds:
        check_choice("--kinds", kind, FAULTS)
    if given.kills < len(given.kinds):
        raise UsageError(f"--kills={given.kills}: must be at least one for each of --kinds")
    with tempfile.TemporaryDirectory(prefix="capmoe-chaos-") as scratch:
        say(f"chaos: everything lies in {scratch}, which is removed in the end")
        chaos = _Chaos(Path(scratch), random.Random(given.seed), 60 * given.minutes)
        found = chaos.run(given.kinds, given.kills, given.at_a_time)
    options = ("kills", "seed", "kinds", "at_a_time")
    finish(given, CPU, _targets(found), options, faults=found, grid=_GRID)


def _words(root: Path, ranks: int) -> list[str]:
    return [*_GRID, f"results_dir={root}", *(["parallel=ep"] if ranks > 1 else [])]


def _fork(root: Path, environment: Mapping[str, str], ranks: int) -> Start:
    """Start forks of this process, in which all modules are imported already."""
    planned = plans(composed(_words(root, ranks)))

    def start(pause_at: int | None, rank: int, port: int) -> Sweep:
        own: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        more = {name: str(value) for name, value in own.items()} if ranks > 1 else {}
        return Sweep(
            lambda: run_program(lambda: execute(planned)),
            root,
            pause_at=pause_at,
            environment={**environment, **more},
        )

    return start


def _command(root: Path, environment: Mapping[str, str], ranks: int) -> Start:
    """Start command lines, with ``torchrun`` where there are ranks."""
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    line = [*(torchrun if ranks > 1 else []), "capmoe_eval", *_words(root, ranks)]
    line = [sys.executable, "-m", *line]

    def start(pause_at: int | None, rank: int, port: int) -> Sweep:
        del pause_at, rank, port
        work = partial(os.execv, sys.executable, line)
        return Sweep(work, root, environment=environment, launches=ranks > 1)

    return start


@dataclass
class _Directory:
    """A directory that was disturbed."""

    started: str  # ``fork`` or ``command``
    about: str  # what happened to it
    story: Story
    verdict: Verdict


class _Chaos:
    """Directories that are disturbed, some at a time."""

    def __init__(self, scratch: Path, draws: random.Random, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._scratch, self._draws = scratch, draws
        self._number = 0
        self._done: dict[str, list[_Directory]] = {}
        self._wanted: dict[str, int] = {}
        self._promised = Counter[str]()  # kills in directories that are being disturbed
        before = time.process_time()
        _import_all()
        self._imports = time.process_time() - before
        self._references: dict[int, tuple[Reference, float]] = {}

    def run(self, kinds: Sequence[str], kills: int, at_a_time: int) -> dict[str, Faults]:
        """Return what happened, by kind."""
        for ranks in {_RANKS if FAULTS[kind].ranks else 1 for kind in kinds}:
            self._references[ranks] = self._undisturbed(ranks)
        for number, kind in enumerate(kinds):
            self._wanted[kind] = kills // len(kinds) + (number < kills % len(kinds))
            self._done[kind] = []
        running: list[Generator[None, None, None]] = []
        try:
            while running or self._next():
                while len(running) < at_a_time and (lacks := self._next()):
                    running.append(self._disturbed(lacks, self._promise(lacks)))
                watch(0.05)
                running = [one for one in running if next(one, running) is not running]
        finally:
            for one in running:
                one.close()
        return {kind: _faults(found) for kind, found in self._done.items()}

    def _kills(self, kind: str) -> int:
        return sum(len(directory.story.kills) for directory in self._done[kind])

    def _next(self) -> str | None:
        """Return the kind that lacks most, or None if none lacks any."""
        left = {k: n - self._kills(k) - self._promised[k] for k, n in self._wanted.items()}
        stuck = any(one.story.stuck for found in self._done.values() for one in found)
        most = max(left, key=lambda kind: left[kind])
        late = time.monotonic() > self._until
        return None if stuck or late or left[most] <= 0 else most

    def _promise(self, kind: str) -> int:
        """Return how many kills the next directory of a kind is for."""
        left = self._wanted[kind] - self._kills(kind) - self._promised[kind]
        promised = min(left, self._draws.randint(2, 8))
        self._promised[kind] += promised
        return promised

    def _disturbed(self, kind: str, promised: int) -> Generator[None, None, None]:
        """Disturb a directory, and judge it; yield whenever sweeps are to be read."""
        fault, draws = FAULTS[kind], self._draws
        ranks = _RANKS if fault.ranks else 1
        reference, life = self._references[ranks]
        self._number += 1
        place = self._scratch / str(self._number)
        root = place / "results"
        disk, about = None, fault.about
        if kind == "disk":
            try:
                disk = Disk(place)
            except OSError as error:
                about = f"a limit on the size of files, as no disk can be mounted ({error})"
        started = "command" if self._number % _BY_COMMAND == 0 else "fork"
        # Of some the documents are not in the cache yet: whoever comes first makes them.
        environment = self._environment(self._number if draws.random() < 0.2 else 0)
        if started == "fork":
            starter = Starter(_fork(root, environment, ranks), life, ranks=ranks)
        else:
            command = _command(root, environment, ranks)
            starter = Starter(command, life + self._imports, pauses=False)
        try:
            story = yield from Disturbance(
                fault,
                starter,
                processes=draws.randint(1, 3 if started == "fork" else 2),
                kills=promised,
                draws=draws,
                missing=lambda: 1 - len(record_paths(root)) / len(reference.paths),
                disk=disk,
            ).run()
            found = _Directory(started, about, story, reference.judge(root))
        finally:
            if disk is not None:
                disk.remove()
        self._promised[kind] -= promised
        self._done[kind].append(found)
        kills, wrong = self._kills(kind), _faults(self._done[kind]).problems
        say(f"chaos: {kind}: {kills} of {self._wanted[kind]} kills, {wrong} wrong")

    def _undisturbed(self, ranks: int) -> tuple[Reference, float]:
        """Return a directory that nothing disturbs, and the processor seconds it takes."""
        say(f"chaos: a run of {ranks} process{'es' if ranks > 1 else ''} that nothing disturbs")
        root = self._scratch / f"undisturbed-{ranks}/results"
        start, port = _fork(root, self._environment(0), ranks), free_port()
        sweeps: list[Sweep] = []
        try:
            for rank in range(ranks):
                sweeps += [start(None, rank, port)]
            while any(sweep.status is None for sweep in sweeps):
                watch(0.1)
        finally:
            for sweep in sweeps:
                sweep.end()
        if any(sweep.status for sweep in sweeps):
            raise UsageError(f"the run that nothing disturbs failed: {sweeps[0].text[-500:]}")
        return Reference(root), sweeps[0].seconds

    def _environment(self, number: int) -> dict[str, str]:
        return {"XDG_CACHE_HOME": str(self._scratch / f"cache-{number}"), "OMP_NUM_THREADS": "1"}


def _import_all() -> None:
    """Import what a sweep imports, so that forks need not."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # as execute does, before tqdm is imported
    for name in _LOADED:
        import_module(f"capmoe_eval.evaluation.{name}")
    plan = plans(composed(_GRID))[0]
    task_manager(plan.cell.task.lm_eval)  # it looks through 14,000 files


def _faults(found: Sequence[_Directory]) -> Faults:
    kills = Counter[str]()
    for directory in found:
        kills[directory.started] += len(directory.story.kills)
    stories = [directory.story for directory in found]
    verdicts = [directory.verdict for directory in found]
    stages = Counter(kill.stage for story in stories for kill in story.kills)
    return Faults(
        about="; ".join(dict.fromkeys(directory.about for directory in found)),
        kills=kills.total(),
        of_forks=kills["fork"],
        of_commands=kills["command"],
        at_a_step=sum(kill.at_step for story in stories for kill in story.kills),
        stages={stage: stages[stage] for stage in STAGES if stages[stage]},
        directories=len(found),
        restarts=sum(story.restarts for story in stories),
        compared=sum(verdict.compared for verdict in verdicts),
        lost=[path for verdict in verdicts for path in verdict.lost],
        wrong=[path for verdict in verdicts for path in verdict.wrong],
        strays=[path for verdict in verdicts for path in verdict.strays],
        computed_by_two=sum(story.twice for story in stories),
        early=sum(story.early for story in stories),
        stuck=sum(story.stuck for story in stories),
        failed=[line for story in stories for line in story.failed],
        ended_otherwise=[line for story in stories for line in story.otherwise],
    )


def _targets(found: dict[str, Faults]) -> list[Target]:
    """Return a line for each kind, and the number of kills."""
    forks = sum(faults.of_forks for faults in found.values())
    commands = sum(faults.of_commands for faults in found.values())
    about = {"forks": forks, "commands": commands}
    targets = [target_of("chaos_kills", [float(forks + commands)], about)]
    for kind, faults in found.items():
        stages = ", ".join(f"{stage} {count}" for stage, count in faults.stages.items())
        words = {"kind": kind, "faults": faults, "stages": stages}
        targets.append(target_of("chaos_wrong", [float(faults.problems)], words))
    return targets
