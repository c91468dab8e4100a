"""Every family: equal to stock where it must be, changed where it must, by more than rounding.

The released code of commit 606dc1d, by loops, gives what the knobs that reproduce it give.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from capmoe_eval.experiment.composition import config_directory
from capmoe_eval.routing.registry import create_method, method_names
from capmoe_eval.wrapper.kernel import KERNEL_TOLERANCE
from capmoe_eval.wrapper.layers import find_moe_layers
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import EVERY, PAPER_FAMILIES, batch, logits, make, similarities

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(pytest.param(*param.values, "score", marks=param.marks) for param in EVERY),
        *(("olmoe", method) for method in ("baseline", "order", "random", "token_reroute")),
        # Their decisions read groups and biases of the router.
        *((name, "token_reroute") for name in ("deepseek_v2_groups", "deepseek_v3")),
    ],
)
def test_without_a_binding_capacity_the_logits_are_the_stock_models(name: str, method: str) -> None:
    model = make(name)
    mask = torch.ones(4, 12, dtype=torch.long)
    mask[1, 7:] = 0
    for gamma, call in itertools.product((math.inf, 100.0), ({}, {"attention_mask": mask})):
        before = logits(model, **call)
        under = create_method(method, gamma)
        with capacity_aware(model, under, verify=gamma == math.inf) as meter:
            assert torch.equal(before, logits(model, **call)), "of pads, too"
        assert meter.summary()["dropped"] == 0
        is_proven = True if gamma == math.inf else None
        assert meter.proofs()["stock_at_infinity"]["passed"] is is_proven


# Those of MACS and LASER, which need other inputs, are in packages/capmoe-methods.
APART = ("baseline", "macs", "laser")


@pytest.mark.parametrize("method", [name for name in method_names() if name not in APART])
@pytest.mark.parametrize("name", PAPER_FAMILIES)
def test_every_method_changes_the_logits_and_restores_the_model(name: str, method: str) -> None:
    """The test that fails if the intervention does nothing."""
    model, tokens = make(name), batch()
    if method in ("oea", "xshare", "sere"):  # more tokens activate every expert of so small a model
        tokens = tokens[:1, :2]
    before = logits(model, tokens)
    knobs: dict[str, Any] = {"calibrated": similarities(model)} if method == "sere" else {}
    under = create_method(method, 0.5, expert_budget=0.25)
    with capacity_aware(model, under, **knobs) as meter:
        assert not torch.allclose(before, logits(model, tokens), atol=1e-3)
    assert meter.summary()["dropped"] > 0
    # The k0 best of two tokens may exceed the budget; under Expert Drop no load has a bound, and
    # only capacities of pairs are filled.
    open_proofs = {
        "best_kept",
        "slots_filled",
        *(["overload_drops"] if method == "expert_drop" else []),
    }
    failed = {name for name, proof in meter.proofs().items() if not proof["passed"]}
    assert failed <= open_proofs
    assert torch.equal(before, logits(model, tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EVERY)
def test_half_precision_works(name: str, dtype: torch.dtype) -> None:
    model = make(name)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if "router" in part or part.endswith("gate.weight"):
                parameter.mul_(0.3)  # no weight too small for half precision
    model.to(dtype)
    before = logits(model)
    for implementation in ("batched_mm", "eager", "grouped_mm"):
        model.set_experts_implementation(implementation)
        with capacity_aware(model, "expanded_drop", gamma=1.0, ep_size=2) as meter:
            inside = logits(model)
        proof = meter.proofs()["kernel_agrees"]
        assert proof["deviation"] <= proof["tolerance"] == KERNEL_TOLERANCE[dtype]
        assert inside.dtype == dtype
        assert bool(inside.isfinite().all())
        assert not torch.equal(before, inside)
    assert meter.summary()["added"] > 0


# The released code.


GAMMA = 0.75
# One family normalises its weights, two do not, and one has a shared expert.
RELEASED = ("olmoe", "qwen2_moe", "qwen3_moe", "mixtral")
Slots = list[list[tuple[int, float]]]


def preset() -> dict[str, Any]:
    """Return the knobs of the variant."""
    path = config_directory() / "variant" / "released_code_606dc1d.yaml"
    knobs = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(knobs, dict)
    return {str(knob): value for knob, value in knobs.items()}


def later_release(score: list[list[float]], top_k: int, gamma: float, candidates: int) -> Slots:
    """Return the expert and the weight of each of a token's K slots.

    Every expert keeps its C best candidates, and every token the K best of what it has then. A slot
    that is left over is expert 0 with weight 0; the others' weights are their share of the scores.
    """
    n_tokens, n_experts = len(score), len(score[0])
    capacity = max(1, math.ceil(gamma * top_k * (n_tokens / n_experts)))
    pool = [sorted(range(n_experts), key=lambda e: -row[e])[:candidates] for row in score]
    taken: set[tuple[int, int]] = set()
    for expert in range(n_experts):
        tokens = [token for token in range(n_tokens) if expert in pool[token]]
        tokens.sort(key=lambda token: -score[token][expert])
        taken |= {(token, expert) for token in tokens[:capacity]}
    slots = []
    for token, row in enumerate(score):
        kept = [expert for expert in pool[token] if (token, expert) in taken][:top_k]
        total = sum(row[expert] for expert in kept)
        weighted = [(expert, row[expert] / total) for expert in kept]
        slots.append(weighted + [(0, 0.0)] * (top_k - len(kept)))
    return slots


@contextmanager
def released(model: nn.Module, gamma: float, candidates: int) -> Iterator[list[Slots]]:
    """Let the routers of a model answer as the later release does; yield what they said."""
    messages: list[Slots] = []

    def answer(router: Any, _args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits_TE, weight_TK, topk_TK = output
        score = logits_TE.softmax(dim=-1, dtype=torch.float32).tolist()
        slots = later_release(score, topk_TK.shape[1], gamma, candidates)
        messages.append(slots)
        index_TK = torch.tensor([[expert for expert, _ in row] for row in slots])
        share_TK = torch.tensor([[weight for _, weight in row] for row in slots])
        return logits_TE, share_TK.to(weight_TK.dtype), index_TK

    hooks = [layer.router.register_forward_hook(answer) for layer in find_moe_layers(model)]
    try:
        yield messages
    finally:
        for hook in hooks:
            hook.remove()


def close(each: Tensor, other: Tensor) -> bool:
    return torch.allclose(each, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", RELEASED)
@pytest.mark.parametrize("method", ["score", "expanded_drop"])
def test_the_variant_gives_the_logits_of_the_release(family: str, method: str) -> None:
    """Dropped slots at expert 0 with weight 0 change no output; they are not in our loads."""
    model = make(family)
    top_k = find_moe_layers(model)[0].top_k
    m = 2 if method == "expanded_drop" else 0
    knobs = preset() | ({"m": m} if m else {})
    with released(model, GAMMA, top_k + m) as messages:
        theirs = logits(model)
    with capacity_aware(model, create_method(method, GAMMA, **knobs)) as meter:
        ours = logits(model)
    assert close(ours, theirs)
    assert not close(ours, logits(model))
    empty = [slot for slots in messages for row in slots for slot in row if slot == (0, 0.0)]
    assert empty  # the release sends them to expert 0
    summary = meter.summary()
    assert summary["dropped"] - summary["added"] == len(empty)


@pytest.mark.parametrize(("family", "exact"), [("olmoe", 0), ("qwen2_moe", 0), ("qwen3_moe", 1)])
def test_weights_are_normalised_where_nothing_is_dropped(family: str, exact: int) -> None:
    """At γ=1000 only a family that normalises by itself gives the stock model's logits."""
    model = make(family)
    stock = logits(model)
    results: dict[str, Tensor] = {}
    for renormalize in ("before", "after", "always"):
        with capacity_aware(model, "score", 1000.0, renormalize=renormalize) as meter:
            results[renormalize] = logits(model)
        assert meter.summary()["dropped"] == 0
    assert torch.equal(results["before"], stock)
    assert torch.equal(results["after"], stock)
    assert torch.equal(results["always"], stock) == bool(exact)
    with released(model, 1000.0, find_moe_layers(model)[0].top_k):
        assert close(results["always"], logits(model))
