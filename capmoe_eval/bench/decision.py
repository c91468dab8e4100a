"""The routing decision alone: its share of a layer's time, the paper's listings, its memory.

It is what a capacity adds to a router: from gate scores and top-k to the kept pairs.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from capmoe_eval.bench.alternate import alternate, ratio, timed
from capmoe_eval.bench.device import add_where, device_of, dtype_name, dtype_of, machine, say
from capmoe_eval.bench.target import finish
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.arguments import COUNT
from capmoe_eval.experiment.timings.quartiles import Spread
from capmoe_eval.experiment.timings.targets import Target
from capmoe_eval.routing.method import Method

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from capmoe_eval.bench.ep.layer import LayerShape
    from capmoe_eval.routing.assign import Assignment, Scores
    from capmoe_eval.routing.capacity import TokenGroups

_SHAPES = ("olmoe", "qwen3_30b", "mixtral")  # E=64 K=8, E=128 K=8, E=8 K=2
_SHARE = {"cpu": 0.10, "cuda": 0.03}
_MATRICES = 2.0
_PEAK = 4.0  # highest load over the mean; at most half of what E and K allow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("--tokens", type=COUNT, default=16_384, help="tokens T of the batch")
    add("--ranks", type=COUNT, default=8, help="ranks R, each with its own capacity")
    add("--shapes", nargs="+", default=list(_SHAPES), help="sizes of the MoE layers")
    add("--layer-tokens", type=COUNT, help="tokens that the layer is timed with (CPU: T/8, else T)")
    add("--rounds", type=COUNT, default=11)
    add("--layer-rounds", type=COUNT, default=3)
    add_where(parser)


def run(given: argparse.Namespace) -> int:
    """Time the decisions, print the ratios and write ``decision.json``.

    Raises:
        UsageError: For a value that cannot be.
    """
    if given.tokens % given.ranks:
        raise UsageError(f"tokens={given.tokens}: must be a multiple of ranks={given.ranks}")
    from capmoe_eval.bench.ep.clock import Clock
    from capmoe_eval.bench.ep.layer import find_shape
    from capmoe_eval.routing.capacity import experts_per_rank

    shapes = {name: find_shape(name, "shapes") for name in given.shapes}
    for shape in shapes.values():
        experts_per_rank(shape.n_experts, given.ranks)
    device = device_of(given.device)
    dtype = dtype_of(given.dtype, device)
    targets: list[Target] = []
    details = []
    for name, shape in shapes.items():
        say(f"decision: {name}")
        problem = _Problem.of(shape, given.tokens, given.ranks, device)
        layer = _layer_seconds(shape, problem, given, device, dtype)
        for decision in _DECISIONS:
            row = _measure(decision, problem, given.rounds, Clock(device).wait)
            targets += _targets(name, decision, row, layer, device.type)
            details.append({"shape": name, **dataclasses.asdict(row), "layer_seconds": layer})
    return finish(
        "decision",
        targets,
        machine(device),
        out=given.out,
        tokens=given.tokens,
        ranks=given.ranks,
        details=details,
        dtype=dtype_name(dtype),
    )


@dataclass(frozen=True)
class _Problem:
    """What a decision starts from.

    Attributes:
        logits_TE: Of the router, skewed.
        scores: Its scores and its choice.
        groups: The tokens of each rank.
        ranks: Ranks R.
    """

    logits_TE: Tensor
    scores: Scores
    groups: TokenGroups
    ranks: int

    @classmethod
    def of(cls, shape: LayerShape, tokens: int, ranks: int, device: torch.device) -> _Problem:
        import torch

        from capmoe_eval.bench.ep.skew import skewed_logits
        from capmoe_eval.routing.assign import Scores
        from capmoe_eval.routing.capacity import group_tokens

        peak = min(_PEAK, shape.n_experts / shape.top_k / 2)
        logits_TE = skewed_logits(tokens, shape.n_experts, shape.top_k, peak).to(device)
        score_TE = logits_TE.softmax(dim=1)
        counted = torch.ones(ranks, tokens // ranks, dtype=torch.bool)
        return cls(
            logits_TE,
            Scores(score_TE, score_TE.topk(shape.top_k, dim=1).indices),
            group_tokens(counted, ep_size=ranks).to(device),
            ranks,
        )

    def per_rank(self) -> list[tuple[Tensor, Tensor]]:
        """Return scores and choice of each rank's tokens."""
        scores = self.scores
        return list(
            zip(scores.score_TE.chunk(self.ranks), scores.topk_TK.chunk(self.ranks), strict=True)
        )


@dataclass(frozen=True)
class _Decision:
    """A decision, ours and the paper's.

    Attributes:
        name: As tables call it.
        listing: The algorithm of the paper.
        ours: Returns our assignment.
        paper: Returns the final map [T, E] of the paper's listing, rank by rank.
    """

    name: str
    listing: str
    ours: Callable[[_Problem], Assignment]
    paper: Callable[[_Problem], Tensor]


