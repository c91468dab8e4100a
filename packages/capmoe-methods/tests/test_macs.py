"""MACS: the weights of tokens, the capacities of experts, and a model under them."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.routing.decision import Assignment, LayerContext, Scores, group_tokens
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.wrapper import hook
from capmoe_eval.wrapper.layers import find_moe_layers
from capmoe_eval.wrapper.session import capacity_aware
from definitions import macs as reference
from definitions.macs import weights as weights_by_loops
from hypothesis import given, settings
from tests.routing.problems import Case, cases, decide, one_group
from tests.wrapper import images, models
from tests.wrapper.test_modality import logits, routed
from torch import nn

from capmoe_methods.macs import MACS
from capmoe_methods.macs.decision import (
    UNIT,
    Weighted,
    token_weights,
    weigh,
)

# MACS: the weights of tokens, the capacities of experts, and what becomes of the overflow.


GAMMAS = [0.1, 0.5, 0.75, 1.0, 1.5, 3.0]


def weighted_of(case: Case) -> Weighted:
    """Return the weights and capacities of a case."""
    assert isinstance(case.method, MACS)
    sizes = {"top_k": case.top_k, "n_experts": case.n_experts}
    return weigh(case.method, case.groups, case.context(), **sizes)


@settings(max_examples=40, deadline=None)
@given(cases(("macs",), gammas=GAMMAS))
def test_weights_are_those_of_the_definition(case: Case) -> None:
    method = case.method
    assert isinstance(method, MACS)
    units = weighted_of(case).unit_T.tolist()
    image, group = case.image_T.tolist(), case.groups.group_T.tolist()
    expected = reference.weights(case.hidden_TH.tolist(), image, group, method.delta)
    for unit, weight in zip(units, expected, strict=True):
        assert abs(unit - UNIT * weight) <= 2 + 1e-4 * UNIT * (1 + method.delta)
    assert all(unit == UNIT for unit, of_image in zip(units, image, strict=True) if not of_image)
    if method.delta == 0:
        assert {u for u, of_image in zip(units, image, strict=True) if of_image} <= {UNIT // 2}


def test_every_token_weighs_at_least_a_unit() -> None:
    """Four flat tokens and one that is not: at δ=100 the weight of the flat ones is below 2⁻²⁴."""
    hidden_TH = torch.zeros(5, 3)
    hidden_TH[0, 0] = 50.0
    units_T = token_weights(hidden_TH, torch.ones(5) > 0, one_group(5), 100.0)
    assert units_T.tolist() == [UNIT, 1, 1, 1, 1]


def test_a_group_without_a_token_has_no_weight_of_images() -> None:
    """The second rank's sequence is padding alone, and the third's has no image."""
    counted_BS = torch.tensor([[True, True], [False, False], [True, True]])
    groups = group_tokens(counted_BS, ep_size=3)
    image_T = torch.tensor([True, False, False, False])
    bias_E = torch.tensor([1, 0, -1])
    hidden_TH = torch.arange(8.0).view(4, 2)
    method = MACS(gamma=1.0, ep_size=3)
    layer = LayerContext(calibrated=bias_E, hidden_TH=hidden_TH, image_T=image_T)
    weighted = weigh(method, groups, layer, top_k=1, n_experts=3)
    assert weighted.visual_ratio_G.tolist() == [pytest.approx(1 / 3), 0.0, 0.0]
    assert weighted.limit_GE[1].tolist() == [0, 0, 0]


@settings(max_examples=40, deadline=None)
@given(cases(("macs",), gammas=GAMMAS))
def test_equal_weights_without_modalities_and_rerouting_are_token_drop(case: Case) -> None:
    """Bit for bit, in the slots as in the pairs."""
    case = case.with_knobs(rho=0.0, reroute="none", ep_size=1)
    text = dataclasses.replace(case, image_T=torch.zeros_like(case.image_T))
    macs, drop = decide(text), decide(case.of(case.method.converted(TokenDrop)))
    assert torch.equal(macs.index_TS, drop.index_TS)
    assert torch.equal(macs.keep_TS, drop.keep_TS)


# MACS on models with images: the weights that experts are sent, and the proofs of it.


# Of the tiny models, whose layers have 8 experts each: some of each kind.
MODALITIES = [torch.tensor([1, 1, 1, 0, 0, -1, -1, -1]), torch.tensor([0, 1, -1, 0, 1, -1, 0, 0])]


def modalities(model: nn.Module) -> list[torch.Tensor]:
    """Return the modalities of every layer's experts."""
    return [MODALITIES[n % 2] for n, _ in enumerate(find_moe_layers(model))]


