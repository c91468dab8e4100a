"""Benchmark `decision`: the routing decision alone, against the paper's listings."""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from capmoe_eval.bench.ep.layer import LayerSetting, find_shape, random_experts
from capmoe_eval.bench.ep.skew import Skew
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
from capmoe_eval.routing.assign import assign
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.groups import group_tokens
from capmoe_eval.routing.registry import create_method
from capmoe_eval.routing.scores import Assignment, Scores

# Shape suffixes: T tokens, K = top-k, E experts, L experts of a rank, S slots, H hidden size.

_LISTINGS = {"score": "Algorithm 1", "expanded_drop": "Algorithm 2"}
_SHARE = {"cpu": 0.10, "cuda": 0.03}
_GAMMA = 1.0
_PEAK = 4.0  # highest load over the mean; at most half of what E and K allow


def run(given: argparse.Namespace) -> None:
    """Time the decisions, print the ratios and write ``decision.json``."""
    if given.tokens % given.ranks:
        raise UsageError(f"tokens={given.tokens}: must be a multiple of ranks={given.ranks}")
    shapes = [find_shape(name, "shapes") for name in given.shapes]
    for shape in shapes:
        experts_per_rank(shape.n_experts, given.ranks, "ranks")
    device, dtype = placement(given)
    targets, more = measure(given, shapes, device, dtype)
    finish(given, device, targets, ("tokens", "ranks"), **more)


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
    """Skewed router logits, their scores and choice, and the tokens of each rank."""

    def __init__(self, shape: Shape, tokens: int, ranks: int, device: torch.device) -> None:
        peak = min(_PEAK, shape.n_experts / shape.top_k / 2)
        self.logits_TE = Skew(peak).logits(tokens, shape.n_experts, shape.top_k).to(device)
        score_TE = self.logits_TE.softmax(dim=1)
        self.scores = Scores(score_TE, score_TE.topk(shape.top_k, dim=1).indices)
        counted = torch.ones(ranks, tokens // ranks, dtype=torch.bool)
        self._groups = group_tokens(counted, ep_size=ranks).to(device)
        self._ranks, self._local = ranks, shape.n_experts // ranks

    def ours(self, name: str) -> Assignment:
        """Return our assignment; the listings round down."""
        method = create_method(name, _GAMMA, ep_size=self._ranks, rounding="floor")
        return assign(self.scores, method, self._groups)

    def paper(self, name: str) -> Tensor:
        """Return the final map [T, E] of the paper's listing, rank by rank."""
        local = self._local if name == "expanded_drop" else 0
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
    decisions = {"ours": problem.ours, "paper": problem.paper}
    sides = {side: partial(timed, partial(of, name), device) for side, of in decisions.items()}
    seconds = alternate(sides, rounds=rounds)
    made: list[Assignment] = []
    peak = peak_bytes(lambda: made.append(problem.ours(name)))
    (result,) = made
    score_TE = problem.scores.score_TE
    kept_TE = kept_map(result, score_TE.shape[1])
    equal = bool((kept_TE == problem.paper(name).bool()).all())
    indices = result.keep_TS.nbytes + 8 * result.keep_TS.numel()  # one order of the slots
    if result.index_TS is not problem.scores.topk_TK:
        indices += result.index_TS.nbytes
    extra = (peak - indices) / score_TE.nbytes
    return {"name": name, "seconds": seconds, "equal": equal, "extra_matrices": extra}


def _layer_seconds(setting: LayerSetting, logits_TE: Tensor, given: argparse.Namespace) -> float:
    """Return the median time of the stock layer (router and experts), for all T tokens.

    On a CPU it is timed with the tokens of one of eight parts, and that times eight: larger
    matrices are no slower per token, so the decision's share is not flattered.
    """
    shape, device, dtype = setting.shape, setting.device, setting.dtype
    n_tokens = given.layer_tokens or given.tokens // (8 if device.type == "cpu" else 1)
    n_tokens = max(1, min(n_tokens, given.tokens))
    experts = random_experts(setting, 0)
    hidden_TH = torch.randn(n_tokens, shape.hidden, device=device, dtype=dtype)
    weight_EH = torch.randn(shape.n_experts, shape.hidden, device=device, dtype=dtype)
    own_TE = logits_TE[:n_tokens]

    @torch.no_grad()
    def layer() -> None:
        # The product takes its time; the routing is the given one.
        torch.nn.functional.linear(hidden_TH, weight_EH)
        weight_TK, topk_TK = own_TE.softmax(dim=1).topk(shape.top_k, dim=1)
        experts(hidden_TH, topk_TK, weight_TK.to(dtype))

    sides = {"layer": partial(timed, layer, device)}
    spent = alternate(sides, rounds=given.layer_rounds, warmup=1)["layer"]
    total: float = Spread.of(spent).median * given.tokens / n_tokens
    return total


def _targets(shape: str, row: dict[str, Any], layer_seconds: float, device: str) -> list[Target]:
    method, ours = row["name"], row["seconds"]["ours"]
    same = "the same pairs" if row["equal"] else "NOT the same pairs (ties fall otherwise)"
    words = {"shape": shape, "method": method, "listing": _LISTINGS[method], "same": same}
    shares = [spent / layer_seconds for spent in ours]
    return [
        target_of("decision_share", shares, words, at_most=_SHARE.get(device)),
        target_of("decision_listing", ratio(row["seconds"]["paper"], ours), words),
        target_of("decision_memory", [row["extra_matrices"]], words),
    ]


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes of tensors that were alive at once while something ran.

    Storages that existed before do not count. What a kernel needs beside its outputs, such as a
    sort's own buffer, is not seen.
    """
    with _LiveBytes() as live:
        work()
    peak: int = live.peak
    return peak


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages that are allocated inside the block, on any device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[int, int] = {}  # bytes of each

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note the storages that are new."""
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in self._alive.keys() | given:
                self._alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


def _storages(values: object) -> list[torch.UntypedStorage]:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [leaf.untyped_storage() for leaf in leaves]
