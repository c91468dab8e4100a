"""What a benchmark is held against, and the file and the text that say how it came out."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from capmoe_eval.atomic import write_text
from capmoe_eval.spread import Spread

SCHEMA = 1


@dataclass(frozen=True)
class Target:
    """One measured number with what it should be.

    Attributes:
        name: Short name.
        what: What is divided by what, in one sentence.
        ratio: What was measured.
        target: What it should be; None where it is only reported.
        at_least: Whether it should be at least that; otherwise at most.
        unit: ``×`` for a ratio, ``share`` for a part of a whole, or a unit.
    """

    name: str
    what: str
    ratio: Spread
    target: float | None = None
    at_least: bool = True
    unit: Literal["×", "share", "s", "MiB"] = "×"

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the target; None where there is none."""
        if self.target is None:
            return None
        reached = self.ratio.median
        return reached >= self.target if self.at_least else reached <= self.target

    def line(self) -> str:
        """Return the number, its quartiles and what it should be, in one line."""
        said = f"{self._number(self.ratio.median):>9}"
        spread = f"{self._number(self.ratio.low)} – {self._number(self.ratio.high)}"
        if self.target is None:
            verdict = ""
        else:
            sign = "≥" if self.at_least else "≤"
            verdict = f"{sign} {self._number(self.target)}  {'met' if self.met else 'MISSED'}"
        return f"{self.name:<44}{said}  {spread:<22}{verdict}"

    def _number(self, value: float) -> str:
        if self.unit == "share":
            return f"{100 * value:.2f} %"
        return f"{value:.2f} {self.unit}" if self.unit != "×" else f"{value:.3f} ×"

    def content(self) -> dict[str, Any]:
        """Return the target, JSON-ready."""
        return {**dataclasses.asdict(self), "met": self.met}


def finish(
    command: str,
    targets: Sequence[Target],
    on: Mapping[str, Any],
    *,
    out: Path,
    **more: Any,
) -> int:
    """Write ``<command>.json`` and print the lines; return the exit status, 0.

    A target that is missed is a finding, not an error: the file says so.
    """
    content = {
        "schema": SCHEMA,
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": dict(on),
        "targets": [target.content() for target in targets],
        **more,
    }
    path = out / f"{command}.json"
    write_text(path, json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    for target in targets:
        print(target.line())
    print(f"written: {path}")
    return 0
