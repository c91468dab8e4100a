"""The efficiency studies of the paper as data, from ``studies.yaml``; a user may write others.

A study names sizes as the paper has them; they are divided by its reduction so that two CPU cores
can time them. Widths and prompts are divided by the scale, which leaves the proportion of
attention, shared and routed experts; batches are divided by a factor of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from capmoe_eval.errors import UsageError, bad_choice, field_problem, reading
from capmoe_eval.experiment.files import read_data, read_yaml
from capmoe_eval.experiment.record import Count, Positive
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from capmoe_bench.timings import STUDIES

_STRICT: Final = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Shape:
    """The sizes of an MoE layer; in a file, after scaling."""

    name: str
    hidden: Positive  # hidden size H
    intermediate: Positive  # width of an expert
    n_experts: Positive  # routed experts E
    top_k: Positive  # experts K that a token chooses
    shared: Count  # width of the shared experts, as one gated MLP; 0 where there are none

    def scaled(self, scale: int) -> Shape:
        """Return the layer with all widths divided; one that is no multiple is a UsageError."""
        widths: dict[str, Any] = {n: getattr(self, n) for n in ("hidden", "intermediate", "shared")}
        if any(width % scale for width in widths.values()):
            sizes = ", ".join(f"{name} {width}" for name, width in widths.items())
            raise UsageError(f"scale={scale}: it must divide the layer's widths ({sizes})")
        return replace(self, **{name: width // scale for name, width in widths.items()})

    @property
    def pair_flops(self) -> int:
        """Floating-point operations of an expert on one token: three products, H × width each."""
        return 6 * self.hidden * self.intermediate


@dataclass(frozen=True, config=_STRICT)
class ModelCase:
    """A model of the paper, where it ran, and how unevenly its experts are taken to be loaded."""

    title: str  # as the paper's tables call it
    shape: str  # its layer, a key of ``SHAPES``
    ranks: Positive  # ranks that it is spread over
    routing: str | None = None  # ``FIGURE_1`` of timings.py, the name of a record's model, or None
    peaks: tuple[float, ...] = ()  # without a routing: the fullest expert's load over the mean
    why: str = ""  # the reason for the loads
    share: float = 1.0  # of the study's batch; models whose tokens cost more get fewer

    def __post_init__(self) -> None:
        """Refuse a case whose loads nothing says, by a ValueError."""
        if self.routing is None and not self.peaks:
            raise ValueError("it has neither routing nor peaks")


@dataclass(frozen=True, config=_STRICT)
class Workload:
    """A batch."""

    sequences: Positive  # sequences over all ranks
    prompt: Positive
    place: str | None = None  # the paper's name for it, where it has one

    @property
    def tokens(self) -> int:
        """Tokens over all ranks."""
        return self.sequences * self.prompt


@dataclass(frozen=True, config=_STRICT)
class StudyPlan:
    """A place of the paper, or what a user asks about, and what is timed for it."""

    name: str  # as ``--study`` takes it, or that of a user's file
    place: str
    why: str  # why these sizes
    models: Sequence[ModelCase]
    methods: Sequence[Mapping[str, Any]]  # knobs without the ranks; dropless is beside them
    workloads: Sequence[Workload]  # the batches, as the paper has them
    batch_divisor: Positive = 1  # the divisor of batches
    layers: Count = 0  # MoE layers of the prefill; 0 leaves it out
    scale: Positive = 4  # the divisor of widths and prompts, where ``--scale`` gives none


def _plan(name: str, content: Mapping[str, Any]) -> StudyPlan:
    """Return a study as its file has it, with a method for each of its γ."""
    methods = [
        {**knobs, "gamma": gamma} for knobs in content["methods"] for gamma in knobs["gamma"]
    ]
    return StudyPlan(**{**content, "name": name, "methods": methods})


_CONTENT: Final = read_data(__package__, "studies.yaml", dict[str, Any])
PLANS: Final = tuple(
    _plan(name, study | {"why": f"{study['why']}; {_CONTENT['smaller']}"})
    for name, study in _CONTENT["studies"].items()
)
"""Every study of the paper, in the order of ``--study all``."""


def find_studies(
    name: str, *, scale: int | None = None, batch_divisor: int | None = None
) -> list[StudyPlan]:
    """Return the study of a name or of a user's YAML file, or the paper's for ``all``.

    Widths and batches are divided by ``scale`` and ``batch_divisor`` where they are not None.

    Raises:
        UsageError: If there is none, or the file lacks something.
    """
    if name.endswith(".yaml"):
        path = Path(name)
        if path.stem in STUDIES:
            raise UsageError(f"study={name}: is named as a study of the paper; rename the file")
        with reading(path, "no study", "capmoe_bench/ep/studies.yaml has studies"):
            try:
                studies = [_plan(path.stem, read_yaml(path.read_text(encoding="utf-8")))]
            except ValidationError as error:
                raise UsageError(field_problem(error)) from error
    elif name in ("all", *STUDIES):
        studies = [study for study in PLANS if name in ("all", study.name)]
    else:
        raise bad_choice("study", name, ("all", *STUDIES))
    sizes = {"scale": scale, "batch_divisor": batch_divisor}
    chosen: dict[str, Any] = {key: size for key, size in sizes.items() if size is not None}
    return [replace(study, **chosen) for study in studies]
