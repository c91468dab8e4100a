"""What the benchmark of expert parallelism times: jobs, and what came out of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capmoe_eval.bench.ep_routing import Routing
from capmoe_eval.bench.where import say
from capmoe_eval.cell import method_label
from capmoe_eval.method import Method
from capmoe_eval.parallel.emulation import EmulatedLayer
from capmoe_eval.parallel.layer import LayerSetting, LayerShape
from capmoe_eval.parallel.link import Link, Machine, Reduction, balanced, measured_link
from capmoe_eval.parallel.prefill import EmulatedPrefill, RankedPrefill
from capmoe_eval.parallel.skew import peak_load
from capmoe_eval.parallel.timing import Layer, RankedLayer, time_beside

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from capmoe_eval.parallel.world import World

EMULATED = (
    "EMULATED: each rank's work was timed in turn on one device and the slowest counts; the "
    "all-to-all was not run, its time is latency + bytes / bandwidth"
)


@dataclass(frozen=True)
class Batch:
    """What is sent through a layer at once.

    Attributes:
        sequences: Sequences of each rank.
        prompt: Tokens of each.
        place: The paper's name for it, where it has one.
    """

    sequences: int
    prompt: int
    place: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of each rank."""
        return self.sequences * self.prompt


@dataclass(frozen=True)
class Job:
    """One layer over some ranks, under every batch, routing and method that was asked for.

    Attributes:
        model: The paper's model, None for a free shape.
        name: The shape's name.
        shape: The layer that is timed.
        ranks: Ranks R.
        why: Why this routing.
        routings: Where the router logits are from.
        batches: The batches.
        methods: The methods; dropless is beside them.
        layers: MoE layers of the prefill; 0 leaves it out.
        reduction: By how much the layer is smaller than the one it stands for.
    """

    model: str | None
    name: str
    shape: LayerShape
    ranks: int
    why: str
    routings: Sequence[Routing]
    batches: Sequence[Batch]
    methods: Sequence[Method]
    layers: int
    reduction: Reduction


