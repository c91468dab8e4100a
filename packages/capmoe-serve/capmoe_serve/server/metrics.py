"""Count pairs, drops and loads as metrics of Prometheus, on vLLM's own ``/metrics``.

All rows of a step are counted, by phase. Loads are those of the rows under the method, which share
the capacities: by default those of prompts.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
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

from capmoe_serve.server.engine import StepPlan

# Shape suffixes: T rows of a plan, C counts, P phases.

PHASES: Final = ("prompt", "decode")
"""The phases in the order of their numbers."""
WHEN: Final = ("before", "after")
"""Loads by the router's own choice, and those that the experts were called with."""


PAIRS: Final = {
    "routed": "Pairs of a token and an expert that the router chose.",
    "kept": "Pairs that the router chose and an expert computed.",
    "dropped": "Pairs that the router chose and no expert computed.",
    "added": "Pairs that an expert computed and the router did not choose.",
}
FAMILIES: Final[Mapping[str, tuple[str, str, tuple[str, ...]]]] = {
    **{
        f"capmoe_{kind}_pairs_total": ("counter", text, ("layer", "phase"))
        for kind, text in PAIRS.items()
    },
    "capmoe_tokens_total": ("counter", "Tokens that steps computed.", ("phase",)),
    "capmoe_steps_total": ("counter", "Steps with a token of the phase.", ("phase",)),
    "capmoe_peak_load_ratio": (
        "histogram",
        "Tokens of a step's fullest expert over the mean of all experts before any drop.",
        ("layer", "when"),
    ),
    "capmoe_fullest_expert_tokens": (
        "gauge",
        "Tokens of the fullest expert in the last step.",
        ("layer", "when"),
    ),
    "capmoe_effective_gamma": (
        "gauge",
        "Capacity over the mean load of an expert in the last step.",
        ("layer",),
    ),
    "capmoe_info": (
        "gauge",
        "The method of the server; always 1.",
        ("method", "gamma", "decode", "version"),
    ),
}
"""The metrics by name: kind, what they are, and the labels of their series."""
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
        name: kinds[kind](name, text, labels, registry=registry or default)
        for name, (kind, text, labels) in FAMILIES.items()
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
        self._of = of = families(registry)
        self._labels, self._layers = layer_labels(layers), layers
        self._is_capped = method.is_capped
        # From the start, so that a rate has a first value.
        series = {"layer": self._labels, "phase": PHASES, "when": WHEN}
        for name, (kind, _, labels) in FAMILIES.items():
            if kind != "gauge":
                for values in itertools.product(*(series[label] for label in labels)):
                    of[name].labels(*values)
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
        decoded, of = int(plan.decode_T.sum()), self._of
        tokens = dict(zip(PHASES, (len(plan.decode_T) - decoded, decoded), strict=True))
        for phase, number in tokens.items():
            if number:
                of["capmoe_steps_total"].labels(phase).inc()
                of["capmoe_tokens_total"].labels(phase).inc(number)
        # Rows that are not under the method have no figures, and drop nothing.
        figures = self._figures.pop(plan, None)
        rows = None if figures is None else torch.stack(figures).tolist()  # waits for the device
        for place, (label, layer) in enumerate(zip(self._labels, self._layers, strict=True)):
            changes = [0, 0, 0, 0]  # dropped and added by phase
            if rows is not None:
                *changes, before, after, slots = rows[place]
                routed = sum(tokens.values()) * layer.top_k
                for when, fullest in zip(WHEN, (before, after), strict=True):
                    peak = fullest * layer.n_experts / routed
                    of["capmoe_peak_load_ratio"].labels(label, when).observe(peak)
                    of["capmoe_fullest_expert_tokens"].labels(label, when).set(fullest)
                if self._is_capped:
                    of["capmoe_effective_gamma"].labels(label).set(slots / routed)
            for number, (phase, n_tokens) in enumerate(tokens.items()):
                routed, dropped, added = (
                    n_tokens * layer.top_k,
                    changes[number],
                    changes[2 + number],
                )
                amounts = routed, routed - dropped, dropped, added
                for kind, amount in zip(PAIRS, amounts, strict=True):
                    if amount:
                        of[f"capmoe_{kind}_pairs_total"].labels(label, phase).inc(amount)
