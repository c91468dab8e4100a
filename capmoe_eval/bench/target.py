"""The file and the text that say how a benchmark of the evaluation came out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capmoe_eval.bench.device import now
from capmoe_eval.experiment.timings.targets import Target

if TYPE_CHECKING:
    from capmoe_eval.experiment.timings.file import Machine


def line(target: Target) -> str:
    """Return a number, its quartiles and what it should be, in one line."""
    ratio = target.ratio
    spread = f"{target.shown(ratio.low)} – {target.shown(ratio.high)}"
    goal = f"{target.goal}  {'met' if target.met else 'MISSED'}" if target.goal else ""
    return f"{target.name:<44}{target.shown(ratio.median):>10}  {spread:<22}{goal}".rstrip()


def finish(
    command: str,
    targets: Sequence[Target],
    on: Machine,
    *,
    out: Path,
    **more: Any,
) -> int:
    """Write ``<command>.json`` and print the lines; return the exit status, 0.

    A target that is missed is a finding, not an error: the file says so.
    """
    from capmoe_eval.experiment.timings.schema import Evaluation

    file = Evaluation(
        schema=Evaluation.SCHEMA,
        command=command,
        date=now(),
        machine=on,
        targets=tuple(targets),
        **more,
    )
    path = out / f"{command}.json"
    file.write(path)
    for target in targets:
        print(line(target))
    print(f"written: {path}")
    return 0
