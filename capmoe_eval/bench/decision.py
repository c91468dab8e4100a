"""Benchmark `decision`: the routing decision alone."""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from capmoe_eval.bench.alternate import alternate, finish, ratio, timed
from capmoe_eval.bench.device import device_of, dtype_name, dtype_of, say
from capmoe_eval.bench.ep.clock import Clock
from capmoe_eval.bench.ep.layer import LayerSetting, find_shape, random_experts
from capmoe_eval.bench.ep.skew import skewed_logits
from capmoe_eval.bench.listings import expanded_drop, token_drop
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.timings.schema import Shape
from capmoe_eval.experiment.timings.spread import Spread, Target
from capmoe_eval.routing.assign import Assignment, Scores, assign
from capmoe_eval.routing.capacity import TokenGroups, experts_per_rank, group_tokens
from capmoe_eval.routing.method import Method

_LISTINGS = {"score": "Algorithm 1", "expanded_drop": "Algorithm 2"}
_SHARE = {"cpu": 0.10, "cuda": 0.03}
_MATRICES = 2.0
_PEAK = 4.0  # highest load over the mean; at most half of what E and K allow


def run(given: argparse.Namespace) -> None:
    """Time the decisions, print the ratios and write ``decision.json``.

    Raises:
        UsageError: For a value that cannot be.
    """
    if given.tokens % given.ranks:
        raise UsageError(f"tokens={given.tokens}: must be a multiple of ranks={given.ranks}")
    shapes = [find_shape(name, "shapes") for name in given.shapes]
    for shape in shapes:
        experts_per_rank(shape.n_experts, given.ranks)
    device = device_of(given.device)
    dtype = dtype_of(given.dtype, device)
    targets: list[Target] = []
    details = []
    for shape in shapes:
        say(f"decision: {shape.name}")
        problem = _problem(shape, given.tokens, given.ranks, device)
        layer = _layer_seconds(shape, problem, given, device, dtype)
        for name in _LISTINGS:
            row = _measure(name, problem, given.rounds, device)
            targets += _targets(shape.name, row, layer, device.type)
            details.append({"shape": shape.name, **row, "layer_seconds": layer})
    more = {"details": details, "dtype": dtype_name(dtype)}
    finish(given, device, targets, ("tokens", "ranks"), **more)


@dataclass(frozen=True)
class _Problem:
    """Skewed router logits, their scores and choice, and the tokens of each rank."""

    logits_TE: Tensor
    scores: Scores
    groups: TokenGroups
    ranks: int

    def ours(self, name: str) -> Assignment:
        """Return our assignment; the listings round down."""
        method = Method(name, 1.0, ep_size=self.ranks, rounding="floor")
        return assign(self.scores, method, self.groups)

    def paper(self, name: str) -> Tensor:
        """Return the final map [T, E] of the paper's listing, rank by rank."""
        score_TE, topk_TK = self.scores.score_TE, self.scores.topk_TK
        local = score_TE.shape[1] // self.ranks
        maps = []
        chunks = zip(score_TE.chunk(self.ranks), topk_TK.chunk(self.ranks), strict=True)
        for rank, own in enumerate(chunks):
            if name == "score":
                maps.append(token_drop(*own, 1.0))
            else:
                maps.append(expanded_drop(*own, 1.0, [*range(rank * local, (rank + 1) * local)]))
        return torch.cat(maps)


