"""Benchmark `decision`: the routing decision alone, against the paper's listings."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.bench.ep.layer import LayerSetting, find_shape, random_experts
from capmoe_eval.bench.ep.skew import Skew
from capmoe_eval.bench.memory import peak_array_bytes, peak_bytes
from capmoe_eval.bench.rounds import (
    alternate,
    dtype_name,
    finish,
    placement,
    ratio,
    say,
    target_of,
    timed,
)
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.timings.schema import Shape
from capmoe_eval.experiment.timings.spread import Spread, Target
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.context import LayerContext
from capmoe_eval.routing.methods.expanded_drop import ExpandedDrop
from capmoe_eval.routing.registry import create_method
from capmoe_eval.routing.scores import Assignment, Scores
from capmoe_eval.routing.tokens import group_tokens

# Shape suffixes: T tokens, K = top-k, E experts, L experts of a rank, S slots, H hidden size.

_LISTINGS = {"score": "Algorithm 1", "expanded_drop": "Algorithm 2"}
_SHARE = {"cpu": 0.10, "cuda": 0.03}
_GAMMA = 1.0
_PEAK = 4.0  # highest load over the mean; at most half of what E and K allow
_CALLS, _MEASURABLE = 20, 0.005  # most calls of a step's decision or layer at a time; seconds


def run(given: argparse.Namespace) -> None:
    """Time the decisions, print the ratios and write ``decision.json``."""
    if given.tokens % given.ranks:
        raise UsageError(f"tokens={given.tokens}: must be a multiple of ranks={given.ranks}")
    shapes = [find_shape(name, "shapes") for name in given.shapes]
    for shape in shapes:
        experts_per_rank(shape.n_experts, given.ranks, "ranks")
    device, dtype = placement(given)
    steps = [find_shape(name, "step_shapes") for name in given.step_shapes]
    targets, more = measure(given, shapes, device, dtype)
    if device.type == "cpu":
        measured, more["threads"] = measure_threads(given, shapes, device)
        targets += measured
    measured, more["steps"] = measure_steps(given, steps, device, dtype)
    finish(given, device, targets + measured, ("tokens", "ranks"), **more)


def measure(
    given: argparse.Namespace, shapes: Sequence[Shape], device: torch.device, dtype: torch.dtype
) -> tuple[list[Target], dict[str, Any]]:
    """Return the targets of every shape, and what else was measured; ``given`` has the sizes."""
    targets: list[Target] = []
    details = []
    for shape in shapes:
        say(f"decision: {shape.name}")
        problem = _Problem(shape, given.tokens, given.ranks, device)
        setting = LayerSetting(shape, 1, device, dtype)
        layer = _layer_seconds(setting, problem.logits_TE, given)
        for name in _LISTINGS:
            row = _measure(name, problem, given.rounds, device)
            targets += _targets(shape.name, row, layer, device.type)
            details.append({"shape": shape.name, **row, "layer_seconds": layer})
    return targets, {"details": details, "dtype": dtype_name(dtype)}


def measure_threads(
    given: argparse.Namespace, shapes: Sequence[Shape], device: torch.device
) -> tuple[list[Target], list[dict[str, Any]]]:
    """Return the gain over the listings at other numbers of threads, and the seconds."""
    targets: list[Target] = []
    rows: list[dict[str, Any]] = []
    before = torch.get_num_threads()
    for threads in given.threads:
        if threads == before:
            continue
        torch.set_num_threads(threads)
        for shape in shapes:
            say(f"decision: {shape.name}, threads: {threads}")
            problem = _Problem(shape, given.tokens, given.ranks, device)
            for name in _LISTINGS:
                seconds = _seconds(name, problem, given.rounds, device)
                row = {"name": name, "equal": _is_equal(name, problem), "seconds": seconds}
                targets.append(_against_listing(f"{shape.name}, {threads} threads", row))
                rows.append({"shape": shape.name, "threads": threads, **row})
    torch.set_num_threads(before)
    return targets, rows


def measure_steps(
    given: argparse.Namespace,
    shapes: Sequence[Shape],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[list[Target], list[dict[str, Any]]]:
    """Return the decision's share of the layer's time in steps of few tokens, and the seconds.

    Decision and layer are timed in turn, each as the mean of some calls.
    """
    targets: list[Target] = []
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        layer_of = _layer(LayerSetting(shape, 1, device, dtype))
        for tokens in given.step_tokens:
            say(f"decision: {shape.name}, a step of {tokens}")
            problem = _Problem(shape, tokens, given.ranks, device, rounding="ceil")
            sides: dict[str, Callable[[], object]] = {
                name: partial(problem.ours, name) for name in _LISTINGS
            }
            sides["layer"] = layer_of(problem.logits_TE)
            spent = alternate(
                {side: partial(_mean, work, device) for side, work in sides.items()},
                rounds=given.rounds,
            )
            for name in _LISTINGS:
                words = {"shape": shape.name, "tokens": tokens, "method": name}
                shares = ratio(spent[name], spent["layer"])
                targets.append(target_of("decision_step", shares, words))
            rows.append({"shape": shape.name, "tokens": tokens, "seconds": spent})
    return targets, rows


def _mean(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, as the mean of as many as make a time that can be measured."""
    calls = max(1, min(_CALLS, int(_MEASURABLE / timed(work, device))))

    def repeated() -> None:
        for _ in range(calls):
            work()

    return timed(repeated, device) / calls


