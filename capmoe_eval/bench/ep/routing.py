"""Routing of a timed layer: from the paper, a record, or a wanted peak."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.bench.ep.skew import skewed_logits, traced_logits
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import read_record
from capmoe_eval.experiment.timings.studies import FIGURE_1
from capmoe_eval.paper.printed import figure

_FIGURE_1_TOP_K = 8  # of OLMoE


@dataclass(frozen=True)
class Skew:
    """Popularities with a wanted peak; every layer has its own popular experts.

    Attributes:
        peak: The fullest expert's load over the mean.
        together: Whether the popular experts are on one rank.
    """

    peak: float
    together: bool = False

    def logits(self, n_tokens: int, n_experts: int, top_k: int, layer: int = 0) -> Tensor:
        """Return router logits [T, E] of a layer; the first is the one that is timed alone."""
        return skewed_logits(
            n_tokens, n_experts, top_k, self.peak, together=self.together, seed=layer
        )

    def said(self) -> dict[str, Any]:
        """Return the wanted peak."""
        return {"source": "peak", "wanted_peak": self.peak, "together": self.together}


@dataclass(frozen=True)
class Trace:
    """Loads that a model's experts have been seen with; a timed layer has as many experts.

    Attributes:
        source: The name of that layer, for the file.
        loads: The load of every expert, for each layer that was seen.
        top_k: Experts K per token of that model.
    """

    source: str
    loads: tuple[tuple[float, ...], ...]
    top_k: int

    @property
    def n_experts(self) -> int:
        """Experts E of that model."""
        return len(self.loads[0])

    def logits(self, n_tokens: int, n_experts: int, top_k: int, layer: int = 0) -> Tensor:
        """Return router logits [T, E] of a layer; the first is the one that is timed alone.

        Layers beyond those that were seen have the same loads over other experts, shuffled.
        """
        load_E = torch.tensor(self.loads[layer % len(self.loads)], dtype=torch.float64)
        if layer >= len(self.loads):
            generator = torch.Generator().manual_seed(layer)
            load_E = load_E[torch.randperm(n_experts, generator=generator)]
        return traced_logits(n_tokens, load_E, top_k, seed=layer)

    def said(self) -> dict[str, Any]:
        """Return where the loads were seen."""
        return {"source": self.source}


Routing = Skew | Trace
"""Gives every layer of a model its router logits, and says in the file where they are from."""


def figure_1() -> Trace:
    """Return the normalised loads of OLMoE's experts that the paper draws in Figure 1.

    They sum to 82.5, not to 64, so they are taken as proportions: the fullest expert, drawn at 7.2,
    then has 5.6 times the mean.
    """
    return Trace(FIGURE_1, (tuple(figure("fig1_load_svg_vector")),), _FIGURE_1_TOP_K)


def record_layers(path: Path, root: Path | None = None) -> list[Trace]:
    """Return every MoE layer of a record; each trace goes on with the layers after its own.

    Args:
        path: The file.
        root: The results directory that it is of, where that is known.

    Raises:
        UsageError: If there is no such record.
    """
    record = read_record(path, root)
    layers = record.layers
    loads = [tuple(layer.load_before) for layer in layers]
    return [
        Trace(
            f"{record.model} {record.task} {layer.name}",
            (*loads[number:], *loads[:number]),
            layer.top_k,
        )
        for number, layer in enumerate(layers)
    ]


def record_layer(path: Path, number: int | None) -> Trace:
    """Return a layer of a record; without a number, the one with the fullest expert.

    Raises:
        UsageError: If there is no such record or layer.
    """
    traces = record_layers(path)
    if number is None:
        return max(traces, key=lambda trace: max(trace.loads[0]))
    if number >= len(traces):
        raise UsageError(f"layer={number}: the record has MoE layers 0 to {len(traces) - 1}")
    return traces[number]


def recorded(results: Path, model: str, task: str) -> list[Trace]:
    """Return the MoE layers of a model's baseline record of a task.

    Args:
        results: Directory of the records, as ``results_dir`` of an evaluation.
        model: The model's name there.
        task: The task's.

    Raises:
        UsageError: If there is no such record.
    """
    found = sorted((results / model / task).glob("baseline-*.json"))
    if not found:
        raise UsageError(
            f"results={results}: no baseline record of {model} and {task}; compute one with "
            f"python -m capmoe_eval model={model} method=baseline tasks={task}"
        )
    return record_layers(found[0], results)
