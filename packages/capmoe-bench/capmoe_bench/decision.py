"""Benchmark `decision`: the routing decision alone, against the paper's listings."""

import argparse
import itertools
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.decision import Assignment, Scores, group_tokens
from capmoe_eval.routing.methods.expanded_drop import ExpandedDrop
from capmoe_eval.routing.registry import create_method
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from capmoe_bench.ep.layer import LayerSetting, decided, find_shape, layer_weights
from capmoe_bench.ep.skew import skewed_logits
from capmoe_bench.rounds import alternate, device_and_dtype, dtype_name, finish, ratio, say, timed
from capmoe_bench.timings import Spread, Target

# Shape suffixes: T tokens, K = top-k, E experts, L experts of a rank, S slots, H hidden size.

_LISTINGS = {"score": "Algorithm 1", "expanded_drop": "Algorithm 2"}
_SHARE = {"cpu": 0.10, "cuda": 0.03}
_GAMMA = 1.0
_PEAK = 4.0  # highest load over the mean; at most half of what E and K allow
_CALLS, _MEASURABLE = 20, 0.005  # most calls of a step's decision or layer at a time; seconds


def run(arguments: argparse.Namespace) -> None:
    """Time the decisions, print the ratios and write ``decision.json``."""
    if arguments.tokens % arguments.ranks:
        raise UsageError(
            f"tokens={arguments.tokens}: must be a multiple of ranks={arguments.ranks}"
        )
    device, dtype = device_and_dtype(arguments)
    settings, of_steps = (
        [
            LayerSetting(find_shape(name, option), 1, device, dtype)
            for name in getattr(arguments, option)
        ]
        for option in ("shapes", "step_shapes")
    )
    for setting in settings:
        experts_per_rank(setting.shape.n_experts, arguments.ranks, "ranks")
    targets, more = measure(arguments, settings)
    step_targets, more["steps"] = measure_steps(arguments, of_steps)
    finish(arguments, device, targets + step_targets, ("tokens", "ranks"), **more)


def measure(
    arguments: argparse.Namespace, settings: Sequence[LayerSetting]
) -> tuple[list[Target], dict[str, Any]]:
    """Return the targets of every layer, and what else was measured."""
    targets: list[Target] = []
    details = []
    for setting in settings:
        shape, device = setting.shape, setting.device
        say(f"decision: {shape.name}")
        logits_TE = _logits(setting, arguments.tokens)
        layer = _layer_seconds(setting, logits_TE, arguments)
        for name, listing in _LISTINGS.items():
            decisions = sides(name, logits_TE, shape.top_k, arguments.ranks)
            timers = {side: partial(timed, work, device) for side, work in decisions.items()}
            seconds = alternate(timers, rounds=arguments.rounds)
            assignment = decisions["ours"]()
            kept_TE = kept_map(assignment, shape.n_experts)
            equal = bool((kept_TE == decisions["paper"]().bool()).all())
            needed = assignment.keep_TS.nbytes
            needed += assignment.index_TS.nbytes  # one order of the slots
            if assignment.index_TS.shape[1] > shape.top_k:  # otherwise the result has the input's
                needed += assignment.index_TS.nbytes
            # In score matrices [T, E] of float32.
            extra = (peak_bytes(decisions["ours"], device) - needed) / logits_TE.nbytes
            same = "the same pairs" if equal else "NOT the same pairs (ties fall otherwise)"
            targets += [
                Target.of(
                    f"{shape.name}: {name} of the layer's time",
                    "Time of the decision over that of the stock layer",
                    [spent / layer for spent in seconds["ours"]],
                    at_most=_SHARE.get(device.type),
                    unit="share",
                ),
                Target.of(
                    f"{shape.name}: {name} against {listing}",
                    f"Time of the paper's {listing}, rank by rank, over ours; {same} are kept",
                    ratio(seconds["paper"], seconds["ours"]),
                    at_least=1.5,
                ),
                Target.of(
                    f"{shape.name}: {name}, extra memory",
                    "Peak of live tensors beyond inputs, result and one index per slot, in score "
                    "matrices",
                    [extra],
                    at_most=2.0,
                ),
            ]
            about = {"shape": shape.name, "name": name, "equal": equal, "layer_seconds": layer}
            details.append({**about, "seconds": seconds, "extra_matrices": extra})
    return targets, {"details": details, "dtype": dtype_name(settings[0].dtype)}


def measure_steps(
    arguments: argparse.Namespace, settings: Sequence[LayerSetting]
) -> tuple[list[Target], list[dict[str, Any]]]:
    """Return the decision's share of the layer's time in steps of few tokens, and the seconds.

    Decision and layer are timed in turn, each as the mean of some calls.
    """
    targets: list[Target] = []
    rows: list[dict[str, Any]] = []
    for setting, tokens in itertools.product(settings, arguments.step_tokens):
        shape = setting.shape
        say(f"decision: {shape.name}, a step of {tokens}")
        logits_TE = _logits(setting, tokens)
        works = {
            name: sides(name, logits_TE, shape.top_k, arguments.ranks, rounding="ceil")["ours"]
            for name in _LISTINGS
        }
        works["layer"] = _layer(setting, logits_TE)
        timers = {side: partial(_mean, work, setting.device) for side, work in works.items()}
        seconds = alternate(timers, rounds=arguments.rounds)
        targets += [
            Target.of(
                f"{shape.name}, step of {tokens}: {name} of the layer",
                f"Time of the decision on a step of {tokens} tokens over that of the stock layer",
                ratio(seconds[name], seconds["layer"]),
                at_most=0.1,
                unit="share",
            )
            for name in _LISTINGS
        ]
        rows.append({"shape": shape.name, "tokens": tokens, "seconds": seconds})
    return targets, rows


