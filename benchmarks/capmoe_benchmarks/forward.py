"""Benchmark `forward`: the wrapper against the stock model."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from capmoe_bench.ep.layer import LayerSetting, find_shape
from capmoe_bench.ep.skew import check_peak
from capmoe_bench.ep.skewed import SMALL, skewed_model
from capmoe_bench.rounds import (
    alternate,
    device_and_dtype,
    dtype_name,
    finish,
    ratio,
    say,
    timed,
)
from capmoe_bench.timings import Target
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.session import capacity_aware

from capmoe_benchmarks.options import RANKS
from capmoe_benchmarks.targets import target_of

# Shape suffixes: B sequences, S positions, T = B·S tokens, E experts, H hidden size.


class TimedMethod(NamedTuple):
    """A method beside the stock model."""

    method: Method
    what: str  # it stands for
    least: float = 0.95  # throughput over that of the stock model
    # Whether the forward is compared with the method's definition, as the first of a run are.
    examined: bool = False


SIDES = {
    "baseline": TimedMethod(create_method("baseline"), "meter and proofs alone", 0.98),
    "score, γ=1000": TimedMethod(
        create_method("score", 1000.0), "a whole decision that drops nothing", 0.98
    ),
    "score, γ=1": TimedMethod(create_method("score", 1.0), "dropped pairs are not computed", 1.05),
    "score, γ=1, examined": TimedMethod(
        create_method("score", 1.0), "the same, compared with the definition", examined=True
    ),
    f"expanded_drop local, γ=1, {RANKS} ranks": TimedMethod(
        create_method("expanded_drop", 1.0, ep_size=RANKS), "free slots are filled again"
    ),
}
_MIN_DROP = 0.15  # a speedup is a target only where the method drops at least this share


def run(arguments: argparse.Namespace) -> None:
    """Time the forwards, print the ratios and write ``forward.json``."""
    shape = find_shape(arguments.shape)
    if arguments.batch % RANKS:
        raise UsageError(f"batch={arguments.batch}: must be a multiple of {RANKS}")
    check_peak(arguments.peak, shape.n_experts, shape.top_k)
    device, dtype = device_and_dtype(arguments)
    targets, more = measure(arguments, LayerSetting(shape, 1, device, dtype))
    finish(arguments, device, targets, ("layers", "batch", "prompt"), **more)


def measure(
    arguments: argparse.Namespace,
    setting: LayerSetting,
    *,
    model_sizes: Mapping[str, int] = SMALL,
    sides: Mapping[str, TimedMethod] = SIDES,
) -> tuple[list[Target], dict[str, Any]]:
    """Return the targets of the sides, and what else was measured; ``arguments`` has the sizes."""
    say(f"building {arguments.layers} layers of {setting.shape.name}")
    sizes = {name: getattr(arguments, name) for name in ("layers", "batch", "prompt", "peak")}
    model, tokens_BS, peaks = skewed_model(setting, **sizes, **model_sizes)
    forward = partial(model, input_ids=tokens_BS, use_cache=False)
    targets, seconds = over_stock("forward", model, forward, sides, arguments)
    shape, dtype = dataclasses.asdict(setting.shape), dtype_name(setting.dtype)
    return targets, {"shape": shape, "dtype": dtype, "peaks": peaks, **seconds}


@torch.no_grad()
def over_stock(
    kind: str,
    model: Any,
    work: Callable[[], object],
    sides: Mapping[str, TimedMethod],
    arguments: argparse.Namespace,
    name: str = "",
) -> tuple[list[Target], dict[str, dict[str, Any]]]:
    """Time some work of a model under each method, in turn with the stock model.

    Returns the ratios as targets of a kind of ``targets.yaml``, ``name`` being the model's, and by
    method the seconds and the share of dropped pairs.
    """
    drops: dict[str, float] = {}

    def under(side: str) -> float:
        # Entering and leaving the wrapper is not timed: an evaluation does it once.
        with capacity_aware(model, sides[side].method, verify=False) as meter:
            if not sides[side].examined:
                meter.examine_nothing()
            spent = timed(work, model.device)
        drops[side] = meter.summary()["drop_rate"]
        return spent

    stock = {"stock": partial(timed, work, model.device)}
    runs = stock | {side: partial(under, side) for side in sides}
    title = f"{kind}: {name}" if name else kind
    seconds = alternate(runs, rounds=arguments.rounds, warmup=arguments.warmup, title=title)
    targets = [
        target_of(
            kind,
            ratio(seconds["stock"], seconds[side]),
            {"model": name, "side": side, "about": of.what, "dropped": 100 * drops[side]},
            at_least=of.least if of.least <= 1 or drops[side] >= _MIN_DROP else None,
        )
        for side, of in sides.items()
    ]
    return targets, {"dropped_share": drops, "seconds": seconds}
