"""The context manager: masks, calls, decode steps, statistics, γ by layer."""

import gc
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationMixin, StaticCache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.plan import GAMMA_GRID, cached_positions, check_unpacked
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import batch, logits, make

pytestmark = pytest.mark.numeric


MASK_BS = torch.arange(12) < torch.tensor([[12], [7], [12], [9]])


@pytest.mark.parametrize(
    "mask", [torch.ones(4, 1, 12, 12), {"full_attention": None}, torch.ones(3, 12)]
)
def test_a_mask_that_does_not_tell_the_pads_is_refused(mask: Any) -> None:
    model = make("olmoe")
    with pytest.raises(UsageError, match="mask"), capacity_aware(model, "score", gamma=1.0):
        logits(model, attention_mask=mask)


# Decode steps.


def test_unconstrained_decode_is_the_stock_decode_of_the_same_cache() -> None:
    """Its kernel, too: in bfloat16, eager adds in another precision than the kept-pairs kernel."""
    model = make("olmoe", experts="eager").bfloat16()
    step = batch(1)[:, :1]
    with torch.no_grad(), capacity_aware(model, "score", gamma=0.0):
        caches = [model(batch(), use_cache=True).past_key_values for _ in range(2)]
        inside = model(step, past_key_values=caches[0]).logits
    assert torch.equal(inside, logits(model, step, past_key_values=caches[1]))


def test_a_prompt_of_one_token_is_no_decode_step() -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.0) as meter:
        logits(model, batch(n_positions=1))
    assert meter.summary()["lost_all"] == 4 * 2


@pytest.mark.parametrize("method", ["baseline", "score"])
def test_a_router_of_another_top_k_is_refused(method: str) -> None:
    model = make("olmoe")
    with capacity_aware(model, create_method(method, 1.0), verify=False) as meter:
        model.model.layers[1].mlp.gate.top_k = 2
        line = r"^top_k=2: the router of model\.layers\.1\.mlp chose 3 experts per token when the"
        with pytest.raises(UsageError, match=line):
            logits(model)
    assert meter.forwards == 0


# Statistics.


@pytest.mark.parametrize(
    "knobs", [{"ep_size": 1}, {"ep_size": 2}, {"ep_size": 4, "granularity": "device"}]
)
def test_grid_predicts_the_drop_rate_of_every_gamma(knobs: dict[str, Any]) -> None:
    """Figure 7's curve, counted during one dropless run, equals what Token Drop then drops."""
    model = make("olmoe")

    def first_layer(gamma: float) -> dict[str, Any]:
        with capacity_aware(model, "score", gamma=gamma, **knobs) as meter:
            logits(model)
        return meter.report()["layers"][0]

    # No load comes near it. At γ=R a device's bound cannot bind: that is the baseline.
    dropless = first_layer(3.9)
    assert dropless["dropped"] == 0
    for gamma in (0.0, 0.5, 1.0, 1.25):
        layer, number = first_layer(gamma), GAMMA_GRID.index(gamma)
        for name in ("drop_rate", "pad_waste") if gamma else ("drop_rate",):
            assert layer[name] == pytest.approx(dropless["grid"][name][number], abs=1e-6)


def test_gate_scores_are_averaged_rank_by_rank() -> None:
    """The baseline's meter notes Figure 8; pads are left out."""
    model = make("olmoe")
    with capacity_aware(model, "baseline", verify=False) as meter:
        scores: list[Tensor] = []
        meter.layers[0].router.register_forward_hook(
            lambda _m, _a, out: scores.append(out[0].double().softmax(-1)), prepend=True
        )
        logits(model, attention_mask=MASK_BS.long())
    ranked = scores[0][MASK_BS.view(-1)].sort(dim=-1, descending=True).values.mean(dim=0)
    assert meter.report()["layers"][0]["score_by_rank"] == pytest.approx(ranked.tolist(), abs=1e-6)
    with capacity_aware(model, "score", 1.0, verify=False) as meter:
        logits(model)
    assert meter.report()["layers"][0]["score_by_rank"] is None


# Entering.


def test_nesting_is_refused_and_leaves_the_outer_block_alone() -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5) as meter:
        expected = logits(model)
        with (
            pytest.raises(UsageError, match="already under a capacity"),
            capacity_aware(model, "score", gamma=1.0),
        ):
            pass
        assert torch.equal(expected, logits(model))
    assert meter.forwards == 2


# One configuration, two models; and another stock kernel.


def test_two_models_of_one_configuration_run_under_two_capacities() -> None:
    first: Any = make("olmoe")
    other = type(first)(first.config).eval()
    other.load_state_dict(make("olmoe", seed=1).state_dict())
    assert first.config is other.config
    stock, stock_of_other = logits(first), logits(other)
    gc.collect()  # ends the blocks of language models that other tests have left
    loops = dict(vars(GenerationMixin))
    with capacity_aware(first, "score", gamma=0.5):
        alone = logits(first)
    with capacity_aware(other, "order", gamma=1.0):
        other_alone = logits(other)
    assert not torch.equal(alone, stock)
    with capacity_aware(first, "score", gamma=0.5) as meter:
        assert torch.equal(logits(other), stock_of_other)
        with capacity_aware(other, "order", gamma=1.0) as other_meter:
            assert torch.equal(logits(first), alone)
            assert torch.equal(logits(other), other_alone)
        assert dict(vars(GenerationMixin)) != loops
        assert torch.equal(logits(first), alone)
        assert torch.equal(logits(other), stock_of_other)
    assert torch.equal(logits(first), stock)
    assert dict(vars(GenerationMixin)) == loops
    assert (meter.forwards, other_meter.forwards) == (2, 1)


