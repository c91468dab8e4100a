"""Benchmarks `forward` and `generate`: the wrapper against the stock model."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from capmoe_bench.ep.layer import LayerSetting, find_shape
from capmoe_bench.ep.skew import skewed_model
from capmoe_bench.prompts import query_prompts, real_checkpoint
from capmoe_bench.rounds import alternate, device_and_dtype, dtype_name, finish, ratio, timed
from capmoe_bench.timings import Target
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.cell import REAL
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.checkpoint import load_checkpoint
from capmoe_eval.wrapper.session import capacity_aware
from capmoe_eval.zoo.checkpoints import trained_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from capmoe_benchmarks.options import RANKS

# Shape suffixes: B sequences, S positions.


Side = tuple[Method, str, float]
"""A method beside the stock model, what the method stands for, and the least throughput over that
of the stock model."""
BASELINE, UNBOUND, SCORE, EXPANDED_DROP = (
    create_method("baseline"),
    create_method("score", 1000.0),
    create_method("score", 1.0),
    create_method("expanded_drop", 1.0, ep_size=RANKS),
)
EXPANDED: Final = f"expanded_drop local, γ=1, {RANKS} ranks"
EXAMINED: Final = "score, γ=1, examined"
"""The forward that is compared with the method's definition, as the first of a run are."""
FORWARD: Final[Mapping[str, Side]] = {
    "baseline": (BASELINE, "meter and proofs alone", 0.98),
    "score, γ=1000": (UNBOUND, "a whole decision that drops nothing", 0.98),
    "score, γ=1": (SCORE, "dropped pairs are not computed", 1.05),
    EXAMINED: (SCORE, "the same, compared with the definition", 0.95),
    EXPANDED: (EXPANDED_DROP, "free slots are filled again", 0.95),
}
_PROMPT = {f"score, γ={gamma:g}": create_method("score", gamma) for gamma in (0.5, 1.0, 1.5, 2.0)}
_EVERY_STEP = create_method("score", 1.0, decode="constrained")
GENERATE: Final[Mapping[str, Side]] = {
    "baseline": (BASELINE, "meter and proofs alone", 0.95),
    "score, γ=1000": (UNBOUND, "a decision for the prompt that drops nothing", 0.95),
    **{side: (method, "the prompt is under a capacity", 0.95) for side, method in _PROMPT.items()},
    EXPANDED: (EXPANDED_DROP, "the same, and free slots are filled again", 0.95),
    "score, γ=1, every step": (_EVERY_STEP, "every step is decided, counted and checked", 0.95),
}
_MIN_DROP = 0.15  # a speedup is a target only where the method drops at least this share
EMBEDDED = "zoo:"
"""The beginning of the name of an embedded model, which may stand in place of a shape."""


def run(arguments: argparse.Namespace) -> None:
    """Time forwards or generations, print the ratios and write the file of the command."""
    if arguments.batch % RANKS:
        raise UsageError(f"batch={arguments.batch}: must be a multiple of {RANKS}")
    device, dtype = device_and_dtype(arguments)
    if arguments.command == "forward":
        shape, options = find_shape(arguments.shape), ["layers", "batch", "prompt"]
        targets, more = measure_forward(arguments, LayerSetting(shape, 1, device, dtype))
    else:
        options = ["shapes", "layers", "batch", "prompt", "new", "peak"]
        models = {name: _model(name, arguments, device, dtype) for name in arguments.shapes}
        targets, more = measure_generate(arguments, models)
        more["dtype"] = dtype_name(dtype)
    finish(arguments, device, targets, options, **more)


def measure_forward(
    arguments: argparse.Namespace, setting: LayerSetting, sides: Mapping[str, Side] = FORWARD
) -> tuple[list[Target], dict[str, Any]]:
    """Return the targets of the sides, and what else was measured; ``arguments`` has the sizes."""
    model, tokens_BS, peaks = _skewed(setting, arguments)
    forward = partial(model, input_ids=tokens_BS, use_cache=False)
    what = "Forward throughput under {} over that of the stock model"
    targets, seconds = _over_stock(arguments, sides, model, forward, what)
    shape, dtype = dataclasses.asdict(setting.shape), dtype_name(setting.dtype)
    return targets, {"shape": shape, "dtype": dtype, "peaks": peaks, **seconds}


