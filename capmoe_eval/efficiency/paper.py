"""The deployments of the paper, and what it prints of their speedup."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

METHODS: Final = MappingProxyType({"score": "TD", "expanded_drop": "ED"})
"""Our methods by their abbreviations in Figures 4 and 5."""

MACHINE: Final = "eight H20 GPUs"
"""What the paper's efficiency was measured on (six of them for Qwen1.5-MoE)."""


@dataclass(frozen=True)
class Deployment:
    """A model as the paper deploys it.

    Attributes:
        name: Beginning of its name.
        ranks: Number of GPUs.
        layer: Its key in Figure 4, or None.
        whole: Beginning of its keys in Figure 5, or None.
    """

    name: str
    ranks: int
    layer: str | None = None
    whole: str | None = None


DEPLOYMENTS: Final = (
    Deployment("OLMoE", 8, "OLMoE-Instruct(8E/GPU)", "OLMoE"),
    Deployment("DeepSeek-V2-Lite", 8, "DeepSeek-V2-Lite(8E+SE/GPU)", "DeepSeek"),
    Deployment("Qwen1.5-MoE", 6, "Qwen1.5-MoE-Chat(10E+SE/GPU,6GPU)", "Qwen"),
    Deployment("Mixtral", 8, "Mixtral(1E/GPU)", "Mixtral"),
    Deployment("Qwen3", 8),
    Deployment("DeepSeek-V2", 8),
)
"""The first four are those of Figures 4 and 5, in their order."""


def deployment(model: str | None) -> Deployment | None:
    """Return how the paper deploys a model, or None where it does not."""
    fitting = [found for found in DEPLOYMENTS if (model or "").startswith(found.name)]
    return max(fitting, key=lambda found: len(found.name), default=None)


def layer_speedup(model: str | None, method: str, gamma: float | None) -> float | None:
    """Return the speedup of one MoE layer that Figure 4 prints, or None."""
    found = deployment(model)
    if found is None or found.layer is None or method not in METHODS:
        return None
    printed = printed_figures()["fig4_layer_speedup"][found.layer][METHODS[method]]
    return {float(key): float(value) for key, value in printed.items()}.get(gamma or 0.0)


def model_speedup(
    model: str | None, method: str, gamma: float | None, experts_per_rank: int
) -> float | None:
    """Return the end-to-end speedup that Figure 5 prints, or None.

    The figure has Mixtral twice: with one expert per GPU, and with several.
    """
    found = deployment(model)
    if found is None or found.whole is None or method not in METHODS:
        return None
    setting = "single" if experts_per_rank == 1 else "multi"
    for key, values in printed_figures()["fig5_e2e_speedup"][setting].items():
        read = re.match(r"(\w+) g([\d.]+)", key)
        if read and read[1] == found.whole and float(read[2]) == gamma:
            return float(values[METHODS[method]][0])
    return None


GRANULARITY: Final[Mapping[tuple[str, float], Mapping[str, float]]] = MappingProxyType(
    {
        ("expert", 1.5): {"layer": 1.40, "prefill": 1.23},
        ("device", 1.0): {"layer": 1.51, "prefill": 1.31},
    }
)
"""Speedups of Expanded Drop on Qwen3-MoE in the text of §5.2, by (granularity, γ)."""


@cache
def printed_figures() -> Mapping[str, Any]:
    """Return the numbers of the paper's figures, by figure."""
    source = resources.files("capmoe_eval.report") / "data" / "figures.json"
    loaded: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    return loaded
