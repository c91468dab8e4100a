"""The points that dev sets lose with all experts disabled, and the tasks that hardly need them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from statistics import fmean
from typing import Final

from capmoe_report.effects import by_family

NEEDED: Final = 20.0
"""Points that the dev set of a task must lose with all experts disabled, for the task to enter a
contrast of several tasks: in the mean over the families, and for each model on the model itself.
The first half was written before any test record of the models that it judges, the second after
them (2026-11-27)."""


@dataclass(frozen=True)
class DevLosses:
    """The losses of dev sets with all experts disabled, and the tasks that hardly need experts."""

    # By task of lm-eval and model.
    points: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def idle_tasks(self, model: str) -> list[str]:
        """Return the tasks for which a model hardly needs experts; :data:`NEEDED` has the rule."""
        return [
            task
            for task, mean in self._means.items()
            if min(mean, self.points[task].get(model, mean)) < NEEDED
        ]

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on all contrasts of several tasks."""
        idle = [f"{task} ({mean:.1f})" for task, mean in self._means.items() if mean < NEEDED]
        alone = sorted(
            (model, task, loss)
            for task, mean in self._means.items()
            for model, loss in self.points[task].items()
            if loss < NEEDED <= mean
        )
        names = ", ".join(idle + [f"{task} of {model} ({loss:.1f})" for model, task, loss in alone])
        reason = f"with all experts disabled they lose less than {NEEDED:g} points on the dev sets"
        return (f"left out of contrasts of several tasks: {names}; {reason}",) if names else ()

    @cached_property
    def _means(self) -> dict[str, float]:
        """The mean over the families of each task."""
        return {t: fmean(by_family(losses).values()) for t, losses in sorted(self.points.items())}


@cache
def dev_losses(models: frozenset[str]) -> DevLosses:
    """Return the losses of the embedded models among ``models``, from their cards.

    Without a card nothing is known of a model.
    """
    losses: dict[str, dict[str, float]] = {}
    weights = resources.files("capmoe_eval") / "zoo" / "weights"
    for model in sorted(models):
        card = weights / model.removeprefix("zoo_") / "card.json"
        content = json.loads(card.read_text(encoding="utf-8")) if card.is_file() else {}
        for task, accuracy in content.get("accuracy", {}).items():
            loss = accuracy - content["accuracy_silent"][task]
            losses.setdefault(task, {})[model] = loss
    return DevLosses(losses)