def measure_generate(
    arguments: argparse.Namespace, models: Mapping[str, tuple[Any, Tensor]]
) -> tuple[list[Target], dict[str, Any]]:
    """Return the targets of every model with its prompts [B, S], and what else was measured."""
    targets: list[Target] = []
    more: dict[str, Any] = {"dropped_share": {}, "seconds": {}}
    for name, (model, tokens_BS) in models.items():
        generate = partial(_generate, model, tokens_BS, arguments.new)
        what = f"Generated tokens per second of {name} under {{}} over those of the stock model"
        of_model, parts = _over_stock(arguments, GENERATE, model, generate, what, name)
        targets += of_model
        for part, of_models in more.items():
            of_models[name] = parts[part]
    return targets, more


@torch.no_grad()
def _over_stock(
    arguments: argparse.Namespace,
    sides: Mapping[str, Side],
    model: Any,
    work: Callable[[], object],
    what: str,
    name: str = "",
) -> tuple[list[Target], dict[str, dict[str, Any]]]:
    """Time some work of a model under each method, in turn with the stock model.

    Returns the ratios as targets, which begin with the model's ``name``, and by method the seconds
    and the share of dropped pairs. ``what`` says what is divided, with braces for the method.
    """
    drops: dict[str, float] = {}

    def under(side: str) -> float:
        # Entering and leaving the wrapper is not timed: an evaluation does it once.
        with capacity_aware(model, sides[side][0], verify=False) as meter:
            if side != EXAMINED:
                meter.examine_nothing()
            spent = timed(work, model.device)
        drops[side] = meter.summary()["drop_rate"]
        return spent

    stock = {"stock": partial(timed, work, model.device)}
    runs = stock | {side: partial(under, side) for side in sides}
    title = f"generate: {name}" if name else "forward"
    seconds = alternate(runs, rounds=arguments.rounds, warmup=arguments.warmup, title=title)
    targets = [
        Target.of(
            f"{name}: {side} over stock".removeprefix(": "),
            f"{what.format(side)}: {why} ({100 * drops[side]:.1f} % dropped)",
            ratio(seconds["stock"], seconds[side]),
            at_least=least if least <= 1 or drops[side] >= _MIN_DROP else None,
        )
        for side, (_, why, least) in sides.items()
    ]
    return targets, {"dropped_share": drops, "seconds": seconds}


def _generate(model: Any, tokens_BS: Tensor, new: int) -> None:
    """Generate ``new`` tokens for each prompt, whatever they say: as many under every method."""
    mask_BS, length = torch.ones_like(tokens_BS), {"min_new_tokens": new, "max_new_tokens": new}
    made = model.generate(tokens_BS, attention_mask=mask_BS, do_sample=False, **length)
    if made.shape[1] != tokens_BS.shape[1] + new:
        raise RuntimeError(f"{made.shape[1] - tokens_BS.shape[1]} tokens were made of {new}")


def _skewed(
    setting: LayerSetting, arguments: argparse.Namespace
) -> tuple[Any, Tensor, list[float]]:
    names = {"layers", "batch", "prompt", "peak", "vocabulary", "head"} & vars(arguments).keys()
    return skewed_model(setting, **{name: getattr(arguments, name) for name in names})


def _model(
    name: str, arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Tensor]:
    """Return a model, and prompts for it [B, S] without pads.

    A model of `make real` gets customer queries of BANKING77, others get random tokens.
    """
    shape_BS = (arguments.batch, arguments.prompt)
    if name.startswith(REAL):
        directory = real_checkpoint("shapes", name)
        model: Any = load_checkpoint(directory, kind=AutoModelForCausalLM, dtype=dtype).to(device)
        return model, torch.tensor(query_prompts(directory, *shape_BS), device=device)
    if name.startswith(EMBEDDED):
        model = trained_model(name.removeprefix(EMBEDDED), dtype=dtype).to(device)
        generator = torch.Generator().manual_seed(0)
        tokens_BS = torch.randint(1, model.config.vocab_size, shape_BS, generator=generator)
        return model, tokens_BS.to(device)
    setting = LayerSetting(find_shape(name, "shapes"), 1, device, dtype)
    return _skewed(setting, arguments)[:2]
