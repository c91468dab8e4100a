"""All figures: the data of `catalogue.yaml` with the functions for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import yaml

from capmoe_eval.errors import bad_choice
from capmoe_eval.report.figures import (
    breakdown,
    companions,
    drop_rates,
    expert_load,
    gate_scores,
    scores,
    skew,
    speedup,
)
from capmoe_eval.report.figures.spec import Measured, Numbers, Spec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FUNCTIONS: Final[Mapping[str, tuple[Callable[[Any], Measured], Callable[[Numbers], Figure]]]] = {
    "fig1": (expert_load.measure_one_layer, expert_load.draw_one_layer),
    "fig2": (expert_load.measure_by_task, expert_load.draw_by_task),
    "fig4": (speedup.measure_layer, speedup.draw_speedup),
    "fig5": (speedup.measure_model, speedup.draw_speedup),
    "fig6": (breakdown.measure_phases, breakdown.draw_phases),
    "fig7": (drop_rates.measure_by_task, drop_rates.draw_by_task),
    "fig8": (gate_scores.measure_scores, gate_scores.draw_scores),
    "fig9": (expert_load.measure_after_drop, expert_load.draw_after_drop),
    "fig12": (scores.measure_curve, scores.draw_curve),
    **{
        f"fig{number}": (expert_load.measure_layers, expert_load.draw_layers)
        for number in range(13, 17)
    },
    **{
        f"fig{number}": (drop_rates.measure_by_layer, drop_rates.draw_by_layer)
        for number in range(17, 21)
    },
    "v1_fig7": (scores.measure_rounds, scores.draw_rounds),
    "pareto": (scores.measure_methods, scores.draw_methods),
    "waste": (drop_rates.measure_waste, drop_rates.draw_waste),
    "companions": (companions.measure_companions, companions.draw_companions),
    "granularity": (speedup.measure_granularity, speedup.draw_granularity),
    "placement": (skew.measure_placement, skew.draw_placement),
    "skew": (skew.measure_skew, skew.draw_skew),
}


def _figures() -> tuple[Spec, ...]:
    """Read the declared figures, in the order of the file."""
    text = (resources.files(__package__) / "catalogue.yaml").read_text(encoding="utf-8")
    told = yaml.safe_load(text)
    found = []
    for name, entry in told["figures"].items():
        measure, draw = _FUNCTIONS[name]
        paper_model = told["paper_models"][entry.get("model", 0)]
        entry["caption"] = entry["caption"].format(**told["phrases"], paper_model=paper_model)
        found.append(Spec(name=name, measure=measure, draw=draw, **entry))
    return tuple(found)


FIGURES: Final = _figures()


def get_figure(name: str) -> Spec:
    """Return a figure by its name.

    Raises:
        UsageError: If there is none of that name.
    """
    for spec in FIGURES:
        if spec.name == name:
            return spec
    raise bad_choice("figure", name, ["all", *(spec.name for spec in FIGURES)])
