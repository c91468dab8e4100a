"""Reading what a JSON file says where it may say something else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ABSENT: Final = "—"


def mapping(value: object) -> Mapping[str, Any]:
    """Return an object, or an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def sequence(value: object) -> Sequence[Any]:
    """Return a list, or an empty one in place of anything else."""
    return value if isinstance(value, list) else []


def number(value: object) -> float | None:
    """Return a finite number, or None in place of anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def shown(value: object, pattern: str = "{:g}", scale: float = 1.0) -> str:
    """Return a number as text, or a dash in place of anything else."""
    found = number(value)
    return ABSENT if found is None else pattern.format(scale * found).replace("-", "−")


def text(value: object) -> str:
    """Return any JSON value as words."""
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def read_object(path: Path) -> Mapping[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: If the file cannot be read or holds something else; the message says what.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content
