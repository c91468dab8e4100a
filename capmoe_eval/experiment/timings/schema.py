"""The types of a benchmark file, for its writer and its readers.

A value of another type is refused, by the writer too. A field that the writer leaves out stays out:
a file that is read and written again is the same file.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import from_json

from capmoe_eval.errors import UsageError, field_problem, shown, writing
from capmoe_eval.experiment.files import read_bytes, write_text
from capmoe_eval.experiment.record_part import Amount, Count, Part, Positive
from capmoe_eval.experiment.timings.names import DROPLESS, bench_command, evaluation_command
from capmoe_eval.experiment.timings.rows import Balance, Permutation
from capmoe_eval.experiment.timings.spread import Spread, Target
from capmoe_eval.experiment.timings.studies import STUDIES, Link, Shape


def _ordered(spread: Spread) -> Spread:
    if not 0 <= spread.low <= spread.median <= spread.high:
        raise ValueError(f"median {spread.median:g} is not between low and high, or below 0")
    return spread


def _with_total(seconds: dict[str, Spread]) -> dict[str, Spread]:
    if "total" not in seconds:
        raise ValueError("they have no total")
    return seconds


Quartiles = Annotated[Spread, AfterValidator(_ordered)]


class Machine(Part):
    """The machine that something was timed on."""

    device: str
    name: str
    torch: str
    threads: Count

    def __str__(self) -> str:
        """Return it in a few words."""
        noun = "thread" if self.threads == 1 else "threads"
        threads = f", {self.threads} {noun}" if self.device == "cpu" else ""
        return f"{self.device}: {self.name}{threads}, torch {self.torch}"


@dataclass(frozen=True)
class Label:
    """The method of a row."""

    name: str  # its key (``method=``)
    gamma: Amount | None  # capacity factor; None where it has none
    granularity: str  # ``expert`` or ``device``, which a capacity bounds
    candidates: str  # which experts ``expanded_drop`` adds


@dataclass(frozen=True)
class PairLoad:
    """The pairs that a method leaves to be sent and computed, over all ranks."""

    kept: Count  # pairs that are computed
    dropped_share: Amount  # pairs of the tokens' own top-k that are not, as a share of all
    expert_load: list[Count]  # pairs of every expert
    rank_load: list[Count]  # pairs of every rank's experts
    sent_bytes: Count  # leave any rank in the first all-to-all; as many come back
    fullest_expert: Count  # its pairs; of several layers, the sum of each one's own
    fullest_rank: Count  # the same of the rank with most


class Timing(Part):
    """One method's times and its gain over dropless routing."""

    method: str
    label: Label | None  # None for dropless
    # Of every phase and of the total; a measured prefill has the total alone.
    seconds: Annotated[dict[str, Quartiles], AfterValidator(_with_total)]
    # Of the total, over the dropless pass of the same round.
    speedup: Quartiles
    load: PairLoad
    # The fullest expert's load before over that after: N_max / max(C, …), the speedup of a rank
    # with one expert that does nothing else.
    ideal_expert: Amount
    ideal_rank: Amount  # the same of the fullest rank's experts together
    reached: float | None  # the speedup's share of ``ideal_rank``'s gain; None if that is too small


def _with_dropless(rows: tuple[Timing, ...]) -> tuple[Timing, ...]:
    if [row.method for row in rows if row.label is None] != [DROPLESS]:
        raise ValueError(f"they do not have one row {DROPLESS!r} without a label")
    return rows


Timings = Annotated[tuple[Timing, ...], AfterValidator(_with_dropless)]
"""Rows by method; dropless is among them."""


class Routing(Part):
    """The routing of a point."""

    source: str  # ``figure 1``, ``peak``, or the name of a record's layer
    wanted_peak: Amount | None = None  # the peak that was asked for, where one was
    together: bool = False  # one rank has the popular experts
    peak: Amount  # the fullest expert's load over the mean load N̄


class Prefill(Part):
    """Timings of a whole model: ``layers`` MoE layers with attention and norms between them."""

    layers: Positive
    prompt: Positive
    timings: Timings


Misses = dict[str, Annotated[dict[Literal["total", "speedup"], float], Field(min_length=2)]]
"""Shares by which an emulation is above (or below) the measurement, by method."""


class PrefillCheck(Part):
    """Emulated rows, and how far each is from the measured one."""

    errors: Misses
    timings: Timings


class Validation(Part):
    """An emulation beside a measurement: of one layer, and of the prefill where there is one."""

    note: str
    link: Link
    errors: Misses
    timings: Timings
    prefill: PrefillCheck | None = None


class Point(Part):
    """The timings of one batch under one routing."""

    tokens_per_rank: Positive
    batch: Positive  # sequences over all ranks
    prompt: Positive  # tokens of each
    # The workload of the paper that it stands for, as ``batch 8K x prompt 512``; None for none.
    # Batch and prompt may be smaller than that.
    place: str | None = None
    routing: Routing
    validation: Validation | None = None  # the emulation beside it, where one was timed
    timings: Timings  # of one layer, by method
    prefill: Prefill | None = None  # of a whole model


