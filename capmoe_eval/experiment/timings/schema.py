"""The types of a benchmark file, for its writer and its readers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
)

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.timings.file import Count, File, Machine, Part, read_file
from capmoe_eval.experiment.timings.names import DROPLESS, bench_command, evaluation_command
from capmoe_eval.experiment.timings.quartiles import Spread
from capmoe_eval.experiment.timings.studies import STUDIES
from capmoe_eval.experiment.timings.targets import Target

_LEAST_SPEEDUP: Final = 1e-9  # a time that is none

Positive = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0)]
Divisor = Annotated[float, Field(ge=1, multiple_of=1), PlainSerializer(int)]


def _ordered(spread: Spread) -> Spread:
    if not 0 <= spread.low <= spread.median <= spread.high:
        raise ValueError(f"median {spread.median:g} is not between low and high, or below 0")
    return spread


def _above_0(spread: Spread) -> Spread:
    if spread.low < _LEAST_SPEEDUP:
        raise ValueError(f"low {spread.low:g} is no speedup")
    return spread


def _with_total(seconds: dict[str, Spread]) -> dict[str, Spread]:
    if "total" not in seconds:
        raise ValueError("they have no total")
    return seconds


Quartiles = Annotated[Spread, AfterValidator(_ordered)]


@dataclass(frozen=True)
class Label:
    """The method of a row.

    Attributes:
        name: Its key (``method=``).
        gamma: Capacity factor; None where it has none.
        granularity: ``expert`` or ``device``, which a capacity bounds.
        candidates: Which experts ``expanded_drop`` adds.
    """

    name: str
    gamma: Amount | None
    granularity: str
    candidates: str


@dataclass(frozen=True)
class Load:
    """The pairs that a method leaves to be sent and computed, over all ranks.

    Attributes:
        kept: Pairs that are computed.
        dropped_share: Pairs of the tokens' own top-k that are not, as a share of all.
        expert_load: Pairs of every expert.
        rank_load: Pairs of every rank's experts.
        sent_bytes: Bytes that leave any rank in the first all-to-all; as many come back.
        fullest_expert: Pairs of the fullest expert; of several layers, the sum of each one's own.
        fullest_rank: The same of the rank with most.
    """

    kept: Count
    dropped_share: Amount
    expert_load: list[Count]
    rank_load: list[Count]
    sent_bytes: Count
    fullest_expert: Count
    fullest_rank: Count


class Timing(Part):
    """One method's times and its gain over dropless routing.

    Attributes:
        method: The row's name.
        label: The method; None for dropless.
        seconds: Of every phase and of the total; a measured prefill has the total alone.
        speedup: Of the total, over the dropless pass of the same round.
        load: The pairs that are sent and computed.
        ideal_expert: The fullest expert's load before over that after: N_max / max(C, …), the
            speedup of a rank with one expert that does nothing else.
        ideal_rank: The same of the fullest rank's experts together.
        reached: The speedup's share of the gain of ``ideal_rank``; None if that is too small.
    """

    method: str
    label: Label | None
    seconds: Annotated[dict[str, Quartiles], AfterValidator(_with_total)]
    speedup: Annotated[Quartiles, AfterValidator(_above_0)]
    load: Load
    ideal_expert: Amount
    ideal_rank: Amount
    reached: float | None

    @property
    def dropped_share(self) -> float:
        """Pairs of the tokens' own top-k that are not computed, as a share of all."""
        return self.load.dropped_share


def _with_dropless(rows: tuple[Timing, ...]) -> tuple[Timing, ...]:
    if [row.method for row in rows if row.label is None] != [DROPLESS]:
        raise ValueError(f"they do not have one row {DROPLESS!r} without a label")
    return rows


Timings = Annotated[tuple[Timing, ...], AfterValidator(_with_dropless)]
"""Rows by method; dropless is among them."""


class Routing(Part):
    """The routing of a point.

    Attributes:
        source: ``figure 1``, ``peak``, or the name of a record's layer.
        wanted_peak: The peak that was asked for, where one was.
        together: Whether one rank has the popular experts.
        peak: The fullest expert's load over the mean load N̄.
    """

    source: str
    wanted_peak: Amount | None = None
    together: bool = False
    peak: Amount


class Prefill(Part):
    """Timings of a whole model: ``layers`` MoE layers with attention and norms between them."""

    layers: Positive
    prompt: Positive
    timings: Timings


@dataclass(frozen=True)
class Link:
    """A model of the all-to-all between ranks.

    Attributes:
        bandwidth: Bytes per second that a rank sends, and at the same time receives.
        latency: Seconds of an exchange of nothing.
        source: The origin of these two, in plain words.
    """

    bandwidth: Amount
    latency: Amount
    source: str


class Miss(Part):
    """Shares by which an emulation is above (or below) the measurement."""

    total: float
    speedup: float


class Comparison(Part):
    """Emulated rows, and how far each is from the measured one, by method."""

    errors: dict[str, Miss]
    timings: Timings


class Validation(Part):
    """An emulation beside a measurement: of one layer, and of the prefill where there is one."""

    note: str
    link: Link
    errors: dict[str, Miss]
    timings: Timings
    prefill: Comparison | None = None