def paper_map(score_TE: Tensor, topk_TK: Tensor, local_ids: Sequence[int] = ()) -> Tensor:
    """Return the final map [T, E] of the paper's Algorithm 1, or 2: 1 where the pair is kept.

    Both are taken line by line. They begin with the scores and the top-k of a router; each rank
    runs them on its own tokens. With ``local_ids``, the rank's experts, it is Algorithm 2.
    """
    index_TS = topk_TK
    if local_ids:
        local_TL = torch.tensor(local_ids, device=score_TE.device).repeat(len(score_TE), 1)
        index_TS = torch.cat([topk_TK, local_TL], dim=1)
    mask_TE = torch.zeros_like(score_TE).scatter(1, index_TS, 1)
    masked_TE = score_TE * mask_TE
    n_tokens, n_experts = score_TE.size()
    cap = int(_GAMMA * (n_tokens * topk_TK.shape[1]) / n_experts)
    _, keep_idx = masked_TE.topk(cap, dim=0)
    cap_mask_TE = torch.zeros_like(score_TE).scatter(0, keep_idx, 1)
    return mask_TE * cap_mask_TE


def kept_map(assignment: Assignment, n_experts: int) -> Tensor:
    """Return a mask [T, E] of the kept pairs; a slot that stands for none may name any expert."""
    keep_TS = assignment.keep_TS
    kept_TE = keep_TS.new_zeros(len(keep_TS), n_experts)
    return kept_TE.scatter_reduce(1, assignment.index_TS, keep_TS, "amax")


