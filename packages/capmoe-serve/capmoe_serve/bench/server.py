"""Benchmark `server`: an engine of vLLM under the plugin against stock vLLM."""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from capmoe_bench.ep.layer import LayerSetting, find_shape
from capmoe_bench.ep.skew import skewed_model
from capmoe_bench.prompts import query_prompts, real_checkpoint
from capmoe_bench.rounds import CPU, alternate, finish, ratio, say
from capmoe_bench.timings import Spread, Target
from capmoe_eval.errors import EnforcementError, UsageError, bad_choice
from capmoe_eval.experiment.cell import REAL, checkpoint
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.zoo import WEIGHTS
from capmoe_eval.zoo.checkpoints import copy_checkpoint
from capmoe_eval.zoo.sets import documents
from capmoe_eval.zoo.tokenizer import miniworld_tokenizer

# Shape suffixes: B sequences, S positions.

SIDES: Final[Mapping[str, Method]] = {
    "γ=∞": create_method("score", "inf"),
    "γ=2": create_method("score", 2.0),
    "γ=1.5": create_method("score", 1.5),
    "γ=1": create_method("score", 1.0),
    "γ=0.5": create_method("score", 0.5),
    "γ=1, every step": create_method("score", 1.0, decode="constrained"),
}
"""The methods beside the stock engine; the last is under the capacity in decode steps, too."""
AT_INFINITY: Final = "γ=∞"
STOCK: Final = "stock"
LEAST: Final = 0.98
"""Tokens per second at γ=∞ over those of stock vLLM."""
PEAK: Final = 4.0
"""The fullest expert's load over the mean load in the model of random weights."""
EMBEDDED: Final = "zoo:olmoe"
WIDE: Final = "wide"
"""Models beside those of ``make real``; the second is an OLMoE of random weights."""
PARTS: Final = {
    "decision": "choosing the kept pairs and their weights",
    "checks": "counting, metrics and invariants",
}
"""The parts of a step's time that the plugin adds, beside what it does not compute."""


Load = tuple[list[list[int]], int]
"""Prompts that are sent at once, and the tokens that are generated for each."""


