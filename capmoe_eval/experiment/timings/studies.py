"""The efficiency studies of the paper as data, from ``studies.yaml``.

A study names sizes as the paper has them; they are divided by its reduction so that two CPU cores
can time them. Widths and prompts are divided by the scale, which leaves the proportion of
attention, shared and routed experts; batches are divided by a factor of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from pydantic import TypeAdapter

from capmoe_eval.errors import bad_choice
from capmoe_eval.experiment.data_file import read_data

FIGURE_1 = "figure 1"
"""The routing of the paper's Figure 1: OLMoE's 64 experts on OpenBookQA."""


@dataclass(frozen=True)
class ModelCase:
    """A model of the paper, where it ran, and how unevenly its experts are taken to be loaded."""

    title: str  # as the paper's tables call it
    shape: str  # its layer, a key of ``SHAPES``
    ranks: int  # ranks that it is spread over
    routing: str | None = None  # :data:`FIGURE_1`, the name of a record's model, or None
    peaks: Sequence[float] = ()  # without a routing: the fullest expert's load over the mean
    why: str = ""  # the reason for the loads
    share: float = 1.0  # of the study's batch; models whose tokens cost more get fewer


@dataclass(frozen=True)
class Workload:
    """A batch."""

    sequences: int  # sequences over all ranks
    prompt: int
    place: str | None = None  # the paper's name for it, where it has one

    @property
    def tokens(self) -> int:
        """Tokens over all ranks."""
        return self.sequences * self.prompt


@dataclass(frozen=True)
class Plan:
    """A place of the paper, and what is timed for it."""

    name: str  # as ``--study`` takes it
    about: str  # the question in a few words
    place: str
    why: str  # why these sizes
    models: Sequence[ModelCase]
    methods: Sequence[Mapping[str, Any]]  # knobs without the ranks; dropless is beside them
    workloads: Sequence[Workload]  # the batches, as the paper has them
    batch_divisor: int  # the divisor of batches
    layers: int = 0  # MoE layers of the prefill; 0 leaves it out
    scale: int = 4  # the divisor of widths and prompts, where ``--scale`` gives none


def _plans() -> tuple[Plan, ...]:
    found = read_data(__package__, "studies.yaml", dict[str, Any])
    for name, study in found["studies"].items():
        study |= {"name": name, "why": f"{study['why']}; {found['smaller']}"}
        each_gamma = [{**knobs, "gamma": g} for knobs in study["methods"] for g in knobs["gamma"]]
        study["methods"] = each_gamma
    return TypeAdapter(tuple[Plan, ...]).validate_python(tuple(found["studies"].values()))


PLANS: Final = _plans()
"""Every study, in the order of ``--study all``."""

STUDIES: Final = MappingProxyType({plan.name: plan.about for plan in PLANS})
"""Every study, and what it is about."""


def find_studies(name: str) -> tuple[Plan, ...]:
    """Return the study of a name, or all for ``all``; UsageError if there is none."""
    if name == "all":
        return PLANS
    if name not in STUDIES:
        raise bad_choice("study", name, ("all", *STUDIES))
    return tuple(plan for plan in PLANS if plan.name == name)