class _Problem:
    """Skewed router logits, their scores and choice, and the tokens of each rank.

    Tokens that the ranks do not share evenly are sequences of one token, as in a decode step.
    """

    def __init__(
        self,
        shape: Shape,
        tokens: int,
        ranks: int,
        device: torch.device,
        rounding: str = "floor",  # as in the listings
    ) -> None:
        peak = min(_PEAK, shape.n_experts / shape.top_k / 2)
        self.logits_TE = Skew(peak).logits(tokens, shape.n_experts, shape.top_k).to(device)
        score_TE = self.logits_TE.softmax(dim=1)
        self.scores = Scores(score_TE, score_TE.topk(shape.top_k, dim=1).indices)
        sequences = tokens if tokens % ranks else ranks
        counted = torch.ones(sequences, tokens // sequences, dtype=torch.bool)
        self._groups = group_tokens(counted, ep_size=ranks).to(device)
        self._ranks, self._shape = ranks, shape
        self._methods = {
            name: create_method(name, _GAMMA, ep_size=ranks, rounding=rounding)
            for name in _LISTINGS
        }

    def ours(self, name: str) -> Assignment:
        """Return our assignment, with the capacities that it needs."""
        method, shape = self._methods[name], self._shape
        layer = LayerContext.of(method, self._groups, top_k=shape.top_k, n_experts=shape.n_experts)
        return method.decide(self.scores, self._groups, layer)

    def paper(self, name: str) -> Tensor:
        """Return the final map [T, E] of the paper's listing, rank by rank."""
        expands = isinstance(self._methods[name], ExpandedDrop)
        local = self._shape.n_experts // self._ranks if expands else 0
        scores = self.scores.score_TE.chunk(self._ranks)
        choices = self.scores.topk_TK.chunk(self._ranks)
        maps = [
            paper_map(*own, range(rank * local, (rank + 1) * local))
            for rank, own in enumerate(zip(scores, choices, strict=True))
        ]
        return torch.cat(maps)


def _measure(name: str, problem: _Problem, rounds: int, device: torch.device) -> dict[str, Any]:
    """Return the seconds of both sides, whether they keep the same pairs, and the most memory.

    That is memory beyond inputs, result and one index per slot, in score matrices [T, E] of
    float32.
    """
    seconds = _seconds(name, problem, rounds, device)
    made: list[Assignment] = []
    peak = peak_bytes(lambda: made.append(problem.ours(name)))
    if device.type == "cpu":  # where a decision also has arrays; the two peaks may differ in time
        peak += peak_array_bytes(partial(problem.ours, name))
    (result,) = made
    score_TE, equal = problem.scores.score_TE, _is_equal(name, problem)
    indices = result.keep_TS.nbytes + 8 * result.keep_TS.numel()  # one order of the slots
    if result.index_TS is not problem.scores.topk_TK:
        indices += result.index_TS.nbytes
    extra = (peak - indices) / score_TE.nbytes
    return {"name": name, "seconds": seconds, "equal": equal, "extra_matrices": extra}


def _seconds(
    name: str, problem: _Problem, rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds of our decision and of the paper's listing."""
    decisions = {"ours": problem.ours, "paper": problem.paper}
    sides = {side: partial(timed, partial(of, name), device) for side, of in decisions.items()}
    return alternate(sides, rounds=rounds)


def _is_equal(name: str, problem: _Problem) -> bool:
    """Return whether both keep the same pairs."""
    kept_TE = kept_map(problem.ours(name), problem.scores.score_TE.shape[1])
    return bool((kept_TE == problem.paper(name).bool()).all())


def _layer_seconds(setting: LayerSetting, logits_TE: Tensor, given: argparse.Namespace) -> float:
    """Return the median time of the stock layer (router and experts), for all T tokens.

    On a CPU it is timed with the tokens of one of eight parts, and that times eight: larger
    matrices are no slower per token, so the decision's share is not flattered.
    """
    device = setting.device
    n_tokens = given.layer_tokens or given.tokens // (8 if device.type == "cpu" else 1)
    n_tokens = max(1, min(n_tokens, given.tokens))
    sides = {"layer": partial(timed, _layer(setting)(logits_TE[:n_tokens]), device)}
    spent = alternate(sides, rounds=given.layer_rounds, warmup=1)["layer"]
    total: float = Spread.of(spent).median * given.tokens / n_tokens
    return total


def _layer(setting: LayerSetting) -> Callable[[Tensor], Callable[[], None]]:
    """Return the stock layer, router and experts, as a function of the logits that it has."""
    shape, device, dtype = setting.shape, setting.device, setting.dtype
    experts = random_experts(setting, 0)
    weight_EH = torch.randn(shape.n_experts, shape.hidden, device=device, dtype=dtype)

    def of(logits_TE: Tensor) -> Callable[[], None]:
        hidden_TH = torch.randn(len(logits_TE), shape.hidden, device=device, dtype=dtype)

        @torch.no_grad()
        def layer() -> None:
            # The product takes its time; the routing is that of the logits.
            torch.nn.functional.linear(hidden_TH, weight_EH)
            weight_TK, topk_TK = logits_TE.softmax(dim=1).topk(shape.top_k, dim=1)
            experts(hidden_TH, topk_TK, weight_TK.to(dtype))

        return layer

    return of


def _targets(shape: str, row: dict[str, Any], layer_seconds: float, device: str) -> list[Target]:
    words = {"shape": shape, "method": row["name"]}
    shares = [spent / layer_seconds for spent in row["seconds"]["ours"]]
    return [
        target_of("decision_share", shares, words, at_most=_SHARE.get(device)),
        _against_listing(shape, row),
        target_of("decision_memory", [row["extra_matrices"]], words),
    ]


def _against_listing(place: str, row: dict[str, Any]) -> Target:
    """Return the time of the paper's listing over ours."""
    same = "the same pairs" if row["equal"] else "NOT the same pairs (ties fall otherwise)"
    method, seconds = row["name"], row["seconds"]
    words = {"shape": place, "method": method, "listing": _LISTINGS[method], "same": same}
    return target_of("decision_listing", ratio(seconds["paper"], seconds["ours"]), words)
