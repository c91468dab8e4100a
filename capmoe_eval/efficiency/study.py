"""What one file of an efficiency study says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from capmoe_eval.spread import Spread

STUDIES: Final = MappingProxyType(
    {
        "speedup": "speedup of one MoE layer and of a prefill, by model, method and γ",
        "granularity": "capacity of each expert against capacity of each device",
        "breakdown": "where a layer's time goes, phase by phase",
        "workload": "speedup by batch size and prompt length",
        "placement": "one model's experts over more or fewer ranks",
        "skew": "speedup by peak load, beside the ideal",
        "traces": "speedup with the routing of recorded layers",
    }
)
"""Every study, and what it is about."""

DROPLESS: Final = "dropless"
"""The row that all others are compared with: no capacity."""

Kind = Literal["emulated", "measured"]


def bench_command(study: str | None) -> str:
    """Return the command line that makes the file of a study."""
    return "python -m capmoe_eval.bench ep" + (f" --study {study}" if study else "")


@dataclass(frozen=True)
class Label:
    """The method of a row.

    Attributes:
        name: Its key (``method=``).
        gamma: Capacity factor; None where it has none.
        granularity: What a capacity bounds: ``expert`` or ``device``.
        candidates: Which experts ``expanded_drop`` adds.
    """

    name: str
    gamma: float | None = None
    granularity: str = "expert"
    candidates: str = "local"


@dataclass(frozen=True)
class Timing:
    """One method's times and what it gains over dropless routing.

    Attributes:
        method: The row's name in the file.
        label: The method; None for dropless.
        seconds: Of every phase and of the total; a prefill has the total alone.
        speedup: Of the total, over the dropless pass of the same round.
        dropped_share: Pairs of the tokens' own top-k that are not computed, as a share of all.
        ideal_expert: The fullest expert's load before over that after.
        ideal_rank: The same of the fullest rank.
        reached: Share of the gain of ``ideal_rank`` that was reached; None where it is too small.
    """

    method: str
    label: Label | None
    seconds: Mapping[str, Spread]
    speedup: Spread
    dropped_share: float
    ideal_expert: float
    ideal_rank: float
    reached: float | None


@dataclass(frozen=True)
class Routing:
    """Where the routing came from.

    Attributes:
        source: Such as ``figure 1`` or the name of a record.
        peak: The fullest expert's load over the mean load N̄.
        wanted_peak: The peak that was asked for, where one was.
        together: Whether one rank has the popular experts.
    """

    source: str
    peak: float
    wanted_peak: float | None = None
    together: bool = False


@dataclass(frozen=True)
class Prefill:
    """The same over a whole model: ``layers`` MoE layers with what lies between them."""

    layers: int
    prompt: int
    timings: tuple[Timing, ...]


@dataclass(frozen=True)
class Point:
    """The timings of one batch under one routing.

    Attributes:
        tokens_per_rank: Tokens of each rank.
        batch: Sequences over all ranks.
        prompt: Tokens of each sequence.
        place: The workload of the paper that it stands for, as ``batch 8K x prompt 512``; None for
            none. Batch and prompt may be smaller than that.
        routing: Who asks for which expert.
        timings: Of one layer, by method; dropless is among them.
        prefill: Of a whole model, where it was timed.
        errors: By what share the emulation says more (or less) than was measured, by method: of
            the ``total`` and of the ``speedup``; empty where it was not validated.
    """

    tokens_per_rank: int
    batch: int
    prompt: int
    place: str | None
    routing: Routing
    timings: tuple[Timing, ...]
    prefill: Prefill | None = None
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Shape:
    """The sizes of the layer, after scaling; ``shared`` is the shared experts' width."""

    name: str
    hidden: int
    intermediate: int
    n_experts: int
    top_k: int
    shared: int = 0


@dataclass(frozen=True)
class Link:
    """The stated all-to-all of an emulation: bytes per second and rank, seconds, where from."""

    bandwidth: float
    latency: float
    source: str


@dataclass(frozen=True)
class Run:
    """One layer over one number of ranks.

    Attributes:
        model: The paper's model of this shape, or None.
        shape: The layer.
        ranks: Number of ranks.
        experts_per_rank: Routed experts of each.
        link: The stated exchange; None where it was measured.
        points: Timings by batch and routing.
        why: Why this routing, or empty.
    """

    model: str | None
    shape: Shape
    ranks: int
    experts_per_rank: int
    link: Link | None
    points: tuple[Point, ...]
    why: str = ""

    @property
    def title(self) -> str:
        """The model's name, or that of the shape."""
        return self.model or self.shape.name


@dataclass(frozen=True)
class Machine:
    """Where it was timed."""

    device: str
    name: str
    torch: str
    threads: int

    def __str__(self) -> str:
        """Return it in a few words."""
        noun = "thread" if self.threads == 1 else "threads"
        threads = f", {self.threads} {noun}" if self.device == "cpu" else ""
        return f"{self.device}: {self.name}{threads}, torch {self.torch}"


@dataclass(frozen=True)
class Study:
    """A whole file.

    Attributes:
        path: Where it lies.
        digest: Beginning of the SHA-256 of its bytes.
        study: One of :data:`STUDIES`; None for a single layer that was asked for by hand.
        kind: ``measured`` on real ranks, or ``emulated``: each rank's work in turn on one device.
        note: What must be said of an emulation; None where it was measured.
        date: When, ISO 8601.
        machine: Where.
        backend: What connects the ranks; None where it was emulated.
        dtype: Precision.
        repeats: Counted rounds.
        warmup: Rounds before them.
        scale: Hidden and intermediate widths are the model's divided by this.
        runs: What was timed.
        why: Why these sizes, or empty.
        batch_divisor: Batches are the paper's divided by this; None where that is not said.
    """

    path: Path
    digest: str
    study: str | None
    kind: Kind
    note: str | None
    date: str
    machine: Machine
    backend: str | None
    dtype: str
    repeats: int
    warmup: int
    scale: float
    runs: tuple[Run, ...]
    why: str = ""
    batch_divisor: float | None = None

    @property
    def emulated(self) -> bool:
        """Whether no real ranks exchanged anything."""
        return self.kind == "emulated"

    @property
    def errors(self) -> Sequence[Mapping[str, float]]:
        """By what share the emulation missed each validated method; see :attr:`Point.errors`."""
        return [e for run in self.runs for point in run.points for e in point.errors.values()]
