"""Effects of contrasts, kept in a file so that the same records are not compared again.

An effect follows from the answers in the records of its two sides and from the code that compares
them. It is found again by a digest over the checksums of these records, and the file holds for one
digest over that code; where either is another, the effect is computed. What is concluded from an
effect (margins, claims, verdicts) is never kept.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata, resources
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

from pydantic import BaseModel, TypeAdapter, ValidationError

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.files import read_bytes, write_text
from capmoe_eval.experiment.names import family
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.record_part import TaskAnswers
from capmoe_eval.paper.statistics import Effect, contrast

MIX: Final = "zero_shot_mix"
"""The task whose requests, of four tasks, meet in one batch."""

Records: TypeAlias = Mapping[str, Sequence[Record]]
"""One side of a contrast on one model: its records by task; several differ in seed or shuffle."""

SOURCES: Final = (
    *(f"paper/{name}.py" for name in ("effects", "pairing", "statistics")),
    *(f"experiment/{name}.py" for name in ("record", "record_part")),
)
"""The modules that compute an effect."""
_LIBRARIES: Final = ("numpy", "scipy")
_ADAPTER: Final = TypeAdapter(Effect)
FILE: Final = "effects.{}.json"
"""The file of a results directory that keeps the effects of a command."""


class _EffectsFile(BaseModel):
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
        self._computed = {} if recompute else dict(self._kept)
        self._used: dict[str, Effect] = {}

    def of(
        self,
        sides: Mapping[str, tuple[Records, Records]],
        without: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> Effect:
        """Return the effect of the records of both sides, by model.

        ``without`` names the tasks of lm-eval of each model that have no part in it.
        """
        key = _digest(sides, without)
        if key is None or key not in self._computed:
            effect = contrast(
                {
                    model: (documents(first, idle), documents(second, idle))
                    for model, (first, second) in sides.items()
                    for idle in [without.get(model, ())]
                }
            )
            if key is None or effect.points is None or effect.unpaired:
                return effect
            self._computed[key] = effect
        self._used[key] = self._computed[key]
        return self._computed[key]

    def write(self) -> None:
        """Write the effects that were asked for, no others; what cannot be written is not kept.

        A file that would say the same is not written. If one held others for the same records and
        code, that is a UsageError.
        """
        if self._path is None or self._used in ({}, self._kept):
            return
        # A line each, so that versions of the file can be compared and merged.
        lines = ",\n".join(
            f'"{key}": {json.dumps(_ADAPTER.dump_python(effect, exclude={"unpaired", "records"}))}'
            for key, effect in sorted(self._used.items())
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


def documents(side: Records, without: Collection[str] = ()) -> dict[str, list[TaskAnswers]]:
    """Return a side's scores on a model, by task: one item for each seed and shuffle.

    The subjects of MMLU are one task, those of a mixture are several. ``without`` names tasks of
    lm-eval to leave out.
    """
    scores: dict[str, list[TaskAnswers]] = {}
    for task, records in side.items():
        for record in records:
            if task == MIX:
                for name, part in record.documents.items():
                    if name not in without:
                        scores.setdefault(name, []).append({name: part})
            elif record.cell.task.lm_eval not in without:
                scores.setdefault(task, []).append(record.documents)
    return scores


@cache
def code() -> str:
    """Return a digest over the code that computes effects, and the versions of what it calls."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((resources.files("capmoe_eval") / name).read_bytes())
    for name in _LIBRARIES:
        digest.update(f"{name}=={metadata.version(name)}".encode())
    return digest.hexdigest()


def _digest(
    sides: Mapping[str, tuple[Records, Records]], without: Mapping[str, Collection[str]]
) -> str | None:
    """Return a digest over all records, in their order; None where one was read from no file."""
    named = [
        (model, family(model), side, task, [record.checksum for record in records])
        for model, both in sides.items()
        for side, by_task in enumerate(both)
        for task, records in by_task.items()
    ]
    if not all(all(checksums) for *_, checksums in named):
        return None
    left_out = sorted((model, *sorted(tasks)) for model, tasks in without.items())
    return hashlib.sha256(json.dumps([named, left_out]).encode()).hexdigest()


def _read(path: Path) -> dict[str, Effect]:
    """Return the effects of a file by their digests; none if damaged or of other code."""
    try:
        kept = _EffectsFile.model_validate_json(read_bytes(path))
    except (OSError, ValidationError):
        return {}
    return kept.effects if kept.code == code() else {}


def _close(first: Effect, second: Effect) -> bool:
    """Return whether two effects are the same but for the last digits, which machines differ in."""
    pairs = zip_longest(_numbers(first), _numbers(second), fillvalue=math.nan)
    return first.tasks == second.tasks and all(
        math.isclose(*both, rel_tol=1e-9, abs_tol=1e-9) for both in pairs
    )


def _numbers(effect: Effect) -> list[float]:
    errors = effect.error, effect.worth, effect.documents, effect.between or 0.0
    return [effect.points or 0.0, *errors, *effect.models.values()]