class Bench:
    """Times jobs: on real ranks where there is a world, emulated otherwise.

    Args:
        world: The processes, or None.
        device: Where this one computes.
        dtype: Precision.
        link: The emulated link, or the machine whose balance it shall have.
        repeats: Rounds.
        warmup: Rounds before them.
        validate: Whether to emulate, too, and compare.
    """

    def __init__(
        self,
        world: World | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        link: Link | Machine,
        repeats: int,
        warmup: int,
        validate: bool = False,
    ) -> None:
        self._world, self._link, self._validate = world, link, validate
        self._device, self._dtype = device, dtype
        self._repeats, self._warmup = repeats, warmup

    def run(self, job: Job) -> dict[str, Any]:
        """Return what a file says of a job: its ``runs`` entry."""
        setting = LayerSetting(job.shape, job.ranks, self._device, self._dtype)
        link = None if self._world else self._fixed(job, setting)
        points = []
        for batch in job.batches:
            for routing in job.routings:
                _progress(job, batch, routing)
                points.append(self._point(job, setting, batch, routing, link))
        return {
            "model": job.model,
            "shape": {"name": job.name, **dataclasses.asdict(job.shape)},
            "ranks": job.ranks,
            "experts_per_rank": job.shape.n_experts // job.ranks,
            "why": job.why,
            "link": None if link is None else dataclasses.asdict(link),
            "points": points,
        }

    def _fixed(self, job: Job, setting: LayerSetting) -> Link:
        """Return the link of all points of a job; a machine's balance is found at the first."""
        if isinstance(self._link, Link):
            return self._link
        logits = _logits(job, job.batches[0], job.routings[0], 1)[0]
        probe = EmulatedLayer(setting, logits, Link())
        return balanced(probe, self._link, job.reduction)

    def _point(
        self, job: Job, setting: LayerSetting, batch: Batch, routing: Routing, link: Link | None
    ) -> dict[str, Any]:
        logits = _logits(job, batch, routing, max(1, job.layers))
        peak = peak_load(logits[0], job.shape.top_k)
        point: dict[str, Any] = {
            "tokens_per_rank": batch.tokens,
            "batch": batch.sequences * job.ranks,
            "prompt": batch.prompt,
            "place": batch.place,
            "routing": {**routing.said(), "peak": peak},
        }
        if link is not None:
            return point | self._emulated(job, setting, batch, logits, link)
        return point | self._measured(job, setting, batch, logits)

    def _emulated(
        self, job: Job, setting: LayerSetting, batch: Batch, logits: Sequence[Tensor], link: Link
    ) -> dict[str, Any]:
        """Return the timings of emulated ranks."""
        layers = _emulated_layers(setting, logits, link)
        if not job.layers:
            return {"timings": self._time(job, layers[0])[0]}
        model = EmulatedPrefill(layers, batch.tokens, batch.prompt)
        whole, first = self._time(job, model, model.first_layer)
        return {"timings": first, "prefill": _prefill(job, batch, whole)}

    def _measured(
        self, job: Job, setting: LayerSetting, batch: Batch, logits: Sequence[Tensor]
    ) -> dict[str, Any]:
        """Return the timings of real ranks and, where asked for, how the emulation misses them.

        The emulation is timed in the same rounds, in all processes at the same time: ranks on one
        machine share its memory and whatever else disturbs it, and so must what stands for them.
        """
        assert self._world is not None
        seeds = [dataclasses.replace(setting, seed=number) for number in range(len(logits))]
        layers = [RankedLayer(*each, self._world) for each in zip(seeds, logits, strict=True)]
        checks = []
        found: dict[str, Any] = {}
        if self._validate:
            link = measured_link(self._world, self._device)
            checks = _emulated_layers(setting, logits, link)
            found["validation"] = {"note": EMULATED, "link": dataclasses.asdict(link)}
        found["timings"], *emulated = self._time(job, layers[0], *checks[:1])
        if self._validate:
            found["validation"] |= _validation(found["timings"], *emulated)
        if job.layers:
            models: list[Layer] = [RankedPrefill(layers, batch.tokens, batch.prompt)]
            if checks:
                models.append(EmulatedPrefill(checks, batch.tokens, batch.prompt))
            rows, *emulated = self._time(job, *models)
            found["prefill"] = _prefill(job, batch, rows)
            if self._validate:
                found["validation"]["prefill"] = _validation(rows, *emulated)
        return found

    def _time(self, job: Job, *layers: Layer) -> list[list[dict[str, Any]]]:
        """Return the rows of every layer under the job's methods, dropless first."""
        methods = {method_label(method): method for method in job.methods}
        timed = time_beside(layers, methods, repeats=self._repeats, warmup=self._warmup)
        return [
            [
                {
                    "method": name,
                    "label": _label(methods[name]) if name in methods else None,
                    **dataclasses.asdict(timing),
                }
                for name, timing in timings.items()
            ]
            for timings in timed
        ]


def _emulated_layers(
    setting: LayerSetting, logits: Sequence[Tensor], link: Link
) -> list[EmulatedLayer]:
    """Return a layer for each routing; all have the same weights, which saves their memory."""
    first = EmulatedLayer(setting, logits[0], link)
    return [first, *(first.rerouted(other) for other in logits[1:])]


def _logits(job: Job, batch: Batch, routing: Routing, layers: int) -> list[Tensor]:
    total = batch.tokens * job.ranks
    shape = job.shape
    return [
        routing.logits(total, shape.n_experts, shape.top_k, layer=number)
        for number in range(layers)
    ]


def _label(method: Method) -> dict[str, Any]:
    return {
        "name": method.name,
        "gamma": method.gamma,
        "granularity": method.granularity,
        "candidates": method.candidates,
    }


def _prefill(job: Job, batch: Batch, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"layers": job.layers, "prompt": batch.prompt, "timings": rows}


def _validation(
    measured: Sequence[Mapping[str, Any]], emulated: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return emulated rows, and by what share each misses the one that was measured."""
    errors = {}
    for ours, theirs in zip(measured, emulated, strict=True):
        total = theirs["seconds"]["total"]["median"] / ours["seconds"]["total"]["median"]
        speedup = theirs["speedup"]["median"] / ours["speedup"]["median"]
        errors[ours["method"]] = {"total": total - 1, "speedup": speedup - 1}
    return {"errors": errors, "timings": emulated}


def _progress(job: Job, batch: Batch, routing: Routing) -> None:
    said = routing.said()
    peak = f" {said['wanted_peak']:g}" if "wanted_peak" in said else ""
    say(
        f"ep: {job.model or job.name}, {job.ranks} ranks, {batch.tokens} tokens per rank, "
        f"routing of {said['source']}{peak}, {len(job.methods)} methods"
    )
