"""What the benchmark of expert parallelism times: jobs, and what came out of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from capmoe_eval.bench.alternate import alternate, ratio
from capmoe_eval.bench.device import say
from capmoe_eval.bench.ep.emulation import EmulatedLayer, Reduction, balanced
from capmoe_eval.bench.ep.layer import LayerSetting, LayerShape
from capmoe_eval.bench.ep.link import NODE, Machine, measured_link
from capmoe_eval.bench.ep.prefill import EmulatedPrefill, RankedPrefill
from capmoe_eval.bench.ep.routing import Routing
from capmoe_eval.bench.ep.skew import peak_load
from capmoe_eval.bench.ep.timing import Layer, RankedLayer
from capmoe_eval.experiment.cell import method_label
from capmoe_eval.experiment.timings import schema
from capmoe_eval.experiment.timings.names import DROPLESS
from capmoe_eval.experiment.timings.quartiles import Spread
from capmoe_eval.experiment.timings.schema import (
    Comparison,
    Label,
    Link,
    Miss,
    Point,
    Prefill,
    Run,
    Shape,
    Timing,
    Validation,
)
from capmoe_eval.routing.method import Method

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from capmoe_eval.wrapper.parallel.world import World

_GAIN = 1.05  # an ideal speedup below has no share that could be told from noise
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

    def run(self, job: Job) -> Run:
        """Return the timings of a job."""
        setting = LayerSetting(job.shape, job.ranks, self._device, self._dtype)
        link = None if self._world else self._fixed(job, setting)
        points = []
        for batch in job.batches:
            for routing in job.routings:
                _progress(job, batch, routing)
                points.append(self._point(job, setting, batch, routing, link))
        return Run(
            model=job.model,
            shape=Shape(name=job.name, **dataclasses.asdict(job.shape)),
            ranks=job.ranks,
            experts_per_rank=job.shape.n_experts // job.ranks,
            why=job.why,
            link=link,
            points=tuple(points),
        )

    def _fixed(self, job: Job, setting: LayerSetting) -> Link:
        """Return the link of all points of a job; a machine's balance is found at the first."""
        if isinstance(self._link, Link):
            return self._link
        logits = _logits(job, job.batches[0], job.routings[0], 1)[0]
        return balanced(EmulatedLayer(setting, logits, NODE), self._link, job.reduction)

    def _point(
        self, job: Job, setting: LayerSetting, batch: Batch, routing: Routing, link: Link | None
    ) -> Point:
        logits = _logits(job, batch, routing, max(1, job.layers))
        peak = peak_load(logits[0], job.shape.top_k)
        if link is not None:
            timed = self._emulated(job, setting, batch, logits, link)
        else:
            timed = self._measured(job, setting, batch, logits)
        return Point(
            tokens_per_rank=batch.tokens,
            batch=batch.sequences * job.ranks,
            prompt=batch.prompt,
            place=batch.place,
            routing=schema.Routing(**routing.said(), peak=peak),
            **timed,
        )

    def _emulated(
        self, job: Job, setting: LayerSetting, batch: Batch, logits: Sequence[Tensor], link: Link
    ) -> dict[str, Any]:
        """Return the timings of emulated ranks, as fields of a point."""
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
        checks: list[EmulatedLayer] = []
        found: dict[str, Any] = {}
        check: dict[str, Any] = {}
        if self._validate:
            link = measured_link(self._world, self._device)
            checks = _emulated_layers(setting, logits, link)
            check = {"note": EMULATED, "link": link}
        found["timings"], *emulated = self._time(job, layers[0], *checks[:1])
        if checks:
            check |= {"errors": _errors(found["timings"], *emulated), "timings": emulated[0]}
        if job.layers:
            models: list[Layer] = [RankedPrefill(layers, batch.tokens, batch.prompt)]
            if checks:
                models.append(EmulatedPrefill(checks, batch.tokens, batch.prompt))
            rows, *emulated = self._time(job, *models)
            found["prefill"] = _prefill(job, batch, rows)
            if checks:
                errors = _errors(rows, *emulated)
                check["prefill"] = Comparison(errors=errors, timings=emulated[0])
        return found | ({"validation": Validation(**check)} if checks else {})

    def _time(self, job: Job, *layers: Layer) -> list[tuple[Timing, ...]]:
        return time_layers(layers, job.methods, repeats=self._repeats, warmup=self._warmup)


def time_layers(
    layers: Sequence[Layer], methods: Iterable[Method], *, repeats: int, warmup: int
) -> list[tuple[Timing, ...]]:
    """Time layers under several methods, in turn, and dropless beside them.

    Every round passes through all layers once under each method, so that what disturbs the machine
    disturbs all of them; a speedup is taken within a round.

    Args:
        layers: The layers.
        methods: The methods.
        repeats: Rounds.
        warmup: Rounds before them that are not counted.

    Returns:
        The rows of every layer: dropless, then each method.
    """
    everyone = {DROPLESS: Method("baseline"), **{method_label(one): one for one in methods}}

    def once(method: Method) -> list[Mapping[str, float]]:
        return [layer.run(method).seconds for layer in layers]

    sides = {name: partial(once, method) for name, method in everyone.items()}
    rounds = alternate(sides, rounds=repeats, warmup=warmup)
    timed = []
    for number, layer in enumerate(layers):
        passes = {name: [each[number] for each in of] for name, of in rounds.items()}
        totals = {name: [each["total"] for each in of] for name, of in passes.items()}
        loads = {name: layer.load(method) for name, method in everyone.items()}
        full, rows = loads[DROPLESS], []
        for name, method in everyone.items():
            phases = passes[name][0]
            speedup = ratio(totals[DROPLESS], totals[name])
            ideal = full.fullest_rank / max(1, loads[name].fullest_rank)
            row = Timing(
                method=name,
                label=None if name == DROPLESS else _label(method),
                seconds={part: Spread.of([p[part] for p in passes[name]]) for part in phases},
                speedup=speedup,
                load=loads[name],
                ideal_expert=full.fullest_expert / max(1, loads[name].fullest_expert),
                ideal_rank=ideal,
                reached=(speedup.median - 1) / (ideal - 1) if ideal > _GAIN else None,
            )
            rows.append(row)
        timed.append(tuple(rows))
    return timed


def _label(method: Method) -> Label:
    return Label(method.name, method.gamma, method.granularity, method.candidates)


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


def _prefill(job: Job, batch: Batch, rows: tuple[Timing, ...]) -> Prefill:
    return Prefill(layers=job.layers, prompt=batch.prompt, timings=rows)


def _errors(measured: Sequence[Timing], emulated: Sequence[Timing]) -> dict[str, Miss]:
    """Return by what share each emulated row misses the one that was measured."""
    return {
        ours.method: Miss(
            total=theirs.seconds["total"].median / ours.seconds["total"].median - 1,
            speedup=theirs.speedup.median / ours.speedup.median - 1,
        )
        for ours, theirs in zip(measured, emulated, strict=True)
    }


def _progress(job: Job, batch: Batch, routing: Routing) -> None:
    said = routing.said()
    peak = f" {said['wanted_peak']:g}" if "wanted_peak" in said else ""
    say(
        f"ep: {job.model or job.name}, {job.ranks} ranks, {batch.tokens} tokens per rank, "
        f"routing of {said['source']}{peak}, {len(job.methods)} methods"
    )
