"""The efficiency studies of the paper as data, from ``studies.yaml``.

A study names sizes as the paper has them; they are divided by its reduction so that two CPU cores
can time them. Widths and prompts are divided by the scale, which leaves the proportion of
attention, shared and routed experts; batches are divided by a factor of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml

from capmoe_eval.errors import bad_choice

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
    text = Path(__file__).with_name("studies.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tuple(
        Plan(
            name=name,
            why=f"{raw.pop('why')}; {found['smaller']}",
            models=[ModelCase(**case) for case in raw.pop("models")],
            methods=[
                {**knobs, "gamma": gamma}
                for knobs in raw.pop("methods")
                for gamma in knobs["gamma"]
            ],
            workloads=[Workload(**workload) for workload in raw.pop("workloads")],
            **raw,
        )
        for name, raw in found["studies"].items()
    )


PLANS: Final = _plans()
"""Every study, in the order of ``--study all``."""

STUDIES: Final = MappingProxyType({plan.name: plan.about for plan in PLANS})
"""Every study, and what it is about."""


def find_studies(name: str) -> tuple[Plan, ...]:
    """Return the study of a name, or all for ``all``.

    Raises:
        UsageError: If there is none of that name.
    """
    if name == "all":
        return PLANS
    if name not in STUDIES:
        raise bad_choice("study", name, ("all", *STUDIES))
    return tuple(plan for plan in PLANS if plan.name == name)
