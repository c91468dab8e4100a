"""Effects of contrasts, kept in a file so that the same records are not compared again.

An effect follows from the answers in the records of its two sides and from the code that compares
them. It is found again by a digest over the checksums of these records, and the file holds for one
digest over that code; where either is another, the effect is computed. What is concluded from an
effect (margins, claims, verdicts) is never kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata, resources
from itertools import zip_longest
from pathlib import Path
from typing import Final, TypeAlias

from pydantic import BaseModel, TypeAdapter, ValidationError

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.files import read_bytes, write_text
from capmoe_eval.experiment.names import family
from capmoe_eval.experiment.record import Record, Scored
from capmoe_eval.paper.statistics import Effect, contrast

MIX: Final = "zero_shot_mix"
"""The task whose requests, of four tasks, meet in one batch."""

Records: TypeAlias = Mapping[str, Sequence[Record]]
"""One side of a contrast on one model: its records by task; several differ in seed or shuffle."""

_SOURCES: Final = (
    *(f"paper/{name}.py" for name in ("effects", "hierarchy", "pairing", "resampling")),
    *("paper/statistics.py", "experiment/record.py"),
)
_LIBRARIES: Final = ("numpy", "scipy")
FILE: Final = "effects.{}.json"
"""The file of a results directory that keeps the effects of a command."""


class _File(BaseModel):
    code: str  # the digest of :func:`code`
    effects: dict[str, Effect]  # by the digest over their records


class Effects:
    """Computes each effect that is not in a file for the same records and the same code.

    Without a file nothing is kept; the first is written, those behind it are only read. To
    recompute is to compare with them what they hold.
    """

    def __init__(self, *paths: Path, recompute: bool = False) -> None:
        self._path = paths[0] if paths else None
        self._kept = {key: kept for path in reversed(paths) for key, kept in _read(path).items()}
        self._known = {} if recompute else dict(self._kept)
        self._used: dict[str, Effect] = {}

    def of(self, found: Mapping[str, tuple[Records, Records]]) -> Effect:
        """Return the effect of the records of both sides, by model."""
        key = _digest(found)
        if key is None or key not in self._known:
            sides = {model: (documents(one), documents(two)) for model, (one, two) in found.items()}
            effect = contrast(sides)
            if key is None or effect.comparison is None or effect.unpaired:
                return effect
            self._known[key] = effect
        self._used[key] = self._known[key]
        return self._known[key]

    def write(self) -> None:
        """Write the effects that were asked for, no others; what cannot be written is not kept.

        A file that would say the same is not written. If one held others for the same records and
        code, that is a UsageError.
        """
        if self._path is None or self._used in ({}, self._kept):
            return
        # A line each, so that versions of the file can be compared and merged.
        lines = ",\n".join(
            f'"{key}": {_text(effect)}' for key, effect in sorted(self._used.items())
        )
        with suppress(OSError):
            write_text(self._path, f'{{"code": "{code()}", "effects": {{\n{lines}\n}}}}\n')
        both = self._used.keys() & self._kept.keys()
        wrong = sum(not _close(self._used[key], self._kept[key]) for key in both)
        if wrong:
            raise UsageError(
                f"{self._path}: {wrong} of {len(both)} effects were not what their records give; "
                "the file is corrected, find out who changed it"
            )


def documents(side: Records) -> dict[str, list[Scored]]:
    """Return a side's scores on a model, by task: one item for each seed and shuffle.

    The subjects of MMLU are one task, those of a mixture are several.
    """
    found: dict[str, list[Scored]] = {}
    for task, records in side.items():
        for record in records:
            if task == MIX:
                for name, part in record.documents.items():
                    found.setdefault(name, []).append({name: part})
            else:
                found.setdefault(task, []).append(record.documents)
    return found


@cache
def code() -> str:
    """Return a digest over the code that computes effects, and the versions of what it calls."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((resources.files("capmoe_eval") / name).read_bytes())
    for name in _LIBRARIES:
        digest.update(f"{name}=={metadata.version(name)}".encode())
    return digest.hexdigest()


def _digest(found: Mapping[str, tuple[Records, Records]]) -> str | None:
    """Return a digest over all records, in their order; None where one was read from no file."""
    named = [
        (model, family(model), side, task, [record.checksum for record in records])
        for model, sides in found.items()
        for side, by_task in enumerate(sides)
        for task, records in by_task.items()
    ]
    if not all(all(checksums) for *_, checksums in named):
        return None
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def _read(path: Path) -> dict[str, Effect]:
    """Return the effects of a file by their digests; none if damaged or of other code."""
    try:
        kept = _File.model_validate_json(read_bytes(path))
    except (OSError, ValidationError):
        return {}
    return kept.effects if kept.code == code() else {}


def _text(effect: Effect) -> str:
    return json.dumps(TypeAdapter(Effect).dump_python(effect, exclude={"unpaired", "records"}))


def _close(one: Effect, other: Effect) -> bool:
    """Return whether two effects are the same but for the last digits, which machines differ in."""
    pairs = zip_longest(_numbers(one), _numbers(other), fillvalue=math.nan)
    return one.tasks == other.tasks and all(
        math.isclose(*both, rel_tol=1e-9, abs_tol=1e-9) for both in pairs
    )


def _numbers(effect: Effect) -> list[float]:
    compared = dataclasses.astuple(effect.comparison) if effect.comparison else ()
    return [*compared, *(effect.wide or ()), *effect.models.values()]
