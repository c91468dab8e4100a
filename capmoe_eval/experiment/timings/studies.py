"""The efficiency studies of the paper as data, from ``studies.yaml``.

A study names sizes as the paper has them; they are divided by its reduction so that two CPU cores
can time them. Widths and prompts are divided by the scale, which leaves the proportion of
attention, shared and routed experts; batches are divided by a factor of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """A model of the paper, where it ran, and how unevenly its experts are taken to be loaded.

    Attributes:
        title: As the paper's tables call it.
        shape: Its layer, a key of ``SHAPES``.
        ranks: Ranks that it is spread over.
        routing: :data:`FIGURE_1`, the name of a record's model, or None.
        peaks: Without a routing: the fullest expert's load over the mean.
        why: The reason for the loads.
        share: Of the study's batch, in which it runs: models whose tokens cost more get fewer.
    """

    title: str
    shape: str
    ranks: int
    routing: str | None = None
    peaks: Sequence[float] = ()
    why: str = ""
    share: float = 1.0


@dataclass(frozen=True)
class Workload:
    """A batch.

    Attributes:
        sequences: Sequences over all ranks.
        prompt: Tokens of each.
        place: The paper's name for it, where it has one.
    """

    sequences: int
    prompt: int
    place: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens over all ranks."""
        return self.sequences * self.prompt


@dataclass(frozen=True)
class Limit:
    """A method of a study, of every γ that it is timed at."""

    name: str
    gammas: Sequence[float]
    granularity: str = "expert"
    candidates: str = "local"


@dataclass(frozen=True)
class Plan:
    """A place of the paper, and what is timed for it.

    Attributes:
        name: As ``--study`` takes it.
        about: The question in a few words.
        place: The paper's place.
        why: Why these sizes.
        models: The models.
        limits: The methods; dropless is beside them.
        workloads: The batches, as the paper has them.
        batch_divisor: The divisor of batches.
        layers: MoE layers of the prefill; 0 leaves it out.
        scale: The divisor of widths and prompts, where ``--scale`` gives none.
    """

    name: str
    about: str
    place: str
    why: str
    models: Sequence[ModelCase]
    limits: Sequence[Limit]
    workloads: Sequence[Workload]
    batch_divisor: int
    layers: int = 0
    scale: int = 4


def _plans() -> tuple[Plan, ...]:
    text = Path(__file__).with_name("studies.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tuple(
        Plan(
            name=name,
            why=f"{raw.pop('why')}; {found['smaller']}",
            models=[ModelCase(**case) for case in raw.pop("models")],
            limits=[Limit(**limit) for limit in raw.pop("limits")],
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