def _mean(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, as the mean of as many as make a time that can be measured."""
    calls = max(1, min(_CALLS, int(_MEASURABLE / timed(work, device))))

    def repeated() -> None:
        for _ in range(calls):
            work()

    return timed(repeated, device) / calls


def _logits(setting: LayerSetting, tokens: int) -> Tensor:
    """Return skewed router logits [T, E] of a layer."""
    shape = setting.shape
    peak = min(_PEAK, shape.n_experts / shape.top_k / 2)
    return skewed_logits(peak, tokens, shape.n_experts, shape.top_k).to(setting.device)


def sides(
    name: str, logits_TE: Tensor, top_k: int, ranks: int, rounding: str = "floor"
) -> dict[str, Callable[[], Any]]:
    """Return our decision, an :class:`Assignment`, and the listing's final map [T, E].

    Both begin with the scores and the top-k of a router and go rank by rank. The listings round
    down. Tokens that the ranks do not share evenly are sequences of one token, as in a decode step.
    """
    n_tokens, n_experts = logits_TE.shape
    score_TE = logits_TE.softmax(dim=1)
    topk_TK = score_TE.topk(top_k, dim=1).indices
    sequences = n_tokens if n_tokens % ranks else ranks
    counted = torch.ones(sequences, n_tokens // sequences, dtype=torch.bool)
    groups = group_tokens(counted, ep_size=ranks).to(logits_TE.device)
    method = create_method(name, _GAMMA, ep_size=ranks, rounding=rounding)
    local = n_experts // ranks if isinstance(method, ExpandedDrop) else 0

    def paper() -> Tensor:
        tokens = zip(score_TE.chunk(ranks), topk_TK.chunk(ranks), strict=True)
        return torch.cat(
            [
                paper_map(*of_rank, range(rank * local, (rank + 1) * local))
                for rank, of_rank in enumerate(tokens)
            ]
        )

    return {"ours": partial(decided, method, Scores(score_TE, topk_TK), groups), "paper": paper}


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


def _layer_seconds(
    setting: LayerSetting, logits_TE: Tensor, arguments: argparse.Namespace
) -> float:
    """Return the median time of the stock layer (router and experts), for all T tokens.

    On a CPU it is timed with the tokens of one of eight parts, and that times eight: larger
    matrices are no slower per token, so the decision's share is not flattered.
    """
    device = setting.device
    n_tokens = arguments.layer_tokens or arguments.tokens // (8 if device.type == "cpu" else 1)
    n_tokens = max(1, min(n_tokens, arguments.tokens))
    timers = {"layer": partial(timed, _layer(setting, logits_TE[:n_tokens]), device)}
    spent = alternate(timers, rounds=arguments.layer_rounds, warmup=1)["layer"]
    total: float = Spread.of(spent).median * arguments.tokens / n_tokens
    return total


def _layer(setting: LayerSetting, logits_TE: Tensor) -> Callable[[], None]:
    """Return the stock layer, router and experts, of tokens with some router logits."""
    shape, device, dtype = setting.shape, setting.device, setting.dtype
    ((experts, _),) = layer_weights(setting, (0,))
    weight_EH = torch.randn(shape.n_experts, shape.hidden, device=device, dtype=dtype)
    hidden_TH = torch.randn(len(logits_TE), shape.hidden, device=device, dtype=dtype)

    @torch.no_grad()
    def layer() -> None:
        # The product takes its time; the routing is that of the logits.
        torch.nn.functional.linear(hidden_TH, weight_EH)
        weight_TK, topk_TK = logits_TE.softmax(dim=1).topk(shape.top_k, dim=1)
        experts(hidden_TH, topk_TK, weight_TK.to(dtype))

    return layer


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes of tensors that were alive at once while something ran.

    Storages that existed before do not count. What a kernel needs beside its outputs, such as a
    sort's own buffer, is not seen. On a CPU, the most bytes of NumPy arrays and Python objects in
    another run are added; the two peaks may differ in time.
    """
    with _LiveBytes() as live:
        work()
    peak: int = live.peak
    if device.type == "cpu":
        tracemalloc.start()
        work()
        peak += tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages that are allocated inside the block, on any device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive = weakref.WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note the storages that are new."""
        result = func(*args, **(kwargs or {}))
        self._alive |= _storages(result) - _storages((args, kwargs))
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._alive))
        return result


def _storages(values: object) -> set[torch.UntypedStorage]:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return {leaf.untyped_storage() for leaf in leaves}
