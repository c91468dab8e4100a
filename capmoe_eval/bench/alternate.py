"""Several ways to do one thing, timed in turn, so that what disturbs the machine disturbs all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from capmoe_eval.experiment.timings.quartiles import Spread

_Spent = TypeVar("_Spent")


def timed(work: Callable[[], object], wait: Callable[[], None] = lambda: None) -> float:
    """Run something and return the seconds it took.

    Args:
        work: What to run.
        wait: Waits until the device has finished.
    """
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def alternate(
    sides: Mapping[str, Callable[[], _Spent]],
    *,
    rounds: int,
    warmup: int = 2,
    on_round: Callable[[int], None] = lambda _number: None,
) -> dict[str, list[_Spent]]:
    """Run every side once in each round; each round begins with another.

    Args:
        sides: By name: runs once and returns what counts, such as the seconds it took.
        rounds: Rounds that count.
        warmup: Rounds before them that do not.
        on_round: Told the number of each round that begins.

    Returns:
        What every side returned, once for each round.
    """
    spent: dict[str, list[_Spent]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(warmup + rounds):
        on_round(number)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found = sides[name]()
            if number >= warmup:
                spent[name].append(found)
    return spent


def ratio(numerator: list[float], denominator: list[float]) -> Spread:
    """Return the ratio within each round, as median and quartiles."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])
