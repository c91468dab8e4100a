"""Count pairs, drops and loads as metrics of Prometheus, on vLLM's own ``/metrics``.

All rows of a step are counted, by phase. Loads are those of the rows under the method, which share
the capacities: by default those of prompts.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from capmoe_eval import __version__
from capmoe_eval.errors import writing
from capmoe_eval.routing.decision import moved
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.event import LayerForward, by_modality
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers import Observer
from capmoe_eval.wrapper.plan import ForwardPlan
from torch import Tensor

from capmoe_serve.server.step import StepPlan

# Shape suffixes: T rows of a plan, C counts, P phases.

PHASES: Final = ("prompt", "decode")
"""The phases in the order of their numbers."""
WHEN: Final = ("before", "after")
"""Loads by the router's own choice, and those that the experts were called with."""


class Family(NamedTuple):
    """A metric, and the labels of its series."""

    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...]


_PAIRS = ("layer", "phase")
FAMILIES: Final[Mapping[str, Family]] = {
    "capmoe_routed_pairs_total": Family(
        "counter", "Pairs of a token and an expert that the router chose.", _PAIRS
    ),
    "capmoe_kept_pairs_total": Family(
        "counter", "Pairs that the router chose and an expert computed.", _PAIRS
    ),
    "capmoe_dropped_pairs_total": Family(
        "counter", "Pairs that the router chose and no expert computed.", _PAIRS
    ),
    "capmoe_added_pairs_total": Family(
        "counter", "Pairs that an expert computed and the router did not choose.", _PAIRS
    ),
    "capmoe_tokens_total": Family("counter", "Tokens that steps computed.", ("phase",)),
    "capmoe_steps_total": Family("counter", "Steps with a token of the phase.", ("phase",)),
    "capmoe_peak_load_ratio": Family(
        "histogram",
        "Tokens of a step's fullest expert over the mean of all experts before any drop.",
        ("layer", "when"),
    ),
    "capmoe_fullest_expert_tokens": Family(
        "gauge", "Tokens of the fullest expert in the last step.", ("layer", "when")
    ),
    "capmoe_effective_gamma": Family(
        "gauge", "Capacity over the mean load of an expert in the last step.", ("layer",)
    ),
    "capmoe_info": Family(
        "gauge", "The method of the server; always 1.", ("method", "gamma", "decode", "version")
    ),
}
"""The metrics by name."""
_BUCKETS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 6, 8, 12, 16, 32)

_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def share_metrics() -> None:
    """Have the metrics of every process of a server appear on its ``/metrics``.

    Routers run in workers, and ``/metrics`` is answered by another process. Prometheus' client
    shares values between processes through files in ``PROMETHEUS_MULTIPROC_DIR``. Without the
    variable a directory is made for it, and removed when this process ends.

    Raises:
        UsageError: If the directory cannot be made.
    """
    from prometheus_client import values

    if directory := os.environ.get(_VARIABLE):
        with writing(_VARIABLE, Path(directory)):
            Path(directory).mkdir(parents=True, exist_ok=True)
    else:
        directory = tempfile.mkdtemp(prefix="capmoe_metrics_")
        os.environ[_VARIABLE] = directory
        atexit.register(_remove, directory, os.getpid())
    # The client looks at the variable when it is imported, which may have been before.
    if not values.ValueClass._multiprocess:
        values.ValueClass = values.MultiProcessValue()


def _remove(directory: str, process: int) -> None:
    """Remove a directory, in the process that made it."""
    if os.getpid() == process:
        shutil.rmtree(directory, ignore_errors=True)


@functools.cache
def families(registry: Any) -> Mapping[str, Any]:
    """Return the metrics of a registry, by default the client's own, by name.

    Engines of one process share them.
    """
    import prometheus_client

    default = prometheus_client.REGISTRY
    kinds: dict[str, Any] = {
        "counter": prometheus_client.Counter,
        # Of processes that count alike the last speaks, as in vLLM's own metrics.
        "gauge": functools.partial(prometheus_client.Gauge, multiprocess_mode="mostrecent"),
        "histogram": functools.partial(prometheus_client.Histogram, buckets=_BUCKETS),
    }
    return {
        name: kinds[of.kind](name, of.text, of.labels, registry=registry or default)
        for name, of in FAMILIES.items()
    }