def test_a_stock_kernel_that_is_chosen_inside_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``generate`` chooses another for decoding on a GPU."""
    model = make("olmoe", experts="grouped_mm")
    batched_mm = ALL_EXPERTS_FUNCTIONS["batched_mm"]
    rows: list[int] = []

    def noting(experts: nn.Module, hidden: Tensor, *call: Tensor) -> Tensor:
        rows.append(len(hidden))
        return batched_mm(experts, hidden, *call)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "batched_mm", noting)
    with capacity_aware(model, "score", gamma=0.5) as meter:
        logits(model)
        assert not rows
        model.set_experts_implementation("batched_mm")
        logits(model)
    kept = [sum(layer["load_after"]) // 2 for layer in meter.report()["layers"]]
    assert rows == kept
    assert model.config._experts_implementation == "batched_mm"


# A forward's call tells how many positions are cached, and that a row is one sequence.


STATES = torch.zeros(1, 2, 5, 4)  # of 5 positions


def filled(cache: Cache | None = None) -> Cache:
    cache = DynamicCache() if cache is None else cache
    cache.update(STATES, STATES, 0)
    return cache


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"use_cache": True, "of_a_later_version": filled()}, None),
        ({"cache": EncoderDecoderCache(filled(), DynamicCache())}, None),
        ({"cache": filled(StaticCache(config=make("olmoe").config, max_cache_len=9))}, None),
        ({"past_key_values": ((STATES, STATES),)}, r"past_key_values: .*\(tuple\), so that"),
        (
            {"memory": SimpleNamespace(get_seq_length=lambda: 3)},
            r"memory: is a filled cache .*\(SimpleNamespace\)",
        ),
        ({"cache": object()}, r"cache: is a filled cache .*\(object\)"),
        (
            {"cache": filled(), "other": filled(filled())},
            "cache, other: are caches of 5, 10 positions.*pass one",
        ),
    ],
)
def test_a_cache_is_recognised_by_its_type_or_refused(arguments: Any, line: str | None) -> None:
    with pytest.raises(UsageError, match=line) if line else nullcontext():
        assert cached_positions({"input_ids": batch()} | arguments) == 5


IMAGE = [[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]  # time, height and width


@pytest.mark.parametrize(
    ("positions", "is_packed"),
    [
        (torch.arange(6)[None] + 7, False),  # behind a cache
        (torch.tensor([[3], [9]]), False),  # a decode step
        (torch.tensor(IMAGE)[:, None], False),
        (torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]]), True),
        (torch.tensor([[0, 1, 5, 6]]), True),  # transformers begins another sequence here, too
        (torch.tensor([[0, 1, 2, 0, 1]]).expand(3, 1, 5), True),
    ],
)
def test_a_row_of_several_sequences_is_refused(positions: Tensor, is_packed: bool) -> None:
    line = r"position_ids: .* attention_mask"
    with pytest.raises(UsageError, match=line) if is_packed else nullcontext():
        check_unpacked(positions, None)


def test_left_pads_are_no_sequences_whoever_gets_their_mask() -> None:
    positions, real = torch.tensor([[1, 1, 1, 0, 1, 2]]), torch.tensor([[0, 0, 0, 1, 1, 1]])
    model, tokens = make("olmoe"), batch(0, 1, 6)
    with capacity_aware(model, "score", gamma=0.5) as meter:
        for mask in (real, real.bfloat16()):
            logits(model, tokens, attention_mask=mask, position_ids=positions)
        with meter.real_tokens(real):
            logits(model, tokens, position_ids=positions)
    assert meter.summary()["tokens"] == 9


def test_each_layer_follows_its_own_gamma() -> None:
    """Its bound, its proofs, and what is recorded of it."""
    model = make("olmoe")

    def report(**factors: Any) -> dict[str, Any]:
        with capacity_aware(model, "score", **factors) as meter:
            logits(model, attention_mask=MASK_BS)
            logits(model, batch().flip(1), attention_mask=MASK_BS.flip(1))
        return meter.report()

    both, low = report(layer_gammas=(0.5, 1.5)), report(gamma=0.5)
    first, second = both["layers"]
    assert both["proofs"]["bound_holds"]["passed"]
    assert [first["gamma"], second["gamma"]] == [0.5, 1.5]
    assert first["effective_gamma"] < 0.7
    assert second["effective_gamma"] > 1.4
    assert first | {"gamma": None} == low["layers"][0] | {"gamma": None}
    assert second != low["layers"][1], "the layer's own γ changes nothing"
    assert 0 < both["summary"]["effective_gamma"] < 1.5
    unbounded, bounded = report(layer_gammas=(math.inf, 0.5))["layers"]
    assert (unbounded["gamma"], unbounded["dropped"]) == ("inf", 0)
    assert bounded["dropped"]