def run(arguments: argparse.Namespace) -> None:
    """Time an engine on each model, print the ratios and write ``server.json``."""
    for model in arguments.models:
        if model.startswith(REAL):
            real_checkpoint("models", model)
        elif model not in (EMBEDDED, WIDE):
            raise bad_choice("models", model, (EMBEDDED, WIDE, f"{REAL}smollm2_moe"))
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(
            "bench=server: vLLM is not installed here; make install-server, then "
            ".venv-server/bin/python -m capmoe_eval bench server"
        )
    from capmoe_serve.server.local import end_engine
    from capmoe_serve.server.seam import VLLM_LIBRARY

    targets: list[Target] = []
    details: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="capmoe-bench-") as directory:
        for model in arguments.models:
            name, path, dtype, prompts = _model(model, arguments, Path(directory))
            say(f"server: starting an engine on {name}")
            engine = Engine(path, dtype, prompts, arguments)
            short = max(1, arguments.prompt // 16)
            loads: dict[str, Load] = {
                "prefill": (prompts, 1),
                "decode": ([prompt[:short] for prompt in prompts], arguments.new),
            }
            details[name] = {}
            for kind, load in loads.items():
                measured, details[name][kind] = _measure(arguments, engine, name, kind, load)
                targets += measured
            end_engine()
    options = ("batch", "prompt", "new", "rounds", "warmup", "layers", "scale")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # as vLLM chooses
    finish(arguments, device, targets, options, models=details, vllm=VLLM_LIBRARY.version)


def _measure(
    arguments: argparse.Namespace, engine: Engine, name: str, kind: str, load: Load
) -> tuple[list[Target], dict[str, Any]]:
    """Return the targets of a model and load, and what else was measured."""
    sides = {side: partial(engine.seconds, side, load) for side in (STOCK, *SIDES)}
    rounds, title = arguments.rounds, f"server: {name}, {kind}"
    seconds = alternate(sides, rounds=rounds, warmup=arguments.warmup, title=title)
    shares = alternate(
        {side: partial(engine.shares, side, load) for side in SIDES}, rounds=rounds, warmup=0
    )
    dropped = {side: engine.dropped(side) for side in SIDES}
    targets = []
    for side in SIDES:
        about = f"{name}, {kind}: {side}"
        targets.append(
            Target.of(
                f"{about} over stock",
                f"Tokens per second of {name} under vLLM with Token Drop at {side} over those of "
                f"stock vLLM, {kind}-heavy requests ({100 * dropped[side]:.1f} % of the pairs "
                "under the method dropped)",
                ratio(seconds[STOCK], seconds[side]),
                at_least=LEAST if side == AT_INFINITY else None,
            )
        )
        targets += [
            Target.of(
                f"{about}, {part}",
                f"Time of the {part} ({what}) over that of all steps, {kind}-heavy requests",
                [each[part] for each in shares[side]],
                unit="share",
            )
            for part, what in PARTS.items()
        ]
    prompts, new = load
    tokens = sum(map(len, prompts)) + new * len(prompts)  # that are computed or made
    return targets, {
        "tokens": tokens,
        "tokens_per_second": {
            side: tokens / Spread.of(spent).median for side, spent in seconds.items()
        },
        "seconds": seconds,
        "dropped_share": dropped,
    }


class Engine:
    """One engine in this process, stock or under one of the methods."""

    def __init__(
        self, path: Path, dtype: str, prompts: list[list[int]], arguments: argparse.Namespace
    ) -> None:
        from capmoe_serve.server.engine import EngineCapacity
        from capmoe_serve.server.local import start_engine
        from capmoe_serve.server.metrics import Metrics

        longest = arguments.prompt + arguments.new + 1
        self._llm = start_engine(
            model=str(path),
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=longest,
            max_num_batched_tokens=max(2048, longest),
            max_num_seqs=max(len(prompts), 1),
            num_gpu_blocks_override=2 + len(prompts) * (2 + longest // 16),
        )
        self._runner: Any = self._llm.collective_rpc(lambda worker: worker.model_runner)[0]
        self._entries = {
            layer: layer._forward_entry
            for layer in self._runner.model.modules()
            if hasattr(layer, "_forward_entry")
        }
        self._capacities: dict[str, Any] = {}
        config = self._runner.vllm_config.model_config.hf_config
        self._runner.capmoe.remove()
        for side, method in SIDES.items():
            capacity = EngineCapacity(self._runner.model, config, method, samples=True)
            capacity.meter.observe(Metrics(capacity.meter.layers, method))
            capacity.remove()
            self._capacities[side] = capacity

    def seconds(self, side: str, load: Load) -> float:
        """Return the seconds that a load takes on one side."""
        with self._on(side):
            return self._generate(*load)

    def shares(self, side: str, load: Load) -> dict[str, float]:
        """Return the shares that :data:`PARTS` have of the seconds of a load."""
        with self._on(side), timed(self._capacities[side]) as seconds:
            spent = self._generate(*load)
        parts = {
            "decision": seconds["route"] - seconds["stock_route"] - seconds["plans"],
            "checks": seconds["plans"] + seconds["emit"] + seconds["end"],
        }
        return {part: amount / spent for part, amount in parts.items()}

    def dropped(self, side: str) -> float:
        """Return the share of the pairs under the method that were dropped, of all loads so far."""
        share: float = self._capacities[side].meter.summary()["drop_rate"]
        return share

    @contextmanager
    def _on(self, side: str) -> Iterator[None]:
        """Put the engine under a method in a ``with`` block, or let it be as vLLM made it."""
        for layer, entry in self._entries.items():
            layer._forward_entry = layer._select_forward() if side == STOCK else entry
        if side != STOCK:
            self._runner.capmoe = self._capacities[side]
            self._runner.capmoe.install()
        try:
            yield
        finally:
            self._runner.capmoe.remove()

    def _generate(self, prompts: list[list[int]], new: int) -> float:
        """Answer all requests, whatever the answers say: as many tokens on every side."""
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        outputs = self._llm.generate(requests, parameters, use_tqdm=False)
        spent = time.perf_counter() - began
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        if made != new * len(prompts):
            raise EnforcementError(f"{made} tokens were made of {new * len(prompts)}")
        return spent


@contextmanager
def timed(capacity: Any) -> Iterator[Mapping[str, float]]:
    """Add up the seconds of what an installed capacity does to steps, in a ``with`` block."""
    seconds: defaultdict[str, float] = defaultdict(float)

    def of(key: str, function: Any) -> Any:
        def measured(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[key] += time.perf_counter() - began

        return measured

    places: list[tuple[Any, str, str]] = [(capacity, "end", "end")]
    places += [(layer.router, "_select_experts", "route") for layer in capacity.meter.layers]
    for part in capacity._layers:
        keys = {"_plans_of_step": "plans", "_stock_route": "stock_route", "_emit": "emit"}
        places += [(part, name, key) for name, key in keys.items()]
    with ExitStack() as stack:
        for place, name, key in places:
            stack.enter_context(patch.object(place, name, of(key, getattr(place, name))))
        yield seconds


def _model(
    model: str, arguments: argparse.Namespace, folder: Path
) -> tuple[str, Path, str, list[list[int]]]:
    """Return title, checkpoint and type of a model, and prompts of equal lengths.

    ``folder`` takes the checkpoint of an embedded model, or of random weights.
    """
    if model.startswith(REAL):
        path = Path(checkpoint(model))
        return model, path, "float32", query_prompts(path, arguments.batch, arguments.prompt)
    if model == EMBEDDED:
        path = copy_checkpoint(WEIGHTS / "olmoe", Path(tempfile.mkdtemp(dir=folder)))
        return model, path, "float32", _questions(arguments)
    return _wide(arguments, folder)


def _questions(arguments: argparse.Namespace) -> list[list[int]]:
    """Return prompts of the mini-world's questions."""
    tasks = documents("miniworld", "dev")["allenai/ai2_arc"]["ARC-Challenge"]
    texts = [row["question"] for rows in tasks.values() for row in rows]
    encoded = miniworld_tokenizer()([f"{text}\n" for text in texts])["input_ids"]
    tokens: list[int] = [token for text in encoded for token in text]
    size, length = arguments.batch * arguments.prompt, arguments.prompt
    tokens = (tokens * (1 + size // len(tokens)))[:size]
    return [tokens[first : first + length] for first in range(0, size, length)]


def _wide(arguments: argparse.Namespace, folder: Path) -> tuple[str, Path, str, list[list[int]]]:
    """Write a wider OLMoE of random weights, whose routers have a high peak on its prompts."""
    shape = find_shape("olmoe").scaled(arguments.scale)
    model, tokens_BS, _ = skewed_model(
        LayerSetting(shape, 1, CPU, torch.bfloat16),
        layers=arguments.layers,
        batch=arguments.batch,
        prompt=arguments.prompt,
        peak=PEAK,
    )
    model.save_pretrained(folder)
    name = f"{arguments.layers} × olmoe, hidden {shape.hidden}"
    return name, folder, "bfloat16", tokens_BS.tolist()
