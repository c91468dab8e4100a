"""What the wrapper costs, and what not computing dropped pairs gains: one forward of a model.

Throughput under each method over that of the stock model, in the same process, in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from capmoe_eval.bench.alternate import alternate, ratio, timed
from capmoe_eval.bench.device import add_where, device_of, dtype_name, dtype_of, machine, say
from capmoe_eval.bench.target import finish
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.arguments import COUNT, INDEX, POSITIVE
from capmoe_eval.experiment.timings.targets import Target
from capmoe_eval.routing.method import Method

if TYPE_CHECKING:
    from capmoe_eval.bench.skewed_model import SkewedModel

RANKS = 8
"""Emulated ranks of expanded_drop, as in the paper's efficiency runs."""


@dataclasses.dataclass(frozen=True)
class Side:
    """A method under which the model runs.

    Attributes:
        method: The method.
        target: What its throughput over that of the stock model should be at least.
        what: What it stands for.
    """

    method: Method
    target: float
    what: str


SIDES = {
    "baseline": Side(Method("baseline"), 0.98, "meter and proofs alone"),
    "score, γ=1000": Side(Method("score", 1000.0), 0.98, "a whole decision that drops nothing"),
    "score, γ=1": Side(Method("score", 1.0), 1.05, "dropped pairs are not computed"),
    f"expanded_drop local, γ=1, {RANKS} ranks": Side(
        Method("expanded_drop", 1.0, ep_size=RANKS), 0.95, "free slots are filled again"
    ),
}
MIN_DROP = 0.15
"""The target of ``score`` is for a router that makes it drop at least this share."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("--shape", default="olmoe", help="sizes of the MoE layers: olmoe, mixtral, small …")
    add("--layers", type=COUNT, default=1)
    add("--batch", type=COUNT, default=8, help=f"sequences; a multiple of {RANKS}")
    add("--prompt", type=COUNT, default=128, help="tokens of each")
    add("--peak", type=POSITIVE, default=4.0, help="highest load of an expert over the mean load")
    add("--rounds", type=COUNT, default=31)
    add("--warmup", type=INDEX, default=2)
    add_where(parser)


def run(given: argparse.Namespace) -> int:
    """Time the forwards, print the ratios and write ``forward.json``.

    Raises:
        UsageError: For a value that cannot be.
    """
    from capmoe_eval.bench.ep.clock import Clock
    from capmoe_eval.bench.ep.layer import find_shape
    from capmoe_eval.bench.ep.skew import check_peak
    from capmoe_eval.bench.skewed_model import skewed_model

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
    total = given.warmup + given.rounds
    drops: dict[str, float] = {}
    sides = _sides(built, Clock(device).wait, drops)
    seconds = alternate(
        sides,
        rounds=given.rounds,
        warmup=given.warmup,
        on_round=lambda number: say(f"forward: round {number + 1} of {total}"),
    )
    targets = [
        Target(
            f"{name} over stock",
            f"Forward throughput under {name} over that of the stock model: {side.what} "
            f"({100 * drops[name]:.1f} % dropped)",
            ratio(seconds["stock"], seconds[name]),
            _target(side, drops[name]),
        )
        for name, side in SIDES.items()
    ]
    return finish(
        "forward",
        targets,
        machine(device),
        out=given.out,
        shape=dataclasses.asdict(shape) | {"name": given.shape},
        layers=given.layers,
        batch=given.batch,
        prompt=given.prompt,
        dtype=dtype_name(dtype),
        peaks=built.peaks,
        dropped_share=drops,
        seconds=seconds,
    )


def _sides(
    built: SkewedModel, wait: Callable[[], None], drops: dict[str, float]
) -> dict[str, Callable[[], float]]:
    """Return what passes the batch through the model, stock and under every method.

    Entering and leaving the wrapper is not timed: an evaluation does it once.

    Args:
        built: The model.
        wait: Waits for the device.
        drops: Gets the dropped share of every method.
    """
    import torch

    from capmoe_eval.wrapper.session import capacity_aware

    @torch.no_grad()
    def forward() -> None:
        built.model(input_ids=built.tokens_BS, use_cache=False)

    def under(name: str, method: Method) -> Callable[[], float]:
        def side() -> float:
            with capacity_aware(built.model, method, verify=False) as meter:
                spent = timed(forward, wait)
            drops[name] = meter.summary()["drop_rate"]
            return spent

        return side

    stock = {"stock": lambda: timed(forward, wait)}
    return stock | {name: under(name, side.method) for name, side in SIDES.items()}


def _target(side: Side, dropped: float) -> float | None:
    """Return the target, or None for a speedup where too little is dropped to speak of one."""
    return side.target if side.target <= 1 or dropped >= MIN_DROP else None
