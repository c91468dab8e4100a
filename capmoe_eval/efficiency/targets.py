"""What a benchmark of the evaluation promises, and reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from capmoe_eval.efficiency.content import Content, read_content
from capmoe_eval.efficiency.study import Spread

SCHEMA: Final = 1
EVALUATIONS: Final = MappingProxyType(
    {
        "forward": "our forward against stock transformers'",
        "decision": "the routing decision against the layer, and against Algorithms 1 and 2",
        "suite": "the suite against one lm-eval process per cell and task",
        "cells": "time and memory over documents and cells",
    }
)
"""Every benchmark of the evaluation, and what it is about; each writes ``<name>.json``."""


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes:
        name: What it is called.
        ratio: What was reached, in ``unit``.
        target: What was to be reached; None where a number is reported without a goal.
        met: Whether it was, as the benchmark says; None without a goal.
        what: One sentence: of what the ratio is.
        unit: ``×`` or ``share``.
        at_least: Whether the target is the least ratio; else it is the most.
    """

    name: str
    ratio: Spread
    target: float | None
    met: bool | None
    what: str
    unit: str = "×"
    at_least: bool = True


@dataclass(frozen=True)
class Evaluation:
    """The file of one benchmark of the evaluation."""

    path: Path
    name: str
    command: str
    date: str
    machine: str
    targets: tuple[Target, ...]


def read_evaluation(path: Path) -> Evaluation:
    """Read the file of a benchmark; what it has besides its targets is not looked at.

    Raises:
        UsageError: If it cannot be read, is of another schema, or lacks something.
    """
    content, _ = read_content(path, SCHEMA, evaluation_command(path.stem))
    return Evaluation(
        path=path,
        name=path.stem,
        command=content.text("command"),
        date=content.text("date"),
        machine=_machine(content.part("machine")),
        targets=tuple(_target(target) for target in content.parts("targets")),
    )


def evaluation_command(name: str) -> str:
    """Return the command line that makes the file of a benchmark."""
    return f"python -m capmoe_eval.bench {name}"


def _machine(content: Content) -> str:
    said = [content.text(key) for key in ("device", "name") if content.has(key)]
    return ": ".join(said)


def _target(content: Content) -> Target:
    ratio = content.part("ratio")
    median, low, high = (ratio.number(key) for key in ("median", "low", "high"))
    target = content.optional_number("target")
    return Target(
        name=content.text("name"),
        ratio=Spread(median, low, high),
        target=target,
        met=None if target is None else content.flag("met"),
        what=content.text("what"),
        unit=content.optional_text("unit") or "×",
        at_least=content.flag("at_least", True),
    )
