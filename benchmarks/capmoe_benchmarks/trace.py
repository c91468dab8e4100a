"""Benchmark `trace`: time and memory of reading a server's trace and summing it up."""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from capmoe_eval.bench.rounds import CPU, finish, say, without_goal
from capmoe_eval.errors import UsageError
from capmoe_eval.results.timings import Target
from capmoe_serve.trace import STEP_TOKENS, Trace
from capmoe_serve.trace_file import save_trace

from capmoe_benchmarks.cost import cost_of
from capmoe_benchmarks.options import RANKS
from capmoe_benchmarks.targets import target_of

# Shape suffixes: T tokens, L layers, K = top-k, E experts.

_DECODED: Final = 32  # tokens of a step of decoding
_ANSWER: Final = 512  # tokens of a response

# The cases by the trace that they read: the command with its options.
_CASES: Final = {
    "experts.npz": {
        f"steps of {STEP_TOKENS:,}": "loads",
        f"steps of {_DECODED}": f"loads --step-tokens {_DECODED}",
        "advise": "advise --at-least-speedup 1.2 --out {out}",
    },
    "scores.npz": {"with scores": "loads"},
    "responses.jsonl": {"vLLM": "loads --experts {experts}"},
}


def run(arguments: argparse.Namespace) -> None:
    """Make each trace, time what reads it, print the costs and write ``trace.json``."""
    place = Path(tempfile.gettempdir()) if arguments.dir is None else arguments.dir
    _check(arguments, place)
    targets: list[Target] = []
    cases: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="capmoe-trace-", dir=place) as scratch:
        for name, commands in _CASES.items():
            path = Path(scratch, name)
            say(f"trace: {name}, {arguments.tokens:,} tokens")
            made = made_trace(arguments, has_scores=name == "scores.npz")
            write = write_responses if path.suffix == ".jsonl" else save_trace
            write(made, path)
            del made
            for case, text in commands.items():
                filled = text.format(out=f"{scratch}/advice", experts=arguments.experts)
                command, *more = filled.split()
                words = ["-m", "capmoe_eval", command, str(path), "--ranks", str(RANKS), *more]
                # It has to say that it has read every token, or every step.
                size = _DECODED if "--step-tokens" in more else STEP_TOKENS
                steps = f"{math.ceil(arguments.tokens / size):,} steps"
                expected = steps if case == "advise" else f"{arguments.tokens:,} tokens, {steps}"
                cost = cost_of(case, words, expected)
                say(f"  {case}: {cost.elapsed:.1f} s, {cost.memory:.0f} MiB")
                cases[case] = {
                    "seconds": round(cost.elapsed, 2),
                    "cpu_seconds": round(cost.seconds, 2),
                    "memory_gb": round(cost.memory * 2**20 / 1e9, 3),
                    "file_bytes": path.stat().st_size,
                }
                targets += _targets(case, cases[case], arguments)
            path.unlink()
    options = ("tokens", "layers", "experts", "top_k")
    finish(arguments, CPU, targets, options, ranks=RANKS, cases=cases)


def _check(arguments: argparse.Namespace, place: Path) -> None:
    """Refuse sizes that cannot be, and a disk without space for them."""
    if arguments.experts % RANKS:
        raise UsageError(f"--experts={arguments.experts}: must be a multiple of {RANKS}, the ranks")
    if arguments.top_k > arguments.experts:
        raise UsageError(
            f"--top-k={arguments.top_k}: must be at most --experts={arguments.experts}"
        )
    if not place.is_dir():
        raise UsageError(f"--dir={place}: no such directory; make it, or leave --dir out")
    pairs = arguments.tokens * arguments.layers * arguments.top_k
    # Beside an expert in one byte (two, of more than 256) a gate score in two.
    needed = pairs * (np.min_scalar_type(arguments.experts - 1).itemsize + 2) / 1e9
    free = shutil.disk_usage(place).free / 1e9
    if needed > free:
        raise UsageError(
            f"--tokens={arguments.tokens}: needs {needed:.1f} GB in {place}, which has {free:.1f}; "
            "take fewer, or name another --dir"
        )


def made_trace(arguments: argparse.Namespace, *, has_scores: bool = False) -> Trace:
    """Draw a trace in which every layer has experts that are more popular than others.

    A token's first expert is drawn towards the popular ones, the others follow at equal distances
    in the order of popularity. The steps have :data:`STEP_TOKENS` tokens.
    """
    generator = np.random.default_rng(0)
    tokens, n_experts, top_k = arguments.tokens, arguments.experts, arguments.top_k
    shape = (tokens, arguments.layers, top_k)
    expert_TLK = np.empty(shape, dtype=np.min_scalar_type(n_experts - 1))
    score_TLK = np.empty(shape, dtype=np.float16) if has_scores else None
    place_K = np.arange(top_k)
    for layer in range(arguments.layers):
        popular_E = generator.permutation(n_experts).astype(expert_TLK.dtype)
        first_T = (n_experts * generator.random(tokens) ** 2).astype(np.int32)
        distance_T = generator.integers(1, n_experts // top_k + 1, tokens, np.int32)
        place_TK = first_T[:, None] + distance_T[:, None] * place_K
        expert_TLK[:, layer] = popular_E[place_TK % n_experts]
        if score_TLK is not None:
            score_TLK[:, layer] = generator.random(tokens)[:, None] / (1 + place_K)
    return Trace(
        n_experts,
        expert_TLK,
        score_TLK,
        step_T=np.arange(tokens, dtype=np.int32) // STEP_TOKENS,
        model="made",
        source="drawn at random",
    )


def write_responses(trace: Trace, path: Path) -> None:
    """Write the tokens as responses of vLLM, prompt and answer together as base64 of ``.npy``."""
    assert trace.expert_TLK is not None
    with path.open("w", encoding="utf-8") as file:
        for first in range(0, len(trace.expert_TLK), _ANSWER):
            buffer = io.BytesIO()
            np.save(buffer, trace.expert_TLK[first : first + _ANSWER])
            routed = base64.b64encode(buffer.getvalue()).decode()
            choice = {"index": 0, "routed_experts": routed}
            file.write(json.dumps({"model": trace.model, "choices": [choice]}) + "\n")


def _targets(case: str, cost: dict[str, Any], arguments: argparse.Namespace) -> Iterator[Target]:
    """Yield a case's numbers; the targets are those of a trace that is summed up."""
    is_advice = case == "advise"
    does = "advise, which advises on" if is_advice else "loads, which reads and sums up"
    what = (
        f"capmoe-eval {does} {arguments.tokens:,} tokens × {arguments.layers} layers "
        f"(E={arguments.experts}, K={arguments.top_k}, {cost['file_bytes'] / 1e6:,.0f} MB)"
    )
    for key in ("seconds", "cpu_seconds", "memory_gb"):
        target = target_of(f"trace_{key}", [cost[key]], {"case": case, "what": what})
        yield without_goal(target) if is_advice else target
