"""Time a job, on real ranks or emulated, and put its result together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from capmoe_eval.bench.alternate import alternate, ratio
from capmoe_eval.bench.device import say
from capmoe_eval.bench.ep.emulation import NODE, EmulatedLayer, Machine, balanced
from capmoe_eval.bench.ep.jobs import Job, Routing
from capmoe_eval.bench.ep.layer import LayerSetting
from capmoe_eval.bench.ep.prefill import Prefill
from capmoe_eval.bench.ep.skew import peak_load
from capmoe_eval.bench.ep.timing import Layer, RankedLayer, measured_link
from capmoe_eval.experiment.cell import method_label
from capmoe_eval.experiment.timings import schema
from capmoe_eval.experiment.timings.names import DROPLESS
from capmoe_eval.experiment.timings.schema import Label, Link, Timing
from capmoe_eval.experiment.timings.spread import Spread
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
    """Times jobs: on real ranks where there is a world, emulated otherwise."""

    world: World | None
    device: torch.device  # the device of this process
    dtype: torch.dtype
    link: Link | Machine  # the emulated link, or the machine whose balance it shall have
    repeats: int
    warmup: int  # rounds before those that count
    validate: bool  # emulate, too, and compare

    def run(self, job: Job) -> schema.Run:
        """Return the timings of a job; a machine's balance is found at its first point."""
        shape, link = job.shape, self.link
        setting = LayerSetting(shape, job.ranks, self.device, self.dtype)
        if isinstance(link, Machine) and not self.world:
            logits = job.routings[0].logits(job.batches[0].tokens, shape.n_experts, shape.top_k)
            first = EmulatedLayer(setting, logits, NODE)
            link = balanced(first, link, width=job.scale, tokens=job.fewer_tokens)
        stated = link if isinstance(link, Link) and not self.world else None
        return schema.Run(
            model=job.model,
            shape=shape,
            ranks=job.ranks,
            experts_per_rank=shape.n_experts // job.ranks,
            why=job.why,
            link=stated,
            points=tuple(
                self._point(job, setting, batch, routing, stated)
                for batch in job.batches
                for routing in job.routings
            ),
        )

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
        models: list[list[RankedLayer] | list[EmulatedLayer]] = []
        if self.world:
            seeds = [replace(setting, seed=number) for number in range(len(logits))]
            ranked = zip(seeds, logits, strict=True)
            models.append([RankedLayer(*each, self.world) for each in ranked])
            link = measured_link(self.world, self.device) if self.validate else None
        if link:
            models.append([EmulatedLayer(setting, each, link) for each in logits])
        prefills = [Prefill(each, tokens, batch.prompt) for each in models] if job.layers else []
        timed = partial(time_layers, methods=job.methods, repeats=self.repeats, warmup=self.warmup)
        rows, whole = timed([each[0] for each in models]), timed(prefills)
        found: dict[str, Any] = {}
        check: dict[str, Any] = {}
        if whole:
            size = {"layers": job.layers, "prompt": batch.prompt}
            found["prefill"] = schema.Prefill(**size, timings=whole[0])
        if self.world and link:
            if whole:
                check["prefill"] = schema.Comparison(**_compared(*whole))
            found["validation"] = schema.Validation(
                note=EMULATED, link=link, **_compared(*rows), **check
            )
        return schema.Point(
            tokens_per_rank=tokens,
            batch=batch.sequences,
            prompt=batch.prompt,
            place=batch.place,
            routing=schema.Routing(**said, peak=peak_load(logits[0], shape.top_k)),
            timings=rows[0],
            **found,
        )


def time_layers(
    layers: Sequence[Layer], methods: Iterable[Method], *, repeats: int, warmup: int
) -> list[tuple[Timing, ...]]:
    """Time layers under several methods, in turn, and dropless beside them.

    Every round passes through all layers once under each method, so that what disturbs the machine
    disturbs all of them; a speedup is taken within a round.

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
    full = layer.load(methods[DROPLESS])
    for name, method in methods.items():
        load = layer.load(method)
        speedup = ratio(totals[DROPLESS], totals[name])
        ideal = full.fullest_rank / max(1, load.fullest_rank)
        label = Label(method.name, method.gamma, method.granularity, method.candidates)
        yield Timing(
            method=name,
            label=None if name == DROPLESS else label,
            seconds={part: Spread.of([p[part] for p in passes[name]]) for part in passes[name][0]},
            speedup=speedup,
            load=load,
            ideal_expert=full.fullest_expert / max(1, load.fullest_expert),
            ideal_rank=ideal,
            reached=(speedup.median - 1) / (ideal - 1) if ideal > _GAIN else None,
        )


def _compared(measured: Sequence[Timing], emulated: Sequence[Timing]) -> dict[str, Any]:
    """Return emulated rows, and by what share each misses the one that was measured."""
    errors = {
        ours.method: schema.Miss(
            total=theirs.seconds["total"].median / ours.seconds["total"].median - 1,
            speedup=theirs.speedup.median / ours.speedup.median - 1,
        )
        for ours, theirs in zip(measured, emulated, strict=True)
    }
    return {"errors": errors, "timings": emulated}
