"""SERE on a model: what the experts are given, and how similar their outputs are."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.kernel import KERNEL_TOLERANCE
from capmoe_eval.wrapper.layers import find_moe_layers
from capmoe_eval.wrapper.session import _deviation, capacity_aware
from definitions.sere import weights
from tests.routing.reference import Problem
from tests.wrapper.models import batch, make, similarities
from torch import Tensor, nn

from capmoe_methods.sere import calibration
from capmoe_methods.sere.calibration import (
    Similarities,
)

pytestmark = pytest.mark.numeric

FAMILIES = ("olmoe", "qwen3_moe", "deepseek_v2")  # with softmax scores, normalised or scaled
TOKENS = batch(n_sequences=3, n_positions=2)


def first_call(model: Any, experts: nn.Module, **call: Any) -> tuple[list[Any], Tensor]:
    """Return the arguments and the output of the experts of a layer."""
    calls: list[tuple[list[Any], Tensor]] = []

    def note(_experts: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        calls.append(([*args, *kwargs.values()], output))

    handle = experts.register_forward_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(TOKENS, **call)
    handle.remove()
    return calls[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_token_gets_the_outputs_and_weights_of_the_definition(family: str) -> None:
    """The first layer, whose input no method has changed."""
    model = make(family)
    experts: Any = find_moe_layers(model)[0].experts
    (hidden_TH, topk_TK, weight_TK), stock_TH = first_call(model, experts)
    known = similarities(model)
    method = create_method("sere", k0=1, min_similarity=0.5)
    with capacity_aware(model, method, calibrated=known):
        _, output_TH = first_call(model, experts)
    own_TE = torch.full((len(hidden_TH), 8), -1.0).scatter_(1, topk_TK, weight_TK)
    tokens = range(len(hidden_TH))
    problem = Problem(
        score=own_TE.tolist(),
        choice=own_TE.tolist(),
        eligible=[[True] * 8 for _ in tokens],
        topk=topk_TK.tolist(),
        group=[0 for _ in tokens],
        rank=[0 for _ in tokens],
        random=[[0] * 8 for _ in tokens],
        image=[False for _ in tokens],
        hidden=[],
        calibrated=known[0].tolist(),
    )
    wanted_TH = torch.zeros_like(output_TH)
    for (token, expert), weight in weights(problem, method, weight_TK.tolist()).items():
        index_T1, weight_T1 = torch.tensor([[expert]]), torch.tensor([[weight]])
        with torch.no_grad():
            wanted_TH[token] += experts(hidden_TH[token : token + 1], index_T1, weight_T1)[0]
    assert _deviation(output_TH, wanted_TH) <= KERNEL_TOLERANCE[torch.float32]
    assert _deviation(output_TH, stock_TH) > 100 * KERNEL_TOLERANCE[torch.float32], (
        "SERE changed nothing"
    )


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v3"])
def test_where_nothing_moves_the_logits_are_the_stock_models(family: str) -> None:
    """Bit for bit: where every chosen expert is primary, and where none is similar enough."""
    model = make(family)
    with torch.no_grad():
        stock = model(TOKENS).logits
        top_k = model.config.num_experts_per_tok
        for k0, min_similarity in ((top_k, 0.0), (1, 1.0), (1, 1.5)):
            method = create_method("sere", k0=k0, min_similarity=min_similarity)
            with capacity_aware(model, method, calibrated=similarities(model)) as meter:
                assert torch.equal(model(TOKENS).logits, stock)
            assert meter.proofs()["stock_at_infinity"]["passed"]


def test_the_first_tokens_are_compared_on_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, on tokens that count, and as the loops define it."""
    monkeypatch.setattr(calibration, "_AT_ONCE", 3)
    model = make("olmoe")
    mask = torch.ones_like(TOKENS)
    mask[1, 1] = 0
    layers = find_moe_layers(model)
    with capacity_aware(model, "score", float("inf"), verify=False) as meter, torch.no_grad():
        observer = Similarities(layers, 7)
        meter.observe(observer)
        for _ in range(2):
            model(TOKENS, attention_mask=mask)
        found = observer.similarities()
    assert [outputs.tokens for outputs in observer.sums] == [7] * len(layers)
    for layer, similarity_EE in zip(layers, found, strict=True):
        experts: Any = layer.experts
        (hidden_NH, *_), _ = first_call(model, experts, attention_mask=mask)
        # Of three sequences of two tokens the fourth token is a pad; two of the second forward,
        # which are fewer than are compared at once, wait until the end.
        counted_TH = hidden_NH[[0, 1, 2, 4, 5, 0, 1]]
        outputs = []
        for expert in range(8):
            index_T1 = torch.full((7, 1), expert)
            with torch.no_grad():
                outputs.append(experts(counted_TH, index_T1, torch.ones(7, 1)).tolist())
        expected = torch.tensor(frobenius_similarity_reference(outputs), dtype=torch.float64)
        assert torch.allclose(similarity_EE, expected, atol=1e-6)
        assert float(similarity_EE.min()) == 0
        assert bool((similarity_EE.diagonal() == 1).all())
    assert not torch.allclose(*found)


@pytest.mark.parametrize(
    ("known", "line"),
    [
        (None, "method=sere: needs the similarity of the experts"),
        (5, "calibrated=5: must be a list with a torch tensor for each MoE layer"),
        (2 * [torch.eye(8).tolist()], "must be a list with a torch tensor for each MoE layer"),
        ([torch.eye(8)], r"calibrated: has shapes \[\(8, 8\)\]; give the similarity"),
        ([torch.eye(8), torch.eye(9)], r"calibrated: has shapes \[\(8, 8\), \(9, 9\)\]"),
        ([torch.eye(8), 2 * torch.eye(8)], r"layers\.1\.mlp must have similarities from 0 to 1"),
    ],
)
def test_similarities_that_do_not_fit_are_refused(known: Any, line: str) -> None:
    with (
        pytest.raises(UsageError, match=line),
        capacity_aware(make("olmoe"), "sere", calibrated=known),
    ):
        pass


def frobenius_similarity_reference(outputs: list[list[list[float]]]) -> list[list[float]]:
    """Define the similarity by loops, from the outputs of each expert for each token."""
    flat = [list(itertools.chain.from_iterable(tokens)) for tokens in outputs]
    distance = [[math.dist(one, two) for two in flat] for one in flat]
    largest = max(max(row) for row in distance) or 1.0
    return [[1 - value / largest for value in row] for row in distance]
