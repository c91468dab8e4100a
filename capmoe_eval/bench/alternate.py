"""Time computations in turn; write their ratios beside their targets."""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from capmoe_eval.bench.device import machine, say
from capmoe_eval.experiment.timings.schema import Evaluation
from capmoe_eval.experiment.timings.spread import Spread, Target

_Spent = TypeVar("_Spent")


def timed(work: Callable[[], object], wait: Callable[[], None] = lambda: None) -> float:
    """Return the seconds that some work takes; ``wait`` waits until the device has finished."""
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def alternate(
    sides: Mapping[str, Callable[[], _Spent]], *, rounds: int, warmup: int = 2, title: str = ""
) -> dict[str, list[_Spent]]:
    """Run every side once in each round, so that what disturbs the machine disturbs all.

    Args:
        sides: By name: runs once and returns what counts, such as the seconds it took.
        rounds: Rounds that count. Each begins with another side.
        warmup: Rounds before them that do not.
        title: With it, every round is announced.

    Returns:
        What every side returned, once for each round.
    """
    spent: dict[str, list[_Spent]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(warmup + rounds):
        if title:
            say(f"{title}: round {number + 1} of {warmup + rounds}")
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found = sides[name]()
            if number >= warmup:
                spent[name].append(found)
    return spent


def ratio(numerator: list[float], denominator: list[float]) -> Spread:
    """Return the ratio within each round, as median and quartiles."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])


def line(target: Target) -> str:
    """Return a number, its quartiles and what it should be, in one line."""
    ratio = target.ratio
    spread = f"{target.shown(ratio.low)} – {target.shown(ratio.high)}"
    goal = f"{target.goal}  {'met' if target.met else 'MISSED'}" if target.goal else ""
    return f"{target.name:<44}{target.shown(ratio.median):>10}  {spread:<22}{goal}".rstrip()


def finish(
    given: argparse.Namespace,
    device: torch.device,
    targets: Sequence[Target],
    options: Sequence[str] = (),
    **more: Any,
) -> None:
    """Print a line for each target and write ``<command>.json``, with options and further fields.

    A target that is missed is a finding, not an error: the file says so.
    """
    path = given.out / f"{given.command}.json"
    common = {"command": given.command, "date": now(), "machine": machine(device)}
    asked = {name: getattr(given, name) for name in options}
    file = Evaluation(schema=Evaluation.SCHEMA, **common, targets=tuple(targets), **asked, **more)
    file.write(path)
    print(*map(line, targets), f"written: {path}", sep="\n")


def now() -> str:
    """Return the time, ISO 8601, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
