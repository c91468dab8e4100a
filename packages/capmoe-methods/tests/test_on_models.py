"""The methods on tiny models: what the experts are called with, the proofs, and what is refused."""

import dataclasses
import itertools
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.decision import group_tokens
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.layers import find_moe_layers
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper import images, test_modality
from tests.wrapper.models import ROUNDING, batch, called, logits, make, similarities
from torch import Tensor

from capmoe_methods.macs.decision import UNIT
from capmoe_methods.macs.definition import token_weights
from capmoe_methods.sere import calibration
from capmoe_methods.sere.calibration import Similarities

pytestmark = pytest.mark.numeric

# Of the tiny models, whose layers have 8 experts each and K = 3.
OEA = create_method("oea", k0=1)
XSHARE = create_method("xshare", k0=0, expert_budget=0.5)
ON_RANKS = create_method("xshare", k0=0, expert_budget=0.5, granularity="device", ep_size=2)
MERGED = create_method("sere", k0=1, min_similarity=0.6)
FLAT = create_method("laser", peak_mass=1.0, viable_score=0.0)  # every expert is a candidate
WEIGHED = create_method("macs", 0.5)
DEVICES = create_method("score", 0.7, ep_size=4, granularity="device", placement="eplb")
FEW = batch(n_sequences=4, n_positions=2)
SPREAD = torch.tensor([[0, 7], [1, 6], [2, 5], [3, 4]])
MODALITIES = [torch.tensor([1, 1, 1, 0, 0, -1, -1, -1]), torch.tensor([0, 1, -1, 0, 1, -1, 0, 0])]


def measured(model: Any, method: Method) -> list[Tensor] | None:
    """What a calibration would have measured of each layer."""
    kinds = {
        "expert_similarity": lambda n: similarities(model)[n],
        "expert_loads": lambda _: SPREAD,
        "expert_modalities": lambda n: MODALITIES[n % 2],
    }
    if method.calibration is None:
        return None
    return [kinds[method.calibration](n) for n in range(len(find_moe_layers(model)))]


def under(
    method: Method, model: Any = None, tokens: Tensor = FEW, **knobs: Any
) -> tuple[Tensor, dict[str, Any]]:
    """The logits of a model under a method, and the meter's report."""
    model = make("olmoe") if model is None else model
    with capacity_aware(model, method, **{"calibrated": measured(model, method), **knobs}) as meter:
        return logits(model, tokens), meter.report()


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_a_bound_that_is_never_reached_gives_the_stock_model(family: str) -> None:
    """Bit for bit, also where a family normalises its weights or limits a token to groups."""
    settings = itertools.product(("oea", "xshare", "laser"), ("before", "after"))
    methods = [create_method(name, renormalize=when) for name, when in settings]
    for method in (create_method("sere"), *methods):
        _, report = under(method, make(family))
        proof = report["proofs"]["stock_at_infinity"]
        assert (proof["method"], proof["passed"]) == (method.name, True)


@pytest.mark.parametrize("method", [OEA, XSHARE, ON_RANKS, MERGED, create_method("baseline")])
def test_activated_experts_are_those_that_are_called(method: Method) -> None:
    model = make("olmoe")

    def active_experts() -> list[set[int]]:
        with called(model) as calls:
            logits(model, FEW)
        return [set(index_NS[index_NS < 8].tolist()) for index_NS, _ in calls]

    stock = active_experts()
    with capacity_aware(model, method, calibrated=measured(model, method)) as meter:
        active = active_experts()
    report = meter.report()
    assert [layer["activated_after"] for layer in report["layers"]] == [*map(len, active)]
    assert report["layers"][0]["activated_before"] == len(stock[0])  # of the same input
    assert report["summary"]["activated_after"] == sum(map(len, active)) / 2
    assert not [name for name, proof in report["proofs"].items() if proof["passed"] is False]
    if method.is_stock:
        assert "best_kept" not in report["proofs"]
        return
    assert report["proofs"]["overload_drops"]["overloaded"] > 0
    assert len(active[0]) < len(stock[0]), "the method changed nothing"
    if method in (OEA, MERGED):
        assert report["proofs"]["best_kept"]["fits"] == 2
    else:
        assert [*map(len, active)] == [4, 4]
    if method == ON_RANKS:
        assert [len(experts & set(range(4))) for experts in active] == [2, 2]