def _assign(name: str) -> Callable[[_Problem], Assignment]:
    def ours(problem: _Problem) -> Assignment:
        from capmoe_eval.routing.assign import assign

        # The listings round down.
        method = Method(name, 1.0, ep_size=problem.ranks, rounding="floor")
        return assign(problem.scores, method, problem.groups)

    return ours


def _listed_token_drop(problem: _Problem) -> Tensor:
    import torch

    from capmoe_eval.bench.listings import token_drop

    return torch.cat([token_drop(scores, topk, 1.0) for scores, topk in problem.per_rank()])


def _listed_expanded_drop(problem: _Problem) -> Tensor:
    import torch

    from capmoe_eval.bench.listings import expanded_drop

    local = problem.scores.score_TE.shape[1] // problem.ranks
    return torch.cat(
        [
            expanded_drop(scores, topk, 1.0, list(range(rank * local, (rank + 1) * local)))
            for rank, (scores, topk) in enumerate(problem.per_rank())
        ]
    )


_DECISIONS = (
    _Decision("score", "Algorithm 1", _assign("score"), _listed_token_drop),
    _Decision("expanded_drop", "Algorithm 2", _assign("expanded_drop"), _listed_expanded_drop),
)


@dataclass(frozen=True)
class _Row:
    """What was measured of one decision.

    Attributes:
        name: Of the decision.
        seconds: Of both sides, round by round.
        equal: Whether both keep the same pairs.
        extra_matrices: The most memory beyond inputs, result and one index per slot, in score
            matrices [T, E] of float32.
    """

    name: str
    seconds: dict[str, list[float]]
    equal: bool
    extra_matrices: float


def _measure(decision: _Decision, problem: _Problem, rounds: int, wait: Callable[[], None]) -> _Row:
    seconds = alternate(
        {
            "ours": lambda: timed(lambda: decision.ours(problem), wait),
            "paper": lambda: timed(lambda: decision.paper(problem), wait),
        },
        rounds=rounds,
    )
    kept_TE = _kept(decision.ours(problem), problem.scores.score_TE.shape[1])
    equal = bool((kept_TE == decision.paper(problem).bool()).all())
    return _Row(decision.name, seconds, equal, _extra_matrices(decision, problem))


def _kept(assignment: Assignment, n_experts: int) -> Tensor:
    """Return an assignment as a map [T, E]."""
    shape = (len(assignment.index_TS), n_experts)
    kept_TE = assignment.keep_TS.new_zeros(shape)
    # A slot that stands for no pair may name an expert that another slot keeps.
    return kept_TE.scatter_reduce(1, assignment.index_TS, assignment.keep_TS, "amax")


def _extra_matrices(decision: _Decision, problem: _Problem) -> float:
    from capmoe_eval.bench.live import peak_bytes

    made: list[Assignment] = []
    peak = peak_bytes(lambda: made.append(decision.ours(problem)))
    (result,) = made
    indices = result.keep_TS.nbytes + 8 * result.keep_TS.numel()  # one order of the slots
    if result.index_TS is not problem.scores.topk_TK:
        indices += result.index_TS.nbytes
    return (peak - indices) / problem.scores.score_TE.nbytes


def _layer_seconds(
    shape: LayerShape,
    problem: _Problem,
    given: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """Return the median time of the stock layer (router and experts), for all T tokens.

    On a CPU it is timed with the tokens of one of eight parts, and that times eight: larger
    matrices are no slower per token, so the decision's share is not flattered.
    """
    import torch

    from capmoe_eval.bench.ep.clock import Clock
    from capmoe_eval.bench.ep.layer import LayerSetting, random_experts

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

    sides = {"layer": lambda: timed(layer, Clock(device).wait)}
    spent = alternate(sides, rounds=given.layer_rounds, warmup=1)["layer"]
    total: float = Spread.of(spent).median * given.tokens / n_tokens
    return total


def _targets(
    shape: str, decision: _Decision, row: _Row, layer_seconds: float, device: str
) -> list[Target]:
    ours = row.seconds["ours"]
    same = "the same pairs" if row.equal else "NOT the same pairs (ties fall otherwise)"
    return [
        Target(
            f"{shape}: {row.name} of the layer's time",
            "Time of the decision over that of the stock layer",
            Spread.of([spent / layer_seconds for spent in ours]),
            _SHARE.get(device),
            at_least=False,
            unit="share",
        ),
        Target(
            f"{shape}: {row.name} against {decision.listing}",
            f"Time of the paper's {decision.listing}, rank by rank, over ours; {same} are kept",
            ratio(row.seconds["paper"], ours),
            1.0,
        ),
        Target(
            f"{shape}: {row.name}, extra memory",
            "Peak of live tensors beyond inputs, result and one index per slot, in score matrices",
            Spread.of([row.extra_matrices]),
            _MATRICES,
            at_least=False,
        ),
    ]
