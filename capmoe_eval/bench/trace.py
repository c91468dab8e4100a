"""Benchmark `trace`: time and memory of reading a server's trace and summing it up."""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from capmoe_eval.bench.child import Command, check_room, spend
from capmoe_eval.bench.options import RANKS
from capmoe_eval.bench.rounds import CPU, finish, say, target_of, without_goal
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.timings.spread import Target
from capmoe_eval.serving.trace import STEP_TOKENS, Trace
from capmoe_eval.serving.trace_file import save_trace

# Shape suffixes: T tokens, L layers, K = top-k, E experts.

_LOADS: Final = "capmoe_eval.loads"
_ADVISE: Final = "capmoe_eval.advise"
_DECODED: Final = 32  # tokens of a step of decoding
_ANSWER: Final = 512  # tokens of a response


class _File(NamedTuple):
    """A trace on the disk and the commands that read it."""

    write: Callable[[Path], None]
    name: str
    commands: dict[str, list[str]]  # module and options, by the name of the case


def run(given: argparse.Namespace) -> None:
    """Make each trace, time what reads it, print the costs and write ``trace.json``."""
    place = Path(tempfile.gettempdir()) if given.dir is None else given.dir
    _check(given, place)
    targets: list[Target] = []
    cases: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="capmoe-trace-", dir=place) as scratch:
        for file in _files(given):
            path = Path(scratch, file.name)
            say(f"trace: {file.name}, {given.tokens:,} tokens")
            file.write(path)
            for case, words in file.commands.items():
                spent = spend(_command(case, path, given.tokens, words))
                say(f"  {case}: {spent.elapsed:.1f} s, {spent.memory:.0f} MiB")
                cases[case] = {
                    "seconds": round(spent.elapsed, 2),
                    "cpu_seconds": round(spent.seconds, 2),
                    "memory_gb": round(spent.memory * 2**20 / 1e9, 3),
                    "file_bytes": path.stat().st_size,
                }
                targets += _targets(case, cases[case], given)
            path.unlink()
    options = ("tokens", "layers", "experts", "top_k")
    finish(given, CPU, targets, options, ranks=RANKS, cases=cases)


def _check(given: argparse.Namespace, place: Path) -> None:
    if given.experts % RANKS:
        raise UsageError(f"--experts={given.experts}: must be a multiple of {RANKS}, the ranks")
    if given.top_k > given.experts:
        raise UsageError(f"--top-k={given.top_k}: must be at most --experts={given.experts}")
    if not place.is_dir():
        raise UsageError(f"--dir={place}: no such directory; make it, or leave --dir out")
    pairs = given.tokens * given.layers * given.top_k
    # Beside an expert in one byte (two, of more than 256) a gate score in two.
    needed = pairs * (np.min_scalar_type(given.experts - 1).itemsize + 2) / 1e9
    check_room(f"--tokens={given.tokens}", needed, place, "take fewer, or name another --dir")


def _files(given: argparse.Namespace) -> Iterator[_File]:
    """Yield the traces."""

    def save(path: Path) -> None:
        save_trace(made_trace(given), path)

    yield _File(
        save,
        "experts.npz",
        {
            f"steps of {STEP_TOKENS:,}": [_LOADS],
            f"steps of {_DECODED}": [_LOADS, "--step-tokens", str(_DECODED)],
            "advise": [_ADVISE, "--at-least-speedup", "1.2"],
        },
    )
    yield _File(
        lambda path: save_trace(made_trace(given, has_scores=True), path),
        "scores.npz",
        {"with scores": [_LOADS]},
    )
    yield _File(save, "experts.parquet", {"parquet": [_LOADS]})
    yield _File(
        lambda path: write_responses(made_trace(given), path),
        "responses.jsonl",
        {"vLLM": [_LOADS, "--experts", str(given.experts)]},
    )


def _command(case: str, path: Path, tokens: int, words: list[str]) -> Command:
    """Return the command of a case; it has to say that it has read every token, or every step."""
    size = _DECODED if "--step-tokens" in words else STEP_TOKENS
    steps = f"{math.ceil(tokens / size):,} steps"
    module, *options = words
    python = ["-m", module, str(path), "--ranks", str(RANKS), *options]
    if module == _ADVISE:
        return Command(case, [*python, "--out", str(path.parent / "advice")], steps)
    return Command(case, python, f"{tokens:,} tokens, {steps}")


def made_trace(given: argparse.Namespace, *, has_scores: bool = False) -> Trace:
    """Draw a trace in which every layer has experts that are more popular than others.

    A token's first expert is drawn towards the popular ones, the others follow at equal distances
    in the order of popularity. The steps have :data:`STEP_TOKENS` tokens.
    """
    generator, tokens = np.random.default_rng(0), given.tokens
    shape = (tokens, given.layers, given.top_k)
    expert_TLK = np.empty(shape, dtype=np.min_scalar_type(given.experts - 1))
    score_TLK = np.empty(shape, dtype=np.float16) if has_scores else None
    place_K = np.arange(given.top_k)
    for layer in range(given.layers):
        popular_E = generator.permutation(given.experts).astype(expert_TLK.dtype)
        first_T = (given.experts * generator.random(tokens) ** 2).astype(np.int32)
        distance_T = generator.integers(1, given.experts // given.top_k + 1, tokens, np.int32)
        place_TK = first_T[:, None] + distance_T[:, None] * place_K
        expert_TLK[:, layer] = popular_E[place_TK % given.experts]
        if score_TLK is not None:
            score_TLK[:, layer] = generator.random(tokens)[:, None] / (1 + place_K)
    return Trace(
        given.experts,
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


def _targets(case: str, cost: dict[str, Any], given: argparse.Namespace) -> Iterator[Target]:
    """Yield a case's numbers; the targets are those of a trace that is summed up."""
    is_advice = case == "advise"
    does = "advise, which advises on" if is_advice else "loads, which reads and sums up"
    what = (
        f"python -m capmoe_eval.{does} {given.tokens:,} tokens × {given.layers} layers "
        f"(E={given.experts}, K={given.top_k}, {cost['file_bytes'] / 1e6:,.0f} MB)"
    )
    for key in ("seconds", "cpu_seconds", "memory_gb"):
        found = target_of(f"trace_{key}", [cost[key]], {"case": case, "what": what})
        yield without_goal(found) if is_advice else found