@pytest.mark.parametrize("family", ["llava", "qwen3_vl_moe"])
def test_it_changes_the_logits_and_restores_the_model(family: str) -> None:
    """The test that fails if the intervention does nothing."""
    model, inputs = images.make(family), images.batch(family)
    stock = logits(model, inputs)
    found = {}
    for name, knobs in {
        "score": {},
        "macs": {},
        "no rerouting": {"reroute": "none"},
        "one weight": {"delta": 0.0},
        "one capacity": {"rho": 0.0},
    }.items():
        method = name if name == "score" else "macs"
        calibrated = modalities(model) if method == "macs" else None
        given = {"verify": True, "calibrated": calibrated, **knobs}
        found[name], report = routed(model, inputs, method, **given)
        for proof, outcome in report["proofs"].items():
            # MACS bounds weights of tokens, so that slots have no number.
            idle = {"modality_order"} | ({"slots_filled"} if method == "macs" else set())
            assert outcome["passed"] or proof in idle, (name, proof)
        assert report["summary"]["dropped"] > 0
        assert (report["summary"]["added"] > 0) == (method == "macs" and name != "no rerouting")
    assert report["proofs"]["stock_at_infinity"]["method"] == "macs"
    for one, logits_one in found.items():
        assert not torch.equal(logits_one, stock)
        assert all(torch.equal(logits_one, each) == (one == o) for o, each in found.items()), one
    assert torch.equal(logits(model, inputs), stock)
    assert torch.equal(routed(model, inputs, "macs", gamma=float("inf"))[0], stock)


def test_the_meter_weighs_what_the_experts_are_called_with() -> None:
    """By loops, from the router's inputs and the experts' indices."""
    model, inputs = images.make("llava"), images.batch("llava", (1, 2, 1, 0))
    layers = [layer.mlp for layer in model.model.language_model.layers]
    hidden: list[torch.Tensor] = []
    knobs: dict[str, Any] = {"ep_size": 2, "delta": 2.0, "verify": False}
    with (
        capacity_aware(model, "macs", 0.5, calibrated=modalities(model), **knobs) as meter,
        models.called(model) as computed,
        ExitStack() as hooks,
    ):
        for layer in layers:
            note = layer.gate.register_forward_pre_hook(lambda _m, args: hidden.append(args[0]))
            hooks.callback(note.remove)
        logits(model, inputs)
    mask_BS = inputs["attention_mask"].bool()
    groups = group_tokens(mask_BS, ep_size=2)
    rows = groups.rows_T.tolist()
    image = (inputs["input_ids"].flatten()[groups.rows_T] == images.IMAGE).tolist()
    group = groups.group_T.tolist()
    weight = of_images = beyond = 0.0
    top_k = meter.layers[0].top_k
    for layer, (called, _), bias in zip(hidden, computed, modalities(model), strict=True):
        own = weights_by_loops(layer.flatten(0, -2)[rows].double().tolist(), image, group, 2.0)
        weight += sum(own)
        of_images += sum(w for w, of_image in zip(own, image, strict=True) if of_image)
        for rank in range(2):
            members = [t for t, g in enumerate(group) if g == rank]
            ratio = sum(own[t] for t in members if image[t]) / sum(own[t] for t in members)
            base = -(-len(members) * top_k // 16)  # 0.5·T·K/E, rounded up
            for expert in range(8):
                load = [own[t] for t in members if expert in called[rows[t]].tolist()]
                capacity = base * (1 + int(bias[expert]) * (ratio - 0.5))
                assert sum(load) <= capacity + 1e-3
                beyond += len(load) > base
    summary = meter.summary()
    weights, buckets = summary["weights"], 16 * len(layers)
    assert weights["image"] == pytest.approx(of_images / (len(layers) * sum(image)), rel=1e-3)
    assert weights["visual_ratio"] == pytest.approx(of_images / weight, rel=1e-3)
    # Buckets with more tokens than Token Drop would keep.
    assert weights["beyond_base"] == beyond / buckets > 0
    assert weights["experts"] == {
        name: sum(int((of == number).sum()) for of in modalities(model))
        for name, number in (("visual", 1), ("text", -1), ("shared", 0))
    }
    assert summary["effective_gamma"] == pytest.approx(2 * 8 * base / (len(rows) * top_k), rel=0.2)


DECIDE = hook.decide  # of which the tests put another in its place


def keep_all(scores: Scores, *arguments: Any, **more: Any) -> Assignment:
    decided = DECIDE(scores, *arguments, **more)
    keep_TK = torch.ones_like(scores.topk_TK, dtype=torch.bool)
    return Assignment(scores.topk_TK, keep_TK, details=decided.details)


def test_a_decision_that_breaks_the_bound_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = images.make("llava"), images.batch("llava")
    with capacity_aware(model, "macs", 0.5, rho=0, verify=False) as meter:
        monkeypatch.setattr(hook, "decide", keep_all)
        with pytest.raises(
            EnforcementError,
            match=r"bound_holds \(bound exceeded in \d+ buckets\), overload_drops \(\d+ overloads",
        ):
            logits(model, inputs)
    assert meter.proofs()["bound_holds"]["passed"] is False
    assert meter.proofs()["overload_drops"]["passed"] is False


@pytest.mark.parametrize(
    ("family", "knobs", "line"),
    [
        ("olmoe", {"rho": 0}, "method=macs: model OlmoeForCausalLM has no images"),
        ("llava", {}, "method=macs: needs the modality of every expert, which a calibration finds"),
        ("llava", {"calibrated": MODALITIES[:1]}, r"calibrated: has shapes \[\(8,\)\]; give the"),
        (
            "llava",
            {"calibrated": [MODALITIES[0] * 0.3] * 4},
            r"layers\.0\.mlp must have 1 for a",
        ),
    ],
)
def test_what_cannot_be_weighed_is_refused_in_one_line(
    family: str, knobs: dict[str, Any], line: str
) -> None:
    model = models.make(family) if family == "olmoe" else images.make(family)
    with pytest.raises(UsageError, match=line), capacity_aware(model, "macs", 0.5, **knobs):
        pass
