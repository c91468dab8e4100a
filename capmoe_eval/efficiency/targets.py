"""What a benchmark of the evaluation promises, and reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from capmoe_eval.efficiency.content import Content, read_content
from capmoe_eval.spread import Spread

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
    """One measured number with what it should be.

    Attributes:
        name: Short name.
        what: One sentence: what is divided by what.
        ratio: What was measured, in ``unit``.
        target: What it should be; None where it is only reported.
        at_least: Whether it should be at least that; otherwise at most.
        unit: ``×`` for a ratio, ``share`` for a part of a whole, ``s`` for seconds.
    """

    name: str
    what: str
    ratio: Spread
    target: float | None = None
    at_least: bool = True
    unit: str = "×"

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the target; None where there is none."""
        if self.target is None:
            return None
        reached = self.ratio.median
        return reached >= self.target if self.at_least else reached <= self.target

    @property
    def goal(self) -> str | None:
        """What it should be, in its unit; None where it is only reported."""
        if self.target is None:
            return None
        return f"{'≥' if self.at_least else '≤'} {self.shown(self.target)}"

    def shown(self, value: float) -> str:
        """Return a value in the target's unit."""
        if self.unit == "share":
            return f"{100 * value:.2f}\u00a0%"
        return f"{value:.3f}\u00a0×" if self.unit == "×" else f"{value:.2f}\u00a0{self.unit}"


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
    target = Target(
        name=content.text("name"),
        what=content.text("what"),
        ratio=Spread(median, low, high),
        target=content.optional_number("target"),
        at_least=content.flag("at_least", True),
        unit=content.optional_text("unit") or "×",
    )
    if target.target is not None and content.flag("met") is not target.met:
        raise content.wrong("met", "is not what ratio and target say")
    return target
