"""Benchmark `decision`: the routing decision alone, against the paper's listings."""

from __future__ import annotations

import argparse
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

from capmoe_bench.ep.layer import LayerSetting, decided, find_shape, layer_weights
from capmoe_bench.ep.skew import skewed_logits
from capmoe_bench.rounds import alternate, device_and_dtype, dtype_name, finish, ratio, say, timed
from capmoe_bench.timings import Spread, Target

# Shape suffixes: T tokens, K = top-k, E experts, L experts of a rank, S slots, H hidden size.

_LISTINGS = {"score": "Algorithm 1", "expanded_drop": "Algorithm 2"}
_SHARE = {"cpu": 0.10, "cuda": 0.03}
_GAMMA = 1.0
_LAYER_ROUNDS = 3
_PEAK = 4.0  # highest load over the mean; at most half of what E and K allow


def run(arguments: argparse.Namespace) -> None:
    """Time the decisions, print the ratios and write ``decision.json``."""
    if arguments.tokens % arguments.ranks:
        raise UsageError(
            f"tokens={arguments.tokens}: must be a multiple of ranks={arguments.ranks}"
        )
    device, dtype = device_and_dtype(arguments)
    shapes = [find_shape(name, "shapes") for name in arguments.shapes]
    settings = [LayerSetting(shape, 1, device, dtype) for shape in shapes]
    for shape in shapes:
        experts_per_rank(shape.n_experts, arguments.ranks, "ranks")
    targets, more = measure(arguments, settings)
    finish(arguments, device, targets, ("tokens", "ranks"), **more)


def measure(
    arguments: argparse.Namespace, settings: Sequence[LayerSetting]
) -> tuple[list[Target], dict[str, Any]]:
    """Return the targets of every layer, and what else was measured."""
    targets: list[Target] = []
    details = []
    for setting in settings:
        shape, device = setting.shape, setting.device
        say(f"decision: {shape.name}")
        peak = min(_PEAK, shape.n_experts / shape.top_k / 2)
        logits_TE = skewed_logits(peak, arguments.tokens, shape.n_experts, shape.top_k).to(device)
        layer = _layer_seconds(setting, logits_TE)
        for name, listing in _LISTINGS.items():
            decisions = sides(name, logits_TE, shape.top_k, arguments.ranks)
            timers = {side: partial(timed, work, device) for side, work in decisions.items()}
            seconds = alternate(timers, rounds=arguments.rounds)
            kept_TE = kept_map(decisions["ours"](), shape.n_experts)
            equal = bool((kept_TE == decisions["paper"]().bool()).all())
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
            ]
            about = {"shape": shape.name, "name": name, "equal": equal, "layer_seconds": layer}
            details.append({**about, "seconds": seconds})
    return targets, {"details": details, "dtype": dtype_name(settings[0].dtype)}


def sides(name: str, logits_TE: Tensor, top_k: int, ranks: int) -> dict[str, Callable[[], Any]]:
    """Return our decision, an :class:`Assignment`, and the listing's final map [T, E].

    Both begin with the scores and the top-k of a router and go rank by rank. The listings round
    down.
    """
    n_tokens, n_experts = logits_TE.shape
    score_TE = logits_TE.softmax(dim=1)
    topk_TK = score_TE.topk(top_k, dim=1).indices
    counted = torch.ones(ranks, n_tokens // ranks, dtype=torch.bool)
    groups = group_tokens(counted, ep_size=ranks).to(logits_TE.device)
    method = create_method(name, _GAMMA, ep_size=ranks, rounding="floor")
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


def _layer_seconds(setting: LayerSetting, logits_TE: Tensor) -> float:
    """Return the median time of the stock layer (router and experts), for all T tokens.

    On a CPU it is timed with the tokens of one of eight parts, and that times eight: larger
    matrices are no slower per token, so the decision's share is not flattered.
    """
    shape, device, dtype = setting.shape, setting.device, setting.dtype
    n_tokens = max(1, len(logits_TE) // (8 if device.type == "cpu" else 1))
    ((experts, _),) = layer_weights(setting, (0,))
    weight_EH = torch.randn(shape.n_experts, shape.hidden, device=device, dtype=dtype)
    hidden_TH = torch.randn(n_tokens, shape.hidden, device=device, dtype=dtype)

    @torch.no_grad()
    def layer() -> None:
        # The product takes its time; the routing is that of the logits.
        torch.nn.functional.linear(hidden_TH, weight_EH)
        weight_TK, topk_TK = logits_TE[:n_tokens].softmax(dim=1).topk(shape.top_k, dim=1)
        experts(hidden_TH, topk_TK, weight_TK.to(dtype))

    timers = {"layer": partial(timed, layer, device)}
    spent = alternate(timers, rounds=_LAYER_ROUNDS, warmup=1)["layer"]
    total: float = Spread.of(spent).median * len(logits_TE) / n_tokens
    return total