def test_decode_steps_alone_are_bounded() -> None:
    """The prompt is the stock model's, and a step's set is that of its four tokens."""
    model, knobs = make("olmoe"), {"expert_budget": 0.25, "decode": "only", "verify": False}
    with capacity_aware(model, "xshare", **knobs) as meter, called(model.model.layers[1]) as calls:
        model.generate(batch(), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    active = [len(index_NS[index_NS < 8].unique()) for index_NS, _ in calls]
    assert active[0] > 2, "the prompt is bounded"
    assert active[1:] == [2, 2, 2]
    summary = meter.summary()
    assert summary["decode"]["activated_after"] == summary["activated_after"] == 2
    assert summary["decode"]["activated_before"] > 2
    assert summary["decode"]["effective_gamma"] is None


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "mixtral"])
def test_under_laser_every_token_keeps_k_experts(family: str) -> None:
    """The test that fails if the method changes nothing."""
    model, tokens = make(family), batch(n_sequences=4, n_positions=6)
    stock = logits(model, tokens)
    with called(model) as calls:
        changed, report = under(FLAT, model, tokens, verify=False)
    assert not torch.equal(changed, stock)
    assert report["proofs"]["pairs_as_defined"]["passed"]
    assert report["summary"]["dropped"] == report["summary"]["added"] > 0
    for layer, (index_NS, _) in zip(find_moe_layers(model), calls, strict=True):
        assert ((index_NS < layer.n_experts).sum(dim=1) == layer.top_k).all()


# MACS on models with images: the weights that experts are sent, and the proofs of it.


@pytest.mark.parametrize("family", ["llava", "qwen3_vl_moe"])
def test_macs_changes_the_logits_and_restores_the_model(family: str) -> None:
    model, inputs = images.make(family), images.batch(family)
    stock = test_modality.logits(model, inputs)
    calibrated = measured(model, WEIGHED)
    changed, report = test_modality.routed(
        model, inputs, "macs", verify=True, calibrated=calibrated
    )
    assert not torch.equal(changed, stock)
    assert report["summary"]["dropped"] > report["summary"]["added"] > 0
    broken = {name for name, proof in report["proofs"].items() if not proof["passed"]}
    # MACS bounds weights of tokens, so that slots have no number.
    assert broken <= {"modality_order", "slots_filled"}
    assert report["proofs"]["stock_at_infinity"]["method"] == "macs"
    assert torch.equal(test_modality.logits(model, inputs), stock)


