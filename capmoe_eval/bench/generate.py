"""Benchmark `generate`: batched generation under a capacity against the stock model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.bench.ep.layer import LayerSetting, find_shape
from capmoe_eval.bench.ep.skew import check_peak
from capmoe_eval.bench.ep.timing import Clock
from capmoe_eval.bench.forward import skewed_model
from capmoe_eval.bench.options import RANKS
from capmoe_eval.bench.rounds import alternate, dtype_name, finish, placement, ratio, say, timed
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.timings.spread import Target
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.session import capacity_aware
from capmoe_eval.zoo.recipes import trained_model

# Shape suffixes: B sequences, S positions.

SIDES = {
    "baseline": (Method("baseline"), "meter and proofs alone"),
    "score, γ=1000": (Method("score", 1000.0), "a decision for the prompt that drops nothing"),
    "score, γ=1": (Method("score", 1.0), "the prompt is under a capacity"),
    f"expanded_drop local, γ=1, {RANKS} ranks": (
        Method("expanded_drop", 1.0, ep_size=RANKS),
        "the same, and free slots are filled again",
    ),
    "score, γ=1, every step": (
        Method("score", 1.0, decode="constrained"),
        "every step is decided, counted and checked",
    ),
}
"""Each method, and what it stands for."""
TARGET = 0.95
"""The least tokens per second over those of the stock model."""
EMBEDDED = "zoo:"
"""The beginning of the name of an embedded model, which may stand in place of a shape."""


def run(given: argparse.Namespace) -> None:
    """Time the generations, print the ratios and write ``generate.json``."""
    if given.batch % RANKS:
        raise UsageError(f"batch={given.batch}: must be a multiple of {RANKS}")
    device, dtype = placement(given)
    models = {name: _model(name, given, device, dtype) for name in given.shapes}
    targets, more = measure(given, models, device)
    options = ("shapes", "layers", "batch", "prompt", "new", "peak")
    finish(given, device, targets, options, dtype=dtype_name(dtype), **more)


def measure(
    given: argparse.Namespace, models: Mapping[str, tuple[Any, Tensor]], device: torch.device
) -> tuple[list[Target], dict[str, Any]]:
    """Return the targets of every model, and what else was measured; ``given`` has the sizes."""
    targets, seconds, drops = [], {}, {}
    for name, (model, tokens_BS) in models.items():
        seconds[name], drops[name] = _times(name, model, tokens_BS, given, Clock(device))
        targets += [
            Target(
                f"{name}: {side} over stock",
                f"Generated tokens per second of {name} under {side} over those of the stock "
                f"model: {what} ({100 * drops[name][side]:.1f} % dropped)",
                ratio(seconds[name]["stock"], seconds[name][side]),
                TARGET,
            )
            for side, (_, what) in SIDES.items()
        ]
    return targets, {"dropped_share": drops, "seconds": seconds}


def _model(
    name: str, given: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Tensor]:
    """Return a model, and prompts for it [B, S] without pads."""
    say(f"building {name}")
    if name.startswith(EMBEDDED):
        model: Any = trained_model(name.removeprefix(EMBEDDED), dtype=dtype).to(device)
        generator = torch.Generator().manual_seed(0)
        shape_BS = (given.batch, given.prompt)
        tokens_BS = torch.randint(1, model.config.vocab_size, shape_BS, generator=generator)
        return model, tokens_BS.to(device)
    shape = find_shape(name, "shapes")
    check_peak(given.peak, shape.n_experts, shape.top_k)
    sizes = {key: getattr(given, key) for key in ("layers", "batch", "prompt", "peak")}
    model, tokens_BS, _ = skewed_model(LayerSetting(shape, 1, device, dtype), **sizes)
    return model, tokens_BS


def _times(
    name: str, model: Any, tokens_BS: Tensor, given: argparse.Namespace, clock: Clock
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return each side's seconds, round by round, and the share of pairs that it dropped."""
    drops: dict[str, float] = {}
    width = given.prompt + given.new

    @torch.no_grad()
    def generate() -> None:
        # All sides make equally many tokens, whatever they say.
        length = {"min_new_tokens": given.new, "max_new_tokens": given.new}
        mask_BS = torch.ones_like(tokens_BS)
        made = model.generate(tokens_BS, attention_mask=mask_BS, do_sample=False, **length)
        if made.shape[1] != width:
            raise RuntimeError(f"{made.shape[1]} tokens were made of {width}")

    def under(side: str) -> float:
        # Entering and leaving the wrapper is not timed: an evaluation does it once.
        with capacity_aware(model, SIDES[side][0], verify=False) as meter:
            spent = timed(generate, clock.wait)
        drops[side] = meter.summary()["drop_rate"]
        return spent

    sides = {"stock": partial(timed, generate, clock.wait)} | {n: partial(under, n) for n in SIDES}
    spent = alternate(sides, rounds=given.rounds, warmup=given.warmup, title=f"generate: {name}")
    return spent, drops
