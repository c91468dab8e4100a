"""Benchmark `generate`: batched generation under a capacity against the stock model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from capmoe_bench.ep.layer import LayerSetting, find_shape
from capmoe_bench.ep.skew import check_peak
from capmoe_bench.ep.skewed import skewed_model
from capmoe_bench.rounds import device_and_dtype, dtype_name, finish
from capmoe_bench.timings import Target
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.cell import REAL, checkpoint
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.checkpoint import load_checkpoint
from capmoe_eval.zoo.checkpoints import trained_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from capmoe_benchmarks.forward import TimedMethod, over_stock
from capmoe_benchmarks.options import RANKS

# Shape suffixes: B sequences, S positions.

SIDES = {
    "baseline": TimedMethod(create_method("baseline"), "meter and proofs alone"),
    "score, γ=1000": TimedMethod(
        create_method("score", 1000.0), "a decision for the prompt that drops nothing"
    ),
    **{
        f"score, γ={gamma:g}": TimedMethod(
            create_method("score", gamma), "the prompt is under a capacity"
        )
        for gamma in (0.5, 1.0, 1.5, 2.0)
    },
    f"expanded_drop local, γ=1, {RANKS} ranks": TimedMethod(
        create_method("expanded_drop", 1.0, ep_size=RANKS),
        "the same, and free slots are filled again",
    ),
    "score, γ=1, every step": TimedMethod(
        create_method("score", 1.0, decode="constrained"),
        "every step is decided, counted and checked",
    ),
}
EMBEDDED = "zoo:"
"""The beginning of the name of an embedded model, which may stand in place of a shape."""


def run(arguments: argparse.Namespace) -> None:
    """Time the generations, print the ratios and write ``generate.json``."""
    if arguments.batch % RANKS:
        raise UsageError(f"batch={arguments.batch}: must be a multiple of {RANKS}")
    device, dtype = device_and_dtype(arguments)
    models = {name: _model(name, arguments, device, dtype) for name in arguments.shapes}
    targets, more = measure(arguments, models)
    options = ("shapes", "layers", "batch", "prompt", "new", "peak")
    finish(arguments, device, targets, options, dtype=dtype_name(dtype), **more)


def measure(
    arguments: argparse.Namespace, models: Mapping[str, tuple[Any, Tensor]]
) -> tuple[list[Target], dict[str, Any]]:
    """Return the targets of every model, and what else was measured."""
    targets: list[Target] = []
    more: dict[str, dict[str, Any]] = {"dropped_share": {}, "seconds": {}}
    for name, (model, tokens_BS) in models.items():
        generate = partial(_generate, model, tokens_BS, arguments.new)
        measured, sides = over_stock("generate", model, generate, SIDES, arguments, name)
        targets += measured
        for part, of_sides in sides.items():
            more[part][name] = of_sides
    return targets, more


def _generate(model: Any, tokens_BS: Tensor, new: int) -> None:
    """Generate ``new`` tokens for each prompt, whatever they say: as many under every method."""
    made = model.generate(
        tokens_BS,
        attention_mask=torch.ones_like(tokens_BS),
        do_sample=False,
        min_new_tokens=new,
        max_new_tokens=new,
    )
    if made.shape[1] != tokens_BS.shape[1] + new:
        raise RuntimeError(f"{made.shape[1] - tokens_BS.shape[1]} tokens were made of {new}")


def _model(
    name: str, arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Tensor]:
    """Return a model, and prompts for it [B, S] without pads: of a real model, real text."""
    if name.startswith(REAL):
        return _real_model(name, arguments, device, dtype)
    if name.startswith(EMBEDDED):
        model: Any = trained_model(name.removeprefix(EMBEDDED), dtype=dtype).to(device)
        generator = torch.Generator().manual_seed(0)
        shape_BS = (arguments.batch, arguments.prompt)
        tokens_BS = torch.randint(1, model.config.vocab_size, shape_BS, generator=generator)
        return model, tokens_BS.to(device)
    shape = find_shape(name, "shapes")
    check_peak(arguments.peak, shape.n_experts, shape.top_k)
    sizes = {key: getattr(arguments, key) for key in ("layers", "batch", "prompt", "peak")}
    model, tokens_BS, _ = skewed_model(LayerSetting(shape, 1, device, dtype), **sizes)
    return model, tokens_BS


def _real_model(
    name: str, arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Tensor]:
    """Return a model of `make real`, and customer queries of BANKING77 as its prompts [B, S]."""
    import pandas as pd  # `bench gpu`, which imports this module, has none
    from capmoe_eval.zoo.hub import REAL_TEXT

    directory = Path(checkpoint(name))
    if not (directory / "config.json").is_file():
        raise UsageError(f"shapes={name}: no model in {directory}; `make real` writes it")
    model: Any = load_checkpoint(directory, kind=AutoModelForCausalLM, dtype=dtype).to(device)
    (train,) = REAL_TEXT.rglob("train.parquet")
    queries = pd.read_parquet(train)["text"]
    encoded = AutoTokenizer.from_pretrained(directory)(" ".join(queries))["input_ids"]
    n_tokens = arguments.batch * arguments.prompt
    return model, torch.tensor(encoded[:n_tokens], device=device).view(arguments.batch, -1)
