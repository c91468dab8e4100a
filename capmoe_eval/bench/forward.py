"""Benchmark `forward`: the wrapper against the stock model."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

import torch

from capmoe_eval.bench.alternate import alternate, finish, ratio, timed
from capmoe_eval.bench.device import device_of, dtype_name, dtype_of, say
from capmoe_eval.bench.ep.clock import Clock
from capmoe_eval.bench.ep.layer import find_shape
from capmoe_eval.bench.ep.skew import check_peak
from capmoe_eval.bench.options import RANKS
from capmoe_eval.bench.skewed_model import skewed_model
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.timings.spread import Target
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.session import capacity_aware

SIDES = {
    "baseline": (Method("baseline"), 0.98, "meter and proofs alone"),
    "score, γ=1000": (Method("score", 1000.0), 0.98, "a whole decision that drops nothing"),
    "score, γ=1": (Method("score", 1.0), 1.05, "dropped pairs are not computed"),
    f"expanded_drop local, γ=1, {RANKS} ranks": (
        Method("expanded_drop", 1.0, ep_size=RANKS),
        0.95,
        "free slots are filled again",
    ),
}
"""Each method, the least throughput over that of the stock model, and what it stands for."""
_MIN_DROP = 0.15
"""A speedup is a target only for a router that makes the method drop at least this share."""


def run(given: argparse.Namespace) -> None:
    """Time the forwards, print the ratios and write ``forward.json``.

    Raises:
        UsageError: For a value that cannot be.
    """
    shape = find_shape(given.shape)
    if given.batch % RANKS:
        raise UsageError(f"batch={given.batch}: must be a multiple of {RANKS}")
    check_peak(given.peak, shape.n_experts, shape.top_k)
    device = device_of(given.device)
    dtype = dtype_of(given.dtype, device)
    say(f"building {given.layers} layers of {given.shape}")
    built = skewed_model(
        shape,
        layers=given.layers,
        batch=given.batch,
        prompt=given.prompt,
        peak=given.peak,
        device=device,
        dtype=dtype,
    )
    wait = Clock(device).wait
    drops: dict[str, float] = {}

    @torch.no_grad()
    def forward() -> None:
        built.model(input_ids=built.tokens_BS, use_cache=False)

    def under(name: str, method: Method) -> Callable[[], float]:
        def side() -> float:
            # Entering and leaving the wrapper is not timed: an evaluation does it once.
            with capacity_aware(built.model, method, verify=False) as meter:
                spent = timed(forward, wait)
            drops[name] = meter.summary()["drop_rate"]
            return spent

        return side

    seconds = alternate(
        {"stock": lambda: timed(forward, wait)}
        | {name: under(name, method) for name, (method, *_) in SIDES.items()},
        rounds=given.rounds,
        warmup=given.warmup,
        title="forward",
    )
    targets = [
        Target(
            f"{name} over stock",
            f"Forward throughput under {name} over that of the stock model: {what} "
            f"({100 * drops[name]:.1f} % dropped)",
            ratio(seconds["stock"], seconds[name]),
            target if target <= 1 or drops[name] >= _MIN_DROP else None,
        )
        for name, (_, target, what) in SIDES.items()
    ]
    finish(
        given,
        device,
        targets,
        shape=dataclasses.asdict(shape),
        layers=given.layers,
        batch=given.batch,
        prompt=given.prompt,
        dtype=dtype_name(dtype),
        peaks=built.peaks,
        dropped_share=drops,
        seconds=seconds,
    )