def test_the_meter_weighs_what_the_experts_are_called_with() -> None:
    """From the router's inputs, the experts' indices and the definition of a token's weight."""
    model, inputs = images.make("llava"), images.batch("llava", (1, 2, 1, 0))
    layers = [layer.mlp for layer in model.model.language_model.layers]
    hidden: list[Tensor] = []
    method = dataclasses.replace(WEIGHED, ep_size=2, delta=2.0)
    modalities = measured(model, method) or []
    with (
        capacity_aware(model, method, calibrated=modalities, verify=False) as meter,
        called(model) as computed,
        ExitStack() as hooks,
    ):
        for layer in layers:
            note = layer.gate.register_forward_pre_hook(lambda _m, args: hidden.append(args[0]))
            hooks.callback(note.remove)
        test_modality.logits(model, inputs)
    groups = group_tokens(inputs["attention_mask"].bool(), ep_size=2)
    rows_T, group_T = groups.rows_T, groups.group_T.numpy()
    image_T = (inputs["input_ids"].flatten()[rows_T] == images.IMAGE).numpy()
    weight = of_images = beyond = 0.0
    for layer, (index_NS, _) in zip(hidden, computed, strict=True):
        hidden_TH = layer.flatten(0, -2)[rows_T].numpy()
        weight_T = token_weights(hidden_TH, image_T, group_T, method)[0] / UNIT
        weight, of_images = weight + weight_T.sum(), of_images + weight_T[image_T].sum()
        called_TE = (index_NS[rows_T, :, None] == torch.arange(8)).any(dim=1).numpy()
        for rank in range(2):
            is_here_T = group_T == rank
            base = -(-is_here_T.sum() * meter.layers[0].top_k // 16)  # 0.5·T·K/E, rounded up
            beyond += (called_TE[is_here_T].sum(axis=0) > base).sum()
    weights, buckets = meter.summary()["weights"], 16 * len(layers)
    assert weights["image"] == pytest.approx(of_images / (len(layers) * sum(image_T)), rel=1e-3)
    assert weights["visual_ratio"] == pytest.approx(of_images / weight, rel=1e-3)
    # Buckets with more tokens than Token Drop would keep.
    assert weights["beyond_base"] == beyond / buckets > 0
    assert weights["experts"] == {
        name: sum(int((of == number).sum()) for of in modalities)
        for name, number in (("visual", 1), ("text", -1), ("shared", 0))
    }


# placement=eplb: the loads of its devices.


def renumbered(old_E: Tensor) -> Any:
    """The model whose expert i is the old expert ``old_E[i]``."""
    model = make("olmoe")
    for layer in find_moe_layers(model):
        with torch.no_grad():
            for weight in (*layer.experts.parameters(), *layer.router.parameters()):
                weight.copy_(weight[old_E])
    return model


def test_a_model_with_renumbered_experts_in_blocks_is_the_model_under_the_placement() -> None:
    blocks = dataclasses.replace(DEVICES, placement="contiguous")
    spread, report = under(DEVICES, tokens=batch())
    assert not torch.equal(spread, under(blocks, tokens=batch())[0]), "the placement does nothing"
    other, of_other = under(blocks, renumbered(SPREAD.flatten()), batch())
    torch.testing.assert_close(spread, other, **ROUNDING)
    assert report["summary"] == pytest.approx(of_other["summary"])
    for layer, moved in zip(report["layers"], of_other["layers"], strict=True):
        assert layer["dropped"]
        assert layer["peak"] == moved["peak"]
        for when in ("load_before", "load_after"):  # an expert keeps its number
            assert [layer[when][old] for old in SPREAD.flatten()] == moved[when] != layer[when]


# SERE: how similar the outputs of experts are.


def test_the_first_tokens_are_compared_on_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, on tokens that count, and as the loops define it."""
    monkeypatch.setattr(calibration, "_AT_ONCE", 3)
    model, tokens = make("olmoe"), batch(n_sequences=3, n_positions=2)
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]])  # the fourth token is a pad
    layers, hidden = find_moe_layers(model), list[Tensor]()
    with capacity_aware(model, "score", float("inf"), verify=False) as meter, torch.no_grad():
        observer = Similarities(layers, 7)
        meter.observe(observer)
        for layer in layers:
            layer.experts.register_forward_pre_hook(lambda _m, args: hidden.append(args[0]))
        for _ in range(2):
            model(tokens, attention_mask=mask)
    assert [sums.count("tokens") for sums in observer.sums] == [7] * len(layers)
    for layer, similarity_EE, hidden_NH in zip(
        layers, observer.similarities(), hidden, strict=False
    ):
        counted_TH = hidden_NH[[0, 1, 2, 4, 5, 0, 1]]  # two are of the second forward
        with torch.no_grad():
            outputs = [
                layer.experts.forward(counted_TH, torch.full((7, 1), expert), torch.ones(7, 1))
                for expert in range(8)
            ]
        # Frobenius norms of the differences of outputs, over the largest.
        distance_EE = torch.tensor([[float((a - b).norm()) for b in outputs] for a in outputs])
        expected_EE = 1 - distance_EE / distance_EE.max()
        assert torch.allclose(similarity_EE.float(), expected_EE, atol=1e-6)
    assert not torch.allclose(*observer.similarities())


# What a calibration cannot have measured.


DOUBLE = torch.tensor([[0, 0], [1, 6], [2, 5], [3, 4]])
RISING = "must have each of its experts on one rank, in rising order"
NOT_WEIGHED = dataclasses.replace(WEIGHED, rho=0.0)  # type: ignore[call-arg]
IDENTITY = torch.eye(8)


@pytest.mark.parametrize(
    ("family", "method", "calibrated", "line"),
    [
        ("olmoe", NOT_WEIGHED, None, "method=macs: model OlmoeForCausalLM has no images"),
        ("llava", WEIGHED, [MODALITIES[0] * 0.3] * 4, r"layers\.0\.mlp must have 1 for a"),
        ("olmoe", MERGED, None, "method=sere: needs the similarity of the experts"),
        ("olmoe", MERGED, 5, "calibrated=5: must be a list with a torch tensor for each MoE layer"),
        ("olmoe", MERGED, 2 * [IDENTITY.tolist()], "must be a list with a torch tensor for each"),
        ("olmoe", MERGED, [IDENTITY, torch.eye(9)], r"has shapes \[\(8, 8\), \(9, 9\)\]; give"),
        ("olmoe", MERGED, [IDENTITY, 2 * IDENTITY], r"layers\.1\.mlp must have similarities from"),
        ("olmoe", DEVICES, [SPREAD, DOUBLE], RISING),
        ("olmoe", DEVICES, [SPREAD, SPREAD.flip(1)], RISING),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    family: str, method: Method, calibrated: Any, line: str
) -> None:
    model = images.make(family) if family == "llava" else make(family)
    with (
        pytest.raises(UsageError, match=line),
        capacity_aware(model, method, calibrated=calibrated),
    ):
        pass
