"""The commands of the benchmarks and their options."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from capmoe_eval.checks import choice
from capmoe_eval.experiment.arguments import COUNT, GAMMA, INDEX, PATH, POSITIVE, SECONDS
from capmoe_eval.experiment.configuration import options
from capmoe_eval.experiment.schema import DTYPES
from capmoe_eval.experiment.timings.studies import STUDIES

RANKS = 8
"""Emulated ranks of ``expanded_drop`` in ``forward``, as in the paper's efficiency runs."""
GAMMAS = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5)
"""Capacity factors of the grid that ``suite`` computes."""


def _forward(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", default="olmoe", help="sizes of the MoE layers: olmoe, mixtral, small …")
    add("--layers", type=COUNT, default=1)
    add("--batch", type=COUNT, default=8, help=f"sequences; a multiple of {RANKS}")
    add("--prompt", type=COUNT, default=128, help="tokens of each")
    add("--peak", type=POSITIVE, default=4.0, help="highest load of an expert over the mean load")
    add("--rounds", type=COUNT, default=31)
    add("--warmup", type=INDEX, default=2)
    _device(parser)


def _decision(parser: ArgumentParser) -> None:
    add = parser.add_argument
    shapes = ["olmoe", "qwen3_30b", "mixtral"]  # E=64 K=8, E=128 K=8, E=8 K=2
    add("--tokens", type=COUNT, default=16_384, help="tokens T of the batch")
    add("--ranks", type=COUNT, default=8, help="ranks R, each with its own capacity")
    add("--shapes", nargs="+", default=shapes, help="sizes of the MoE layers")
    add("--layer-tokens", type=COUNT, help="tokens that the layer is timed with (CPU: T/8, else T)")
    add("--rounds", type=COUNT, default=11)
    add("--layer-rounds", type=COUNT, default=3)
    _device(parser)


def _suite(parser: ArgumentParser) -> None:
    add = parser.add_argument
    every = (
        f"run plain lm-eval for all {len(GAMMAS)} cells of a task, not one that counts for all "
        "(they do the same)"
    )
    add("--model", default="zoo_olmoe", help="an embedded model")
    add("--tasks", nargs="+", default=["obqa", "piqa", "boolq"])
    add("--limit", type=COUNT, default=100, help="documents of a cell")
    add("--rounds", type=COUNT, default=3)
    add("--every-cell", action="store_true", help=every)


def _cells(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--cells", type=COUNT, default=200, help="cells in one process")
    add("--limit", type=COUNT, default=16, help="documents of each")
    add("--documents", type=COUNT, nargs="+", default=[32, 64, 128, 256], help="sizes of a cell")
    add("--repeats", type=COUNT, default=6, help="of these sizes; the first only loads the model")
    add("--model", default="zoo_olmoe")
    add("--task", default="piqa")


def _ep(parser: ArgumentParser) -> None:
    names = ", ".join(("all", *STUDIES))
    add = parser.add_argument
    add("--study", help=f"sizes, routing and methods of a place of the paper: {names}")
    add("--scale", type=COUNT, help="divide the layers' widths (default: the study's; 1)")
    divide = "study: divide the paper's batches (default: the study's)"
    add("--batch-divisor", type=COUNT, help=divide)
    add("--results", type=PATH, default=Path("results/zoo"), help="study: records to take loads of")
    add("--repeats", type=COUNT, default=7)
    add("--warmup", type=INDEX, default=1)
    add("--validate", action="store_true", help="under torchrun: emulate, too, and compare")
    _device(parser)
    add = parser.add_argument_group("emulated link (default: h20's balance on a CPU)").add_argument
    add("--machine", help="leave communication in proportion as on: h20, h100")
    add("--balance", type=POSITIVE, help="… with so many bytes per FLOP")
    add("--bandwidth", type=POSITIVE, help="bytes per second and rank, as they are")
    add("--latency", type=SECONDS, help="seconds of an empty exchange, as they are")
    add = parser.add_argument_group("a free grid").add_argument
    candidates = "of expanded_drop: local, global, ranked"
    add("--shape", default="small", help="sizes of the layer: olmoe, mixtral, small … ")
    add("--ranks", type=COUNT, help="ranks, where they are emulated (default: 8; 6 for Qwen1.5)")
    add("--tokens", type=COUNT, nargs="+", default=[1024], help="tokens of each rank")
    add("--peaks", type=POSITIVE, nargs="+", default=[2.0, 4.0, 7.0], help="peak over mean load")
    add("--together", action="store_true", help="one rank has the popular experts")
    add("--trace", help="loads instead of --peaks: figure1 (of the paper), or a record's file")
    add("--layer", type=INDEX, help="which MoE layer of the record (default: the busiest)")
    add("--gammas", type=GAMMA, nargs="+", default=[1.0, 1.5, 2.0])
    add("--methods", nargs="+", default=["score", "expanded_drop"])
    add("--candidates", nargs="+", default=["local"], help=candidates)
    add("--granularities", nargs="+", default=["expert"], help="expert, device")
    prefill = "also the prefill of a model with so many MoE layers"
    add("--layers", type=INDEX, default=0, help=prefill)
    add("--prompt", type=COUNT, default=512, help="prefill: tokens of a sequence")


def _device(parser: ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--dtype", help=f"{', '.join(DTYPES)} (CPU: the first)")


class Command(NamedTuple):
    """A benchmark: its module in this package, what it measures, and its options."""

    module: str
    first: str
    more: str
    declare: Callable[[ArgumentParser], None]


COMMANDS = {
    "forward": Command(
        "forward",
        "What the wrapper costs, and what not computing dropped pairs gains: one forward of a "
        "model.",
        "Throughput under each method over that of the stock model, in the same process, in turn.",
        _forward,
    ),
    "decision": Command(
        "decision",
        "The routing decision alone: its share of a layer's time, the paper's listings, its "
        "memory.",
        "It is what a capacity adds to a router: from gate scores and top-k to the kept pairs.",
        _decision,
    ),
    "suite": Command(
        "suite",
        "The suite against plain lm-eval: a grid, a single cell, and how fast the commands start.",
        "Plain means what the paper's scripts do: one ``lm_eval`` process for each cell and task, "
        "of a stock ``hf`` model on the same weights, documents and batch size. It drops nothing, "
        "so it has less to do.",
        _suite,
    ),
    "cells": Command(
        "cells",
        "How cost grows: with cells and documents linearly, and memory with cells not at all.",
        "Many cells run in this one process, as a sweep runs them.",
        _cells,
    ),
    "ep": Command(
        "ep.benchmark",
        "MoE layers under expert parallelism: latency by phase, and the speedup over dropless "
        "routing.",
        "Alone it is emulated: every rank's work in turn on one device, and a stated all-to-all. "
        "Under torchrun it is measured on real ranks.",
        _ep,
    ),
}


def check_names(model: str, tasks: Sequence[str]) -> None:
    """Refuse a model or a task that the configuration does not have.

    Raises:
        UsageError: With the closest one.
    """
    choice(*options("model"))("--model", model)
    for task in tasks:
        choice(*options("tasks"))("--tasks", task)
