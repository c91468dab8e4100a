"""Time a job: a layer, and the prefill of a model, on real ranks or emulated."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.ranks import World
from torch import Tensor, nn

from capmoe_bench.ep.emulation import NODE, EmulatedLayer, ReferenceMachine, balanced
from capmoe_bench.ep.layer import Lap, LayerSetting, random_model
from capmoe_bench.ep.skew import Routing, peak_load
from capmoe_bench.ep.studies import Link, Shape, Workload
from capmoe_bench.ep.timing import (
    Clock,
    PairLoad,
    Pass,
    RankedLayer,
    in_step,
    measured_link,
)
from capmoe_bench.rounds import alternate, ratio, say
from capmoe_bench.timings import DROPLESS, Spread

Timing = dict[str, Any]
"""One method's times and its gain over dropless routing, as in the file."""

_VOCABULARY = 32_000
_GAIN = 1.05  # an ideal speedup below has no share that could be told from noise
EMULATED = (
    "EMULATED: each rank's work was timed in turn on one device and the slowest counts; the "
    "all-to-all was not run, its time is latency + bytes / bandwidth"
)


@dataclass(frozen=True)
class Job:
    """One layer over some ranks, under every batch, routing and method that was asked for."""

    model: str | None  # the paper's model, None for a free shape
    shape: Shape
    ranks: int
    why: str
    routings: Sequence[Routing]  # the sources of the router logits
    batches: Sequence[Workload]  # every rank gets as many sequences
    methods: Sequence[Method]  # dropless is beside them
    layers: int  # MoE layers of the prefill; 0 leaves it out
    scale: int  # the divisor of the model's widths
    fewer_tokens: float = 1.0  # the divisor of the number of tokens


class TimedPrefill:
    """A random model on a rank's sequences, each MoE layer with its own routing.

    Attention, norms, embeddings and head are OLMoE's, of the layer's hidden size; every rank
    computes them for its own sequences. Layers of real ranks are in the model; every process makes
    its own and calls the same methods. EMULATED ones are timed beside it, and the model is the
    dense part of one rank. ``tokens`` are those of this rank, ``prompt`` those of a sequence.
    """

    def __init__(
        self, layers: Sequence[RankedLayer] | Sequence[EmulatedLayer], tokens: int, prompt: int
    ) -> None:
        self._layers = layers
        self._method = create_method("baseline")
        setting = layers[0].setting
        replaced = replace(setting.shape, intermediate=8, n_experts=2, top_k=1)
        dense = replace(setting, shape=replaced)
        model = random_model(dense, layers=len(layers), vocabulary=_VOCABULARY)
        for decoder, layer in zip(model.model.layers, layers, strict=True):
            decoder.mlp = nn.Identity()
            if isinstance(layer, RankedLayer):
                decoder.mlp.forward = partial(self._through, layer)
        tokens_N = torch.arange(tokens, device=setting.device) * 7919 % _VOCABULARY
        self._model = partial(model, tokens_N.view(-1, prompt), use_cache=False, logits_to_keep=1)

    def _through(self, layer: RankedLayer, hidden_BSH: Tensor) -> Tensor:
        out_TH = layer.forward(self._method, nullcontext, hidden_BSH.flatten(0, 1))
        return out_TH.view(hidden_BSH.shape)

    def _logits(self, phase: str, lap: Lap) -> Tensor:
        with lap(phase):
            logits: Tensor = self._model().logits
        return logits

    @torch.no_grad()
    def run(self, method: Method) -> Pass:
        """Run the prefill once, until the last rank has finished it."""
        self._method, first = method, self._layers[0]
        device = first.setting.device
        if isinstance(first, RankedLayer):
            return in_step(partial(self._logits, "total"), first.world, device)
        clock = Clock(device)
        clock.wait()
        logits = self._logits("dense", clock.lap)
        dense = clock.seconds()["dense"]
        moe = sum(layer.run(method).seconds["total"] for layer in self._layers)
        return Pass({"dense": dense, "moe": moe, "total": dense + moe}, logits)

    def load(self, method: Method) -> PairLoad:
        """Return the pairs that the method leaves to be sent and computed in all layers."""
        return summed([layer.load(method) for layer in self._layers])


def summed(loads: Sequence[PairLoad]) -> PairLoad:
    """Return the load of several layers with as many tokens each."""
    sums = {name: np.sum([vars(load)[name] for load in loads], axis=0) for name in vars(loads[0])}
    sums["dropped_share"] /= len(loads)
    return PairLoad(**{name: value.tolist() for name, value in sums.items()})


Timed = RankedLayer | EmulatedLayer | TimedPrefill
"""Can be run under a method, and tells the load that the method leaves."""