def _problem(shape: Shape, tokens: int, ranks: int, device: torch.device) -> _Problem:
    peak = min(_PEAK, shape.n_experts / shape.top_k / 2)
    logits_TE = skewed_logits(tokens, shape.n_experts, shape.top_k, peak).to(device)
    score_TE = logits_TE.softmax(dim=1)
    counted = torch.ones(ranks, tokens // ranks, dtype=torch.bool)
    return _Problem(
        logits_TE,
        Scores(score_TE, score_TE.topk(shape.top_k, dim=1).indices),
        group_tokens(counted, ep_size=ranks).to(device),
        ranks,
    )


def _measure(name: str, problem: _Problem, rounds: int, device: torch.device) -> dict[str, Any]:
    """Return the seconds of both sides, whether they keep the same pairs, and the most memory.

    That is memory beyond inputs, result and one index per slot, in score matrices [T, E] of
    float32.
    """
    decisions = {"ours": problem.ours, "paper": problem.paper}
    wait = Clock(device).wait
    sides = {side: partial(timed, partial(of, name), wait) for side, of in decisions.items()}
    seconds = alternate(sides, rounds=rounds)
    made: list[Assignment] = []
    peak = peak_bytes(lambda: made.append(problem.ours(name)))
    (result,) = made
    score_TE = problem.scores.score_TE
    # A slot that stands for no pair may name an expert that another slot keeps.
    kept_TE = result.keep_TS.new_zeros(score_TE.shape)
    kept_TE = kept_TE.scatter_reduce(1, result.index_TS, result.keep_TS, "amax")
    equal = bool((kept_TE == problem.paper(name).bool()).all())
    indices = result.keep_TS.nbytes + 8 * result.keep_TS.numel()  # one order of the slots
    if result.index_TS is not problem.scores.topk_TK:
        indices += result.index_TS.nbytes
    extra = (peak - indices) / score_TE.nbytes
    return {"name": name, "seconds": seconds, "equal": equal, "extra_matrices": extra}


def _layer_seconds(
    shape: Shape,
    problem: _Problem,
    given: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """Return the median time of the stock layer (router and experts), for all T tokens.

    On a CPU it is timed with the tokens of one of eight parts, and that times eight: larger
    matrices are no slower per token, so the decision's share is not flattered.
    """
    n_tokens = given.layer_tokens or given.tokens // (8 if device.type == "cpu" else 1)
    n_tokens = max(1, min(n_tokens, given.tokens))
    experts = random_experts(LayerSetting(shape, 1, device, dtype), 0)
    hidden_TH = torch.randn(n_tokens, shape.hidden, device=device, dtype=dtype)
    weight_EH = torch.randn(shape.n_experts, shape.hidden, device=device, dtype=dtype)
    logits_TE = problem.logits_TE[:n_tokens]

    @torch.no_grad()
    def layer() -> None:
        # The product takes its time; the routing is the given one.
        torch.nn.functional.linear(hidden_TH, weight_EH)
        weight_TK, topk_TK = logits_TE.softmax(dim=1).topk(shape.top_k, dim=1)
        experts(hidden_TH, topk_TK, weight_TK.to(dtype))

    sides = {"layer": partial(timed, layer, Clock(device).wait)}
    spent = alternate(sides, rounds=given.layer_rounds, warmup=1)["layer"]
    total: float = Spread.of(spent).median * given.tokens / n_tokens
    return total


def _targets(shape: str, row: dict[str, Any], layer_seconds: float, device: str) -> list[Target]:
    name, ours = row["name"], row["seconds"]["ours"]
    listing = _LISTINGS[name]
    same = "the same pairs" if row["equal"] else "NOT the same pairs (ties fall otherwise)"
    return [
        Target(
            f"{shape}: {name} of the layer's time",
            "Time of the decision over that of the stock layer",
            Spread.of([spent / layer_seconds for spent in ours]),
            _SHARE.get(device),
            at_least=False,
            unit="share",
        ),
        Target(
            f"{shape}: {name} against {listing}",
            f"Time of the paper's {listing}, rank by rank, over ours; {same} are kept",
            ratio(row["seconds"]["paper"], ours),
            1.0,
        ),
        Target(
            f"{shape}: {name}, extra memory",
            "Peak of live tensors beyond inputs, result and one index per slot, in score matrices",
            Spread.of([row["extra_matrices"]]),
            _MATRICES,
            at_least=False,
        ),
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
        self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and note the storages that are new."""
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in self._known | given:
                self._follow(storage)
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


def _storages(values: object) -> list[torch.UntypedStorage]:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [leaf.untyped_storage() for leaf in leaves]
