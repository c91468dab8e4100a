"""One MoE layer under expert parallelism: latency by phase, and the speedup over dropless routing.

Alone it is emulated: every rank's work in turn on one device, and a stated all-to-all. Under
torchrun it is measured on real ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capmoe_eval.atomic import write_text
from capmoe_eval.cell import method_label
from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.launched import process_count, process_rank
from capmoe_eval.method import Method
from capmoe_eval.record import read_record

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from capmoe_eval.parallel.layer import LayerShape
    from capmoe_eval.parallel.timing import Timing
    from capmoe_eval.parallel.world import World

SCHEMA = 1
EMULATED = (
    "EMULATED: each rank's work was timed in turn on one device and the slowest counts; the "
    "all-to-all was not run, its time is latency + bytes / bandwidth"
)
_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("--shape", default="small", help="sizes of the layer: olmoe, mixtral, small … ")
    add("--ranks", type=int, help="ranks, where they are emulated (default: 8; 6 for Qwen1.5)")
    add("--tokens", type=int, nargs="+", default=[1024], help="tokens of each rank")
    add("--peaks", type=float, nargs="+", default=[2.0, 4.0, 7.0], help="peak over mean load")
    add("--together", action="store_true", help="one rank has the popular experts")
    add("--trace", type=Path, help="a record: its layer's loads instead of --peaks")
    add("--layer", type=int, help="which MoE layer of the record (default: the busiest)")
    add("--gammas", type=float, nargs="+", default=[1.0, 1.5, 2.0])
    add("--methods", nargs="+", default=["score", "expanded_drop"])
    add(
        "--candidates", nargs="+", default=["local"], help="of expanded_drop: local, global, ranked"
    )
    add("--granularities", nargs="+", default=["expert"], help="expert, device")
    add("--layers", type=int, default=0, help="also the prefill of a model with so many MoE layers")
    add("--prompt", type=int, default=512, help="prefill: tokens of a sequence")
    add("--dtype", default="float32", help=", ".join(_DTYPES))
    add("--device", default="auto", help="auto, cpu, cuda")
    add("--repeats", type=int, default=10)
    add("--warmup", type=int, default=3)
    add("--bandwidth", type=float, default=200e9, help="emulated: bytes per second and rank")
    add("--latency", type=float, default=20e-6, help="emulated: seconds of an empty exchange")
    add("--validate", action="store_true", help="under torchrun: emulate, too, and compare")
    add("--out", type=Path, default=Path("results/bench"), help="directory of the JSON file")


def run(given: argparse.Namespace) -> int:
    """Time the grid, print it and write it to ``ep-<shape>-<ranks>-<kind>.json``.

    Raises:
        UsageError: For a value that cannot be.
    """
    import torch

    from capmoe_eval.parallel.emulation import Link
    from capmoe_eval.parallel.layer import SHAPES
    from capmoe_eval.routing import experts_per_rank

    if given.shape not in SHAPES:
        raise bad_choice("shape", given.shape, SHAPES)
    if given.dtype not in _DTYPES:
        raise bad_choice("dtype", given.dtype, _DTYPES)
    if min(*given.tokens, given.repeats) < 1 or given.warmup < 0:
        raise UsageError("tokens, repeats: must be whole numbers of at least 1")
    shape, device = SHAPES[given.shape], _device(given.device)
    trace = None if given.trace is None else _trace(given.trace, given.layer)
    if trace is not None:  # the sizes of the layer, the experts of the record
        shape = dataclasses.replace(shape, n_experts=len(trace.load), top_k=trace.top_k)
    started = process_count()
    ranks = started or given.ranks or (6 if shape.n_experts == 60 else 8)
    if started and given.ranks not in (None, started):
        raise UsageError(f"ranks={given.ranks}: torchrun started {started} processes; leave it out")
    experts_per_rank(shape.n_experts, ranks)
    methods = _methods(given, ranks)
    world = _join(device) if started else None
    link = Link(given.bandwidth, given.latency)
    where = {"device": device, "dtype": getattr(torch, given.dtype)}
    bench = _Bench(shape, ranks, methods, world, link, where, trace, given)
    content = {
        "schema": SCHEMA,
        "command": "ep",
        "kind": "measured" if world else "emulated",
        "note": None if world else EMULATED,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": _machine(device),
        "shape": {"name": given.shape, **dataclasses.asdict(shape)},
        "ranks": ranks,
        "backend": world.backend if world else None,
        "dtype": given.dtype,
        "repeats": given.repeats,
        "warmup": given.warmup,
        "link": None if world else dataclasses.asdict(link),
        "points": [point for tokens in given.tokens for point in bench.points(tokens)],
    }
    if process_rank():
        return 0
    path = given.out / f"ep-{given.shape}-{ranks}-{content['kind']}.json"
    write_text(path, json.dumps(content, indent=1, sort_keys=True) + "\n")
    print(_table(content))
    print(f"written: {path}")
    return 0


@dataclass(frozen=True)
class _Trace:
    """What a recorded layer was asked for: its name, the load of every expert, and its K."""

    name: str
    load: list[int]
    top_k: int


class _Bench:
    """Times the points of a grid."""

    def __init__(
        self,
        shape: LayerShape,
        ranks: int,
        methods: Mapping[str, Method],
        world: World | None,
        link: Any,
        where: dict[str, Any],
        trace: _Trace | None,
        given: argparse.Namespace,
    ) -> None:
        self._shape, self._ranks, self._methods = shape, ranks, methods
        self._world, self._link, self._given = world, link, given
        self._where, self._trace = where, trace

    def points(self, tokens: int) -> list[dict[str, Any]]:
        """Return the timings of one size of batch under every routing."""
        return [self._point(tokens, *routing) for routing in self._routings(tokens)]

    def _routings(self, tokens: int) -> list[tuple[dict[str, Any], Tensor]]:
        import torch

        from capmoe_eval.parallel.skew import peak_load, skewed_logits, traced_logits

        shape, total = self._shape, tokens * self._ranks
        if self._trace is not None:
            logits = traced_logits(total, torch.tensor(self._trace.load), shape.top_k)
            said = {"trace": self._trace.name, "peak": peak_load(logits, shape.top_k)}
            return [(said, logits)]
        routings = []
        for peak in self._given.peaks:
            logits = skewed_logits(
                total, shape.n_experts, shape.top_k, peak, together=self._given.together
            )
            said = {"wanted_peak": peak, "together": self._given.together}
            routings.append((said | {"peak": peak_load(logits, shape.top_k)}, logits))
        return routings

    def _point(self, tokens: int, routing: dict[str, Any], logits: Tensor) -> dict[str, Any]:
        from capmoe_eval.parallel.emulation import EmulatedLayer, Link
        from capmoe_eval.parallel.prefill import EmulatedPrefill, RankedPrefill
        from capmoe_eval.parallel.timing import RankedLayer, measured_link, time_methods

        repeats = {"repeats": self._given.repeats, "warmup": self._given.warmup}
        point: dict[str, Any] = {"tokens_per_rank": tokens, "routing": routing}
        n_layers, batch = self._given.layers, (tokens, self._given.prompt)
        if self._world is None:
            alone = EmulatedLayer(self._shape, logits, self._ranks, self._link, **self._where)
            point["timings"] = _rows(time_methods(alone, self._methods, **repeats))
            if n_layers:
                whole = EmulatedPrefill(self._shape, alone, n_layers, *batch, **self._where)
                point["prefill"] = self._prefill(time_methods(whole, self._methods, **repeats))
            return point
        layer = RankedLayer(self._shape, logits, self._world, **self._where)
        timings = time_methods(layer, self._methods, **repeats)
        point["timings"] = _rows(timings)
        if n_layers:
            rest = [
                RankedLayer(self._shape, logits, self._world, seed=number, **self._where)
                for number in range(1, n_layers)
            ]
            model = RankedPrefill(self._shape, [layer, *rest], *batch, **self._where)
            point["prefill"] = self._prefill(time_methods(model, self._methods, **repeats))
            del model, rest
        if self._given.validate:
            del layer
            latency, bandwidth = measured_link(self._world, self._where["device"])
            with self._world.take_turns():
                if not self._world.rank:
                    link = Link(bandwidth, latency)
                    alone = EmulatedLayer(self._shape, logits, self._ranks, link, **self._where)
                    emulated = time_methods(alone, self._methods, **repeats)
                    point["validation"] = {
                        "note": EMULATED,
                        "link": dataclasses.asdict(link),
                        "errors": _errors(timings, emulated),
                        "timings": _rows(emulated),
                    }
        return point

    def _prefill(self, timings: Mapping[str, Timing]) -> dict[str, Any]:
        said = {"layers": self._given.layers, "prompt": self._given.prompt}
        return {**said, "timings": _rows(timings)}


def _methods(given: argparse.Namespace, ranks: int) -> dict[str, Method]:
    methods = {}
    for name in given.methods:
        for gamma in given.gammas:
            for granularity in given.granularities:
                for candidates in given.candidates if name == "expanded_drop" else ["local"]:
                    method = Method(
                        name, gamma, ep_size=ranks, granularity=granularity, candidates=candidates
                    )
                    methods[method_label(method)] = method
    return methods


def _trace(path: Path, number: int | None) -> _Trace:
    """Return what a layer of a record was asked for; without a number, that of its busiest layer.

    Raises:
        UsageError: If there is no such record or layer.
    """
    record = read_record(path)
    layers = record.capmoe["layers"]
    if number is None:
        number = max(range(len(layers)), key=lambda n: max(layers[n]["load_before"], default=0))
    if not 0 <= number < len(layers):
        raise UsageError(f"layer={number}: the record has MoE layers 0 to {len(layers) - 1}")
    layer = layers[number]
    name = f"{record.model} {record.task} {layer['name']}"
    return _Trace(name, layer["load_before"], layer["top_k"])


def _device(name: str) -> torch.device:
    import os

    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device={name}: not usable here; choose auto, cpu or cuda") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _join(device: torch.device) -> World:
    from capmoe_eval.parallel.world import World

    return World.join(device)


def _machine(device: torch.device) -> dict[str, Any]:
    import torch

    cuda = device.type == "cuda"
    name = (
        torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine()
    )
    return {
        "device": device.type,
        "name": name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _rows(timings: Mapping[str, Timing]) -> list[dict[str, Any]]:
    return [{"method": name, **dataclasses.asdict(timing)} for name, timing in timings.items()]


def _errors(
    measured: Mapping[str, Timing], emulated: Mapping[str, Timing]
) -> dict[str, dict[str, float]]:
    """Return by what share the emulation misses what was measured, per method."""
    errors = {}
    for name, timing in measured.items():
        other = emulated[name]
        errors[name] = {
            "total": other.seconds["total"].median / timing.seconds["total"].median - 1,
            "speedup": other.speedup.median / timing.speedup.median - 1,
        }
    return errors


def _table(content: Mapping[str, Any]) -> str:
    """Return the result as text."""
    shape = content["shape"]
    lines = [
        f"{shape['name']}: H={shape['hidden']} E={shape['n_experts']} K={shape['top_k']}, "
        f"{content['ranks']} ranks, {content['dtype']}, {content['machine']['name']}",
        content["note"] or f"measured on {content['ranks']} processes ({content['backend']})",
    ]
    for point in content["points"]:
        peak = point["routing"]["peak"]
        lines += ["", f"{point['tokens_per_rank']} tokens per rank, peak load {peak:.2f} × mean"]
        lines += _timing_lines(point["timings"])
        if "prefill" in point:
            whole = point["prefill"]
            lines += [f"prefill, {whole['layers']} layers, prompts of {whole['prompt']}"]
            lines += _timing_lines(whole["timings"])
        for name, error in point.get("validation", {}).get("errors", {}).items():
            lines.append(
                f"  emulated {name}: total {100 * error['total']:+.0f} %, "
                f"speedup {100 * error['speedup']:+.0f} %"
            )
    return "\n".join(lines)


def _timing_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return a heading and a line per method; milliseconds are medians."""
    phases = [phase for phase in rows[0]["seconds"] if phase != "total"]
    lines = [
        f"{'method':<38}{'ms':>9}{'speedup':>9}{'quartiles':>14}{'ideal':>7}{'reached':>9}"
        f"{'dropped':>9}  " + "".join(f"{phase:>9}" for phase in phases)
    ]
    for row in rows:
        speedup, reached = row["speedup"], row["reached"]
        quartiles = f"{speedup['low']:.2f}–{speedup['high']:.2f}"
        lines.append(
            f"{row['method']:<38}{1e3 * row['seconds']['total']['median']:>9.2f}"
            f"{speedup['median']:>9.2f}{quartiles:>14}{row['ideal_rank']:>7.2f}"
            f"{'–' if reached is None else f'{100 * reached:.0f} %':>9}"
            f"{100 * row['load']['dropped_share']:>7.1f} %  "
            + "".join(f"{1e3 * row['seconds'][phase]['median']:>9.2f}" for phase in phases)
        )
    return lines
