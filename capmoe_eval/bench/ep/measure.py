"""Time a job, on real ranks or emulated, and put its result together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from capmoe_eval.bench.alternate import alternate, ratio
from capmoe_eval.bench.device import say
from capmoe_eval.bench.ep.emulation import EmulatedLayer, balanced
from capmoe_eval.bench.ep.jobs import Job
from capmoe_eval.bench.ep.layer import LayerSetting
from capmoe_eval.bench.ep.link import NODE, Machine, measured_link
from capmoe_eval.bench.ep.prefill import EmulatedPrefill, RankedPrefill
from capmoe_eval.bench.ep.routing import Routing
from capmoe_eval.bench.ep.skew import peak_load
from capmoe_eval.bench.ep.timing import Layer, RankedLayer
from capmoe_eval.experiment.cell import method_label
from capmoe_eval.experiment.timings import schema
from capmoe_eval.experiment.timings.names import DROPLESS
from capmoe_eval.experiment.timings.quartiles import Spread
from capmoe_eval.experiment.timings.schema import Label, Link, Miss, Timing
from capmoe_eval.experiment.timings.studies import Workload
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.parallel.world import World

_GAIN = 1.05  # an ideal speedup below has no share that could be told from noise
EMULATED = (
    "EMULATED: each rank's work was timed in turn on one device and the slowest counts; the "
    "all-to-all was not run, its time is latency + bytes / bandwidth"
)


@dataclass(frozen=True)
class Bench:
    """Times jobs: on real ranks where there is a world, emulated otherwise.

    Attributes:
        world: The processes, or None.
        device: The device of this process.
        dtype: Precision.
        link: The emulated link, or the machine whose balance it shall have.
        repeats: Rounds.
        warmup: Rounds before them.
        validate: Whether to emulate, too, and compare.
    """

    world: World | None
    device: torch.device
    dtype: torch.dtype
    link: Link | Machine
    repeats: int
    warmup: int
    validate: bool

    def run(self, job: Job) -> schema.Run:
        """Return the timings of a job."""
        setting = LayerSetting(job.shape, job.ranks, self.device, self.dtype)
        link = None if self.world else self._stated(job, setting)
        return schema.Run(
            model=job.model,
            shape=job.shape,
            ranks=job.ranks,
            experts_per_rank=job.shape.n_experts // job.ranks,
            why=job.why,
            link=link,
            points=tuple(
                self._point(job, setting, batch, routing, link)
                for batch in job.batches
                for routing in job.routings
            ),
        )

    def _stated(self, job: Job, setting: LayerSetting) -> Link:
        """Return the link of all points of a job; a machine's balance is found at the first."""
        if isinstance(self.link, Link):
            return self.link
        shape = job.shape
        logits = job.routings[0].logits(job.batches[0].tokens, shape.n_experts, shape.top_k)
        layer = EmulatedLayer(setting, logits, NODE)
        return balanced(layer, self.link, width=job.scale, tokens=job.fewer_tokens)

    def _point(
        self, job: Job, setting: LayerSetting, batch: Workload, routing: Routing, link: Link | None
    ) -> schema.Point:
        """Return the timings of one batch under one routing.

        An emulation beside real ranks is timed in the same rounds, in all processes at the same
        time: ranks on one machine share its memory and whatever else disturbs it, and so must what
        stands for them.
        """
        said, tokens = routing.said(), batch.tokens // job.ranks
        peak = f" {said['wanted_peak']:g}" if "wanted_peak" in said else ""
        say(
            f"ep: {job.model or job.shape.name}, {job.ranks} ranks, {tokens} tokens per rank, "
            f"routing of {said['source']}{peak}, {len(job.methods)} methods"
        )
        shape = job.shape
        logits = [
            routing.logits(batch.tokens, shape.n_experts, shape.top_k, layer=number)
            for number in range(max(1, job.layers))
        ]
        layers: list[Layer] = []
        prefills: list[Layer] = []
        if self.world:
            seeds = [dataclasses.replace(setting, seed=number) for number in range(len(logits))]
            ranked = [RankedLayer(*each, self.world) for each in zip(seeds, logits, strict=True)]
            layers.append(ranked[0])
            if job.layers:
                prefills.append(RankedPrefill(ranked, tokens, batch.prompt))
            link = measured_link(self.world, self.device) if self.validate else None
        if link:
            emulated = [EmulatedLayer(setting, each, link) for each in logits]
            layers.append(emulated[0])
            if job.layers:
                prefills.append(EmulatedPrefill(emulated, tokens, batch.prompt))
        rows, whole = (
            time_layers(each, job.methods, repeats=self.repeats, warmup=self.warmup)
            for each in (layers, prefills)
        )
        found: dict[str, Any] = {"timings": rows[0]}
        if whole:
            found["prefill"] = schema.Prefill(
                layers=job.layers, prompt=batch.prompt, timings=whole[0]
            )
        if self.world and link:
            check: dict[str, Any] = {
                "note": EMULATED,
                "link": link,
                "errors": _errors(*rows),
                "timings": rows[1],
            }
            if whole:
                check["prefill"] = schema.Comparison(errors=_errors(*whole), timings=whole[1])
            found["validation"] = schema.Validation(**check)
        return schema.Point(
            tokens_per_rank=tokens,
            batch=batch.sequences,
            prompt=batch.prompt,
            place=batch.place,
            routing=schema.Routing(**said, peak=peak_load(logits[0], shape.top_k)),
            **found,
        )


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
    return [
        tuple(
            _rows(layer, everyone, {name: [each[n] for each in of] for name, of in rounds.items()})
        )
        for n, layer in enumerate(layers)
    ]


def _rows(
    layer: Layer,
    methods: Mapping[str, Method],
    passes: Mapping[str, Sequence[Mapping[str, float]]],
) -> Iterator[Timing]:
    """Yield a layer's rows, given the seconds of its passes by method."""
    totals = {name: [each["total"] for each in of] for name, of in passes.items()}
    loads = {name: layer.load(method) for name, method in methods.items()}
    full = loads[DROPLESS]
    for name, method in methods.items():
        speedup = ratio(totals[DROPLESS], totals[name])
        ideal = full.fullest_rank / max(1, loads[name].fullest_rank)
        label = Label(method.name, method.gamma, method.granularity, method.candidates)
        yield Timing(
            method=name,
            label=None if name == DROPLESS else label,
            seconds={part: Spread.of([p[part] for p in passes[name]]) for part in passes[name][0]},
            speedup=speedup,
            load=loads[name],
            ideal_expert=full.fullest_expert / max(1, loads[name].fullest_expert),
            ideal_rank=ideal,
            reached=(speedup.median - 1) / (ideal - 1) if ideal > _GAIN else None,
        )


def _errors(measured: Sequence[Timing], emulated: Sequence[Timing]) -> dict[str, Miss]:
    """Return by what share each emulated row misses the one that was measured."""
    return {
        ours.method: Miss(
            total=theirs.seconds["total"].median / ours.seconds["total"].median - 1,
            speedup=theirs.speedup.median / ours.speedup.median - 1,
        )
        for ours, theirs in zip(measured, emulated, strict=True)
    }
