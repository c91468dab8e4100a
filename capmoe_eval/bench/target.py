"""The file and the text that say how a benchmark of the evaluation came out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from capmoe_eval.atomic import write_text
from capmoe_eval.bench.where import heading
from capmoe_eval.efficiency.targets import SCHEMA, Target


def line(target: Target) -> str:
    """Return a number, its quartiles and what it should be, in one line."""
    ratio = target.ratio
    spread = f"{target.shown(ratio.low)} – {target.shown(ratio.high)}"
    goal = f"{target.goal}  {'met' if target.met else 'MISSED'}" if target.goal else ""
    return f"{target.name:<44}{target.shown(ratio.median):>10}  {spread:<22}{goal}".rstrip()


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
        **heading(SCHEMA, command, on),
        "targets": [{**dataclasses.asdict(target), "met": target.met} for target in targets],
        **more,
    }
    path = out / f"{command}.json"
    write_text(path, json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    for target in targets:
        print(line(target))
    print(f"written: {path}")
    return 0