class Run(Part):
    """One layer over one number of ranks."""

    model: str | None  # the paper's model of this shape
    shape: Shape
    ranks: Positive
    experts_per_rank: Positive
    why: str = ""  # why this routing
    link: Link | None  # the stated exchange; None where it was measured
    points: Annotated[tuple[Point, ...], Field(min_length=1)]

    @property
    def title(self) -> str:
        """The model's name, or that of the shape."""
        return self.model or self.shape.name


class File(Part):
    """A whole file."""

    SCHEMA: ClassVar[int]
    LAYOUT: ClassVar[dict[str, Any]] = {}

    schema_: int = Field(alias="schema")
    command: str
    path: Path = Field(default=Path(), exclude=True)  # where it was read
    digest: str = Field(default="", exclude=True)  # beginning of the SHA-256 of its bytes

    def text(self) -> str:
        """Return the file's text: the fields that were given, and no default."""
        content = self.model_dump(by_alias=True, exclude_unset=True)
        return json.dumps(content, indent=1, **self.LAYOUT) + "\n"

    def write(self, path: Path) -> None:
        """Write the file; an UnwritableError if that fails."""
        with writing("--out", path.parent):
            write_text(path, self.text())


class Study(File):
    """The file of an efficiency study."""

    SCHEMA = 2

    study: str | None  # one of :data:`STUDIES`; None for a layer that was asked for by hand
    place: str | None = None  # the paper's place
    why: str | None = None  # why these sizes
    # On real ranks, or each rank's work in turn on one device.
    kind: Literal["emulated", "measured"]
    note: str | None  # the warning of an emulation; None where it was measured
    date: str  # ISO 8601
    machine: Machine
    backend: str | None  # the library that connects the ranks; None where it was emulated
    dtype: str
    repeats: Positive  # counted rounds
    warmup: Count  # rounds before them
    scale: Positive  # hidden and intermediate widths are the model's divided by this
    batch_divisor: Positive | None = None  # batches are the paper's divided by this
    runs: Annotated[tuple[Run, ...], Field(min_length=1)]

    @field_validator("study")
    @classmethod
    def _is_one(cls, study: str | None) -> str | None:
        if study is not None and study not in STUDIES:
            raise ValueError(f"it is none of {', '.join(STUDIES)}")
        return study

    @field_validator("note")
    @classmethod
    def _says_so(cls, note: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("kind") == "emulated" and "EMULATED" not in (note or ""):
            raise ValueError("it does not say that it is EMULATED")
        return note

    @property
    def emulated(self) -> bool:
        """True if no real ranks exchanged anything."""
        return self.kind == "emulated"

    @property
    def errors(self) -> list[dict[Any, float]]:
        """By what share the emulation missed each validated method, prefills included."""
        checks = [p.validation for run in self.runs for p in run.points if p.validation]
        parts = [part for check in checks for part in (check, check.prefill) if part]
        return [miss for part in parts for miss in part.errors.values()]


class Evaluation(File):
    """The file of a benchmark of the evaluation; beside its targets it says what it likes."""

    SCHEMA = 1
    LAYOUT: ClassVar[dict[str, Any]] = {"sort_keys": True, "ensure_ascii": False}
    model_config = ConfigDict(extra="allow")

    date: str
    machine_: Machine = Field(alias="machine")
    targets: Annotated[tuple[Target, ...], Field(min_length=1)]
    rehearsal: str | None = None  # what the file says of itself where it is about no GPU
    balances: tuple[Balance, ...] = ()  # of `placement`
    permutations: tuple[Permutation, ...] = ()  # of `permutation`

    @property
    def name(self) -> str:
        """The benchmark's name."""
        return self.path.stem

    @property
    def machine(self) -> str:
        """The machine in a few words."""
        return f"{self.machine_.device}: {self.machine_.name}"


def read_study(path: Path) -> Study:
    """Read the file of a study.

    One that cannot be read, is of another schema or lacks something is a UsageError; its one line
    names the field and the command that makes the file anew.
    """
    named = re.match(r"ep-([a-z]+)-", path.name)
    study = named[1] if named and named[1] in STUDIES else None
    return _read(Study, path, bench_command(study))


def read_evaluation(path: Path) -> Evaluation:
    """Read the file of a benchmark of the evaluation; errors as :func:`read_study`."""
    return _read(Evaluation, path, evaluation_command(path.stem))


_FileT = TypeVar("_FileT", bound=File)


def _read(kind: type[_FileT], path: Path, again: str) -> _FileT:
    try:
        data = read_bytes(path)
        content: Any = from_json(data)
        version = content.get("schema", "none") if isinstance(content, dict) else kind.SCHEMA
        if version == kind.SCHEMA:
            digest = hashlib.sha256(data).hexdigest()[:10]
            file = kind.model_validate_json(data)
            return file.model_copy(update={"path": path, "digest": digest})
        expected = f"this version of capmoe_eval reads schema {kind.SCHEMA}"
        wrong = f"the file has schema {shown(version)}, {expected}"
    except ValidationError as error:
        wrong = field_problem(error)
    except (OSError, ValueError) as error:
        wrong = f"not a whole file ({error})"
    raise UsageError(f"{path}: {wrong}; make it again: {again}")