class Point(Part):
    """The timings of one batch under one routing.

    Attributes:
        batch: Sequences over all ranks; ``prompt`` is the number of tokens of each.
        place: The workload of the paper that it stands for, as ``batch 8K x prompt 512``; None for
            none. Batch and prompt may be smaller than that.
        validation: The emulation beside it, where one was timed.
        timings: Of one layer, by method; ``prefill`` has those of a whole model.
    """

    tokens_per_rank: Positive
    batch: Positive
    prompt: Positive
    place: str | None = None
    routing: Routing
    validation: Validation | None = None
    timings: Timings
    prefill: Prefill | None = None


@dataclass(frozen=True)
class Shape:
    """The sizes of an MoE layer; in a file, after scaling.

    Attributes:
        hidden: Hidden size H.
        intermediate: Width of an expert.
        n_experts: Routed experts E, of which a token chooses ``top_k``, K.
        shared: Width of the shared experts, which every token passes through, as one gated MLP; 0
            where there are none.
    """

    name: str
    hidden: Positive
    intermediate: Positive
    n_experts: Positive
    top_k: Positive
    shared: Count

    def scaled(self, scale: int) -> Shape:
        """Return the layer with all widths divided; experts and top-k stay.

        Raises:
            UsageError: If a width is no multiple of it.
        """
        widths: dict[str, Any] = {
            name: getattr(self, name) for name in ("hidden", "intermediate", "shared")
        }
        if any(width % scale for width in widths.values()):
            said = ", ".join(f"{name} {width}" for name, width in widths.items())
            raise UsageError(f"scale={scale}: it must divide the layer's widths ({said})")
        return replace(self, **{name: width // scale for name, width in widths.items()})

    @property
    def pair_flops(self) -> int:
        """Floating-point operations of an expert on one token: three products, H × width each."""
        return 6 * self.hidden * self.intermediate


class Run(Part):
    """One layer over one number of ranks.

    Attributes:
        model: The paper's model of this shape, or None.
        experts_per_rank: Routed experts of each rank.
        why: Why this routing, or empty.
        link: The stated exchange; None where it was measured.
        points: Timings by batch and routing.
    """

    model: str | None
    shape: Shape
    ranks: Positive
    experts_per_rank: Positive
    why: str = ""
    link: Link | None
    points: Annotated[tuple[Point, ...], Field(min_length=1)]

    @property
    def title(self) -> str:
        """The model's name, or that of the shape."""
        return self.model or self.shape.name


class Study(File):
    """The file of an efficiency study.

    Attributes:
        study: One of :data:`STUDIES`; None for a single layer that was asked for by hand.
        place: The paper's place.
        why: Why these sizes.
        kind: ``measured`` on real ranks, or ``emulated``: each rank's work in turn on one device.
        note: The warning of an emulation; None where it was measured.
        date: ISO 8601.
        backend: The library that connects the ranks; None where it was emulated.
        repeats: Counted rounds; ``warmup`` is the number of rounds before them.
        scale: Hidden and intermediate widths are the model's divided by this.
        batch_divisor: Batches are the paper's divided by this; None where that is not said.
    """

    SCHEMA = 2

    study: str | None
    place: str | None = None
    why: str | None = None
    kind: Literal["emulated", "measured"]
    note: str | None
    date: str
    machine: Machine
    backend: str | None
    dtype: str
    repeats: Positive
    warmup: Count
    scale: Divisor
    batch_divisor: Positive | None = None
    runs: Annotated[tuple[Run, ...], Field(min_length=1)]

    @field_validator("study")
    @classmethod
    def _is_one(cls, study: str | None) -> str | None:
        if study is not None and study not in STUDIES:
            raise ValueError(f"it is none of {', '.join(STUDIES)}")
        return study

    @field_validator("note")
    @classmethod
    def _says_so(cls, note: str | None, given: ValidationInfo) -> str | None:
        if given.data.get("kind") == "emulated" and "EMULATED" not in (note or ""):
            raise ValueError("it does not say that it is EMULATED")
        return note

    @property
    def emulated(self) -> bool:
        """True if no real ranks exchanged anything."""
        return self.kind == "emulated"

    @property
    def errors(self) -> Sequence[Mapping[str, float]]:
        """By what share the emulation missed each validated method, prefills included."""
        checks = [p.validation for run in self.runs for p in run.points if p.validation]
        return [
            miss.model_dump()
            for check in checks
            for part in (check, check.prefill)
            if part is not None
            for miss in part.errors.values()
        ]


class Evaluation(File):
    """The file of a benchmark of the evaluation; beside its targets it says what it likes."""

    SCHEMA = 1
    LAYOUT: ClassVar[dict[str, Any]] = {"sort_keys": True, "ensure_ascii": False}
    model_config = ConfigDict(extra="allow")

    date: str
    machine_: Machine = Field(alias="machine")
    targets: Annotated[tuple[Target, ...], Field(min_length=1)]

    @property
    def name(self) -> str:
        """The benchmark's name."""
        return self.path.stem

    @property
    def machine(self) -> str:
        """The machine in a few words."""
        return f"{self.machine_.device}: {self.machine_.name}"


def read_study(path: Path) -> Study:
    """Read the file of a study; see :func:`read_file`."""
    named = re.match(r"ep-([a-z]+)-", path.name)
    return read_file(
        Study, path, bench_command(named[1] if named and named[1] in STUDIES else None)
    )


def read_evaluation(path: Path) -> Evaluation:
    """Read the file of a benchmark of the evaluation; see :func:`read_file`."""
    return read_file(Evaluation, path, evaluation_command(path.stem))