def layer_labels(layers: Sequence[MoeLayer]) -> list[str]:
    """Return the number of each layer in the model, or whole names where that is ambiguous."""
    names = [layer.name for layer in layers]
    numbers = [next(filter(str.isdecimal, name.split(".")), name) for name in names]
    return numbers if len(set(numbers)) == len(numbers) else names


class Metrics(Observer):
    """Adds up what steps did, and shows it when a step has ended.

    A step that is broken off is not counted. On a GPU a step waits for the device once, for the
    numbers of all its layers; rows that are not under the method need no number of the device.
    """

    def __init__(self, layers: Sequence[MoeLayer], method: Method, registry: Any = None) -> None:
        of = families(registry)
        self._labels, self._layers = layer_labels(layers), layers
        self._is_capped = method.is_capped
        # From the start, so that a rate has a first value.
        self._pairs = [
            [
                [of[f"capmoe_{kind}_pairs_total"].labels(layer, phase) for phase in PHASES]
                for kind in ("routed", "kept", "dropped", "added")
            ]
            for layer in self._labels
        ]
        self._tokens = [of["capmoe_tokens_total"].labels(phase) for phase in PHASES]
        self._steps = [of["capmoe_steps_total"].labels(phase) for phase in PHASES]
        self._peaks = [
            [of["capmoe_peak_load_ratio"].labels(layer, when) for when in WHEN]
            for layer in self._labels
        ]
        self._fullest = of["capmoe_fullest_expert_tokens"]
        self._effective = of["capmoe_effective_gamma"]
        gamma = "" if method.factor is None else method.factor.text()
        of["capmoe_info"].labels(method.name, gamma, method.decode, __version__).set(1)
        self._figures: WeakKeyDictionary[ForwardPlan, list[Tensor]] = WeakKeyDictionary()

    def see(self, event: LayerForward) -> None:
        """Note what one layer did; nothing waits for the device."""
        plan = event.plan
        assert isinstance(plan, StepPlan)
        decode_T = moved(plan.decode_T, event.index_TA.device)
        _, dropped_P, added_P, _ = by_modality(event.count_CT, decode_T)
        fullest = [event.demand_E.max(), event.kept_E.max()]
        slots = fullest[0].new_zeros(())
        if self._is_capped:
            units = event.by_unit(event.kept_E).shape[0]
            slots = event.limit_G.sum() * units
        figures = torch.cat([dropped_P, added_P, torch.stack([*fullest, slots])])
        self._figures.setdefault(plan, []).append(figures)

    def end(self, plan: ForwardPlan) -> None:
        """Show what the step did."""
        assert isinstance(plan, StepPlan)
        decoded = int(plan.decode_T.sum())
        tokens_P = len(plan.decode_T) - decoded, decoded
        for phase, tokens in enumerate(tokens_P):
            if tokens:
                self._steps[phase].inc()
                self._tokens[phase].inc(tokens)
        figures = self._figures.pop(plan, None)
        rows = None if figures is None else torch.stack(figures).tolist()  # waits for the device
        for number, layer in enumerate(self._layers):
            dropped_P = added_P = 0, 0
            if rows is not None:
                *pairs, before, after, slots = rows[number]
                dropped_P, added_P = pairs[:2], pairs[2:]
                routed = sum(tokens_P) * layer.top_k
                self._show_loads(number, routed / layer.n_experts, (before, after))
                if self._is_capped:
                    self._effective.labels(self._labels[number]).set(slots / routed)
            for phase, tokens in enumerate(tokens_P):
                routed, dropped = tokens * layer.top_k, dropped_P[phase]
                amounts = routed, routed - dropped, dropped, added_P[phase]
                for counters, amount in zip(self._pairs[number], amounts, strict=True):
                    if amount:
                        counters[phase].inc(amount)

    def _show_loads(self, number: int, mean: float, fullest: tuple[int, int]) -> None:
        """Show the fullest expert of a layer, before and after."""
        for when, tokens, peak in zip(WHEN, fullest, self._peaks[number], strict=True):
            peak.observe(tokens / mean)
            self._fullest.labels(self._labels[number], when).set(tokens)