@dataclass(frozen=True)
class JobTimer:
    """Times jobs: on real ranks where there is a world, emulated otherwise."""

    world: World | None
    device: torch.device  # the device of this process
    dtype: torch.dtype
    link: Link | ReferenceMachine  # the emulated link, or the machine whose balance it shall have
    arguments: argparse.Namespace  # repeats, warmup, validate

    def run(self, job: Job) -> dict[str, Any]:
        """Return what the file says of a job; a machine's balance is taken at its first point."""
        shape = job.shape
        setting = LayerSetting(shape, job.ranks, self.device, self.dtype)
        link = None if self.world else self.link
        if isinstance(link, ReferenceMachine):
            logits = job.routings[0].logits(job.batches[0].tokens, shape.n_experts, shape.top_k)
            first = EmulatedLayer(setting, logits, NODE)
            link = balanced(first, link, width=job.scale, tokens=job.fewer_tokens)
        return {
            "model": job.model,
            "shape": asdict(shape),
            "ranks": job.ranks,
            "experts_per_rank": shape.n_experts // job.ranks,
            "why": job.why,
            "link": link and asdict(link),
            "points": [
                self._point(job, setting, batch, routing, link)
                for batch in job.batches
                for routing in job.routings
            ],
        }

    def _point(
        self, job: Job, setting: LayerSetting, batch: Workload, routing: Routing, link: Link | None
    ) -> dict[str, Any]:
        """Return the timings of one batch under one routing.

        An emulation beside real ranks is timed in the same rounds, in all processes at the same
        time. Ranks on one machine share its memory and whatever else disturbs it, and so must the
        emulation.
        """
        source, shape, tokens = routing.fields(), job.shape, batch.tokens // job.ranks
        peak = f" {source['wanted_peak']:g}" if "wanted_peak" in source else ""
        say(
            f"ep: {job.model or shape.name}, {job.ranks} ranks, {tokens} tokens per rank, "
            f"routing of {source['source']}{peak}, {len(job.methods)} methods"
        )
        logits = [
            routing.logits(batch.tokens, shape.n_experts, shape.top_k, layer=number)
            for number in range(max(1, job.layers))
        ]
        models: list[list[RankedLayer] | list[EmulatedLayer]] = []
        if self.world:
            models.append(
                [
                    RankedLayer(replace(setting, seed=number), each, self.world)
                    for number, each in enumerate(logits)
                ]
            )
            link = measured_link(self.world, self.device) if self.arguments.validate else None
        if link:
            models.append([EmulatedLayer(setting, each, link) for each in logits])
        prefills = (
            [TimedPrefill(each, tokens, batch.prompt) for each in models] if job.layers else []
        )
        rounds = {"repeats": self.arguments.repeats, "warmup": self.arguments.warmup}
        rows = time_layers([each[0] for each in models], job.methods, **rounds)
        whole = time_layers(prefills, job.methods, **rounds)
        more: dict[str, Any] = {}
        if whole:
            size = {"layers": job.layers, "prompt": batch.prompt}
            more["prefill"] = {**size, "timings": whole[0]}
        if self.world and link:
            check = _compared(*rows)
            if whole:
                check["prefill"] = _compared(*whole)
            more["validation"] = {"note": EMULATED, "link": asdict(link), **check}
        return {
            "tokens_per_rank": tokens,
            "batch": batch.sequences,
            "prompt": batch.prompt,
            "place": batch.place,
            "routing": {**source, "peak": peak_load(logits[0], shape.top_k)},
            "timings": rows[0],
            **more,
        }


def time_layers(
    layers: Sequence[Timed], methods: Iterable[Method], *, repeats: int, warmup: int
) -> list[tuple[Timing, ...]]:
    """Time layers under several methods, in turn, and dropless beside them.

    Every round passes through all layers once under each method, so that what disturbs the machine
    disturbs all of them; a speedup is taken within a round.

    Returns:
        The rows of every layer: dropless, then each method.
    """
    everyone = {DROPLESS: create_method("baseline")} | {of.label: of for of in methods}

    def once(method: Method) -> list[Mapping[str, float]]:
        return [layer.run(method).seconds for layer in layers]

    sides = {name: partial(once, method) for name, method in everyone.items()}
    rounds = alternate(sides, rounds=repeats, warmup=warmup)
    return [
        tuple(_rows(layer, everyone, {name: [each[n] for each in rounds[name]] for name in rounds}))
        for n, layer in enumerate(layers)
    ]


def _rows(
    layer: Timed, methods: Mapping[str, Method], passes: Mapping[str, list[Mapping[str, float]]]
) -> Iterator[Timing]:
    """Yield a layer's rows, given the seconds of its passes by method."""
    totals = {name: [each["total"] for each in of] for name, of in passes.items()}
    full = layer.load(methods[DROPLESS])
    for name, method in methods.items():
        load, speedup = layer.load(method), ratio(totals[DROPLESS], totals[name])
        ideal = full.fullest_rank / max(1, load.fullest_rank)
        label = {
            "name": method.name,
            "gamma": method.uniform_gamma,  # None where it has none
            "granularity": method.granularity,  # which a capacity bounds
            "candidates": method.setting("candidates"),  # which experts `expanded_drop` adds
        }
        yield {
            "method": name,
            "label": None if name == DROPLESS else label,
            # A measured prefill has the total alone.
            "seconds": {
                part: asdict(Spread.of([p[part] for p in passes[name]])) for part in passes[name][0]
            },
            "speedup": asdict(speedup),  # of the total, over dropless in the same round
            "load": asdict(load),
            # The fullest expert's load before over that after: N_max / max(C, …), the speedup of a
            # rank with one expert that does nothing else.
            "ideal_expert": full.fullest_expert / max(1, load.fullest_expert),
            "ideal_rank": ideal,  # the same of the fullest rank's experts together
            # The speedup's share of that gain; None if that is too small.
            "reached": (speedup.median - 1) / (ideal - 1) if ideal > _GAIN else None,
        }


def _compared(measured: Sequence[Timing], emulated: Sequence[Timing]) -> dict[str, Any]:
    """Return emulated rows, and by what share each misses the one that was measured."""
    errors = {
        ours["method"]: {
            "total": theirs["seconds"]["total"]["median"] / ours["seconds"]["total"]["median"] - 1,
            "speedup": theirs["speedup"]["median"] / ours["speedup"]["median"] - 1,
        }
        for ours, theirs in zip(measured, emulated, strict=True)
    }
    return {"errors": errors, "timings": emulated}
