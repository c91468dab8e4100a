"""The context manager: masks, decode steps, weights, proofs, sabotage, restoring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.routing.registry import create_method
from capmoe_eval.routing.scores import Assignment
from capmoe_eval.wrapper import hook
from capmoe_eval.wrapper.plan import GAMMA_GRID
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import ROUNDING, batch, make

pytestmark = pytest.mark.numeric


@torch.no_grad()
def run(model: nn.Module, tokens: Tensor, **kwargs: Any) -> Tensor:
    return model(tokens, **kwargs).logits


def right_padded(pad_token: int) -> tuple[Tensor, Tensor]:
    tokens, mask = batch(), torch.ones(4, 12, dtype=torch.long)
    for row, length in enumerate((12, 9, 5, 2)):
        tokens[row, length:], mask[row, length:] = pad_token, 0
    return tokens, mask


def experts_input(model: nn.Module, **call: Any) -> list[Tensor]:
    """Return the indices [N, S] that each layer's experts are called with."""
    seen: list[Tensor] = []
    handles = [
        module.register_forward_pre_hook(lambda _m, args: seen.append(args[1].clone()))
        for module in model.modules()
        if hasattr(module, "_is_expert_parallel")
    ]
    run(model, **call)
    for handle in handles:
        handle.remove()
    return seen


# Masks.


def test_pads_take_no_slot_whatever_they_are() -> None:
    model = make("olmoe")
    decisions = []
    for pad_token in (0, 50):
        tokens, mask = right_padded(pad_token)
        with capacity_aware(model, "score", gamma=1.0) as meter:
            seen = experts_input(model, tokens=tokens, attention_mask=mask)
        assert all(bool((index[~mask.bool().view(-1)] == 8).all()) for index in seen)
        assert meter.summary()["tokens"] == 28
        assert meter.proofs()["pads_take_no_slot"] == {
            "passed": True,
            "pad_slots": 0,
            "checked": 2,
            "examined": {"forwards": 1, "of": 1, "buckets": 16},
        }
        decisions.append(seen[0])
    assert torch.equal(decisions[0], decisions[1])


def test_counted_padding_changes_the_decisions() -> None:
    model = make("olmoe")
    tokens, mask = right_padded(0)
    first = {}
    for count_padding in (False, True):
        with capacity_aware(model, "score", gamma=0.5, count_padding=count_padding) as meter:
            index = experts_input(model, tokens=tokens, attention_mask=mask)[0]
        first[count_padding] = index[mask.bool().view(-1)]
        assert meter.summary()["tokens"] == (48 if count_padding else 28)
    assert not torch.equal(first[False], first[True])


def test_real_tokens_equal_a_mask_without_the_model_seeing_it() -> None:
    model = make("olmoe")
    tokens, mask = right_padded(0)
    with capacity_aware(model, "score", gamma=0.5) as meter, meter.real_tokens(mask):
        out_of_band = run(model, tokens)
    with capacity_aware(model, "score", gamma=0.5) as meter:
        masked = run(model, tokens, attention_mask=mask)
    real = mask.bool()
    torch.testing.assert_close(out_of_band[real], masked[real], **ROUNDING)


def test_left_and_right_padding_decide_alike() -> None:
    model = make("olmoe")
    tokens, mask = right_padded(0)
    shifted, shifted_mask = torch.zeros_like(tokens), torch.zeros_like(mask)
    for row, length in enumerate(mask.sum(1).tolist()):
        shifted[row, 12 - length :], shifted_mask[row, 12 - length :] = tokens[row, :length], 1
    drops = []
    for given, given_mask in ((tokens, mask), (shifted, shifted_mask)):
        positions = (given_mask.cumsum(1) - 1).clamp_min(0)
        with capacity_aware(model, "score", gamma=0.5):
            index = experts_input(
                model, tokens=given, attention_mask=given_mask, position_ids=positions
            )[0]
        drops.append(index[given_mask.bool().view(-1)])
    assert torch.equal(drops[0], drops[1])


@pytest.mark.parametrize(
    "mask", [torch.ones(4, 1, 12, 12), {"full_attention": None}, torch.ones(3, 12)]
)
def test_a_mask_that_does_not_tell_the_pads_is_refused(mask: Any) -> None:
    model = make("olmoe")
    with (
        pytest.raises(UsageError, match="mask"),
        capacity_aware(model, "score", gamma=1.0),
    ):
        run(model, batch(), attention_mask=mask)


# Decode steps.


@pytest.mark.parametrize("decode", ["unconstrained", "constrained", "only"])
def test_decode_steps_follow_the_rule(decode: str) -> None:
    model = make("olmoe")
    tokens = batch(n_sequences=4, n_positions=6)
    mask = torch.ones_like(tokens)
    mask[1:, :2] = 0  # left-padded, as in generation
    with capacity_aware(model, "score", gamma=0.5, decode=decode) as meter:
        model.generate(
            tokens, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False
        )
    assert (meter.forwards, meter.decode_forwards) == (4, 3)
    forwards, tokens = {
        "unconstrained": (1, 18),
        "constrained": (4, 18 + 3 * 4),
        "only": (3, 3 * 4),
    }[decode]
    assert meter.report()["layers"][0]["forwards"] == forwards
    assert meter.summary()["tokens"] == tokens


def test_unconstrained_decode_is_the_stock_decode_of_the_same_cache() -> None:
    """Its kernel, too: in bfloat16, eager adds in another precision than the kept-pairs kernel."""
    model = make("olmoe", experts="eager").bfloat16()
    with torch.no_grad(), capacity_aware(model, "score", gamma=0.0):
        prompt = model(batch(), use_cache=True)
        inside = model(batch(1)[:, :1], past_key_values=prompt.past_key_values).logits
        prompt = model(batch(), use_cache=True)
    with torch.no_grad():
        outside = model(batch(1)[:, :1], past_key_values=prompt.past_key_values).logits
    assert torch.equal(inside, outside)


def test_a_prompt_of_one_token_is_no_decode_step() -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.0) as meter:
        run(model, batch(n_positions=1))
    assert meter.summary()["lost_all"] == 4 * 2


# Combine weights.


def gate_and_experts(model: nn.Module, **knobs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the first layer's own (weights, indices) and those its experts were given."""
    own: list[Tensor] = []
    given: list[Tensor] = []
    with capacity_aware(model, **knobs) as meter:
        layer = meter.layers[0]
        # A hook that runs before capmoe's sees the router's own output.
        first = layer.router.register_forward_hook(
            lambda _m, _a, out: own.extend(t.clone() for t in out[1:]), prepend=True
        )
        second = layer.experts.register_forward_pre_hook(
            lambda _m, args: given.extend((args[2].clone(), args[1].clone()))
        )
        run(model, batch())
        first.remove()
        second.remove()
    return own[0], own[1], given[0], given[1]


@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_kept_weights_are_the_dropless_ones_bit_for_bit(name: str) -> None:
    own, index, weights, kept_index = gate_and_experts(
        make(name), method="expanded_drop", gamma=0.7, ep_size=2
    )
    kept = kept_index[:, : own.shape[1]] < 8
    assert torch.equal(weights[:, : own.shape[1]][kept], own[kept])
    assert not bool(weights[kept_index == 8].any())
    assert torch.equal(kept_index[:, : own.shape[1]][kept], index[kept])


@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe", "deepseek_v2"])
def test_added_weights_are_scores_over_the_dropless_denominator(name: str) -> None:
    model = make(name)
    logits: list[Tensor] = []
    router = next(m for m in model.modules() if type(m).__name__.lower().endswith("router"))
    handle = router.register_forward_hook(lambda _m, _a, out: logits.append(out[0].clone()))
    own, index, weights, kept_index = gate_and_experts(
        model, method="expanded_drop", gamma=2.0, ep_size=2
    )
    handle.remove()
    top_k = own.shape[1]
    added = kept_index[:, top_k:] < 8
    assert int(added.sum()) > 10
    probs = logits[-1].softmax(-1)
    # The ratio weight / score is one number per token: it must be that of its own top-1.
    ratio = own[:, :1] / probs.gather(1, index[:, :1])
    expected = probs.gather(1, kept_index[:, top_k:].clamp_max(7)) * ratio
    torch.testing.assert_close(weights[:, top_k:][added], expected[added], rtol=1e-4, atol=1e-6)


def test_renormalize_after_divides_by_what_was_kept() -> None:
    own, _, weights, kept_index = gate_and_experts(
        make("qwen3_moe"), method="score", gamma=0.7, renormalize="after"
    )
    kept = kept_index < 8
    some = kept.any(1)
    torch.testing.assert_close(weights.sum(1)[some], torch.ones(int(some.sum())))
    whole = kept.all(1)
    assert torch.equal(weights[whole], own[whole])
    assert 0 < int(whole.sum()) < len(whole)


def test_renormalize_after_has_no_effect_where_the_family_does_not_normalise() -> None:
    before = gate_and_experts(make("olmoe"), method="score", gamma=0.7)
    after = gate_and_experts(make("olmoe"), method="score", gamma=0.7, renormalize="after")
    assert torch.equal(before[2], after[2])


# Statistics.


def test_grid_predicts_the_drop_rate_of_every_gamma() -> None:
    """Figure 7's curve, counted during one dropless run, equals what Token Drop then drops."""
    model = make("olmoe")
    for knobs in ({"ep_size": 1}, {"ep_size": 2}, {"ep_size": 4, "granularity": "device"}):
        # No load comes near it. At γ=R a device's bound cannot bind: that is the baseline.
        with capacity_aware(model, "score", gamma=3.9, **knobs) as meter:
            run(model, batch())
        assert meter.report()["layers"][0]["dropped"] == 0
        grid = meter.report()["layers"][0]["grid"]
        for gamma in (0.0, 0.5, 1.0, 1.25):
            with capacity_aware(model, "score", gamma=gamma, **knobs) as meter:
                run(model, batch())
            first = meter.report()["layers"][0]
            assert first["drop_rate"] == pytest.approx(
                grid["drop_rate"][GAMMA_GRID.index(gamma)], abs=1e-6
            )
            if gamma:
                assert first["pad_waste"] == pytest.approx(
                    grid["pad_waste"][GAMMA_GRID.index(gamma)], abs=1e-6
                )


def test_loads_are_counted_by_hand() -> None:
    model = make("olmoe")
    tokens, mask = right_padded(0)
    with capacity_aware(model, "score", gamma=0.5, ep_size=2) as meter:
        own: list[Tensor] = []
        handle = meter.layers[0].router.register_forward_hook(
            lambda _m, _a, out: own.append(out[2].clone()), prepend=True
        )
        index = experts_input(model, tokens=tokens, attention_mask=mask)[0]
        handle.remove()
    report = meter.report()["layers"][0]
    real = mask.bool().view(-1)
    before = [int((own[0][real] == e).sum()) for e in range(8)]
    after = [int((index[real] == e).sum()) for e in range(8)]
    assert (report["load_before"], report["load_after"]) == (before, after)
    assert report["dropped"] == sum(before) - sum(after)
    mean = 28 * 3 / 8
    assert report["peak"]["expert_before"]["max"] == pytest.approx(max(before) / mean)
    assert report["peak"]["expert_after"]["max"] == pytest.approx(max(after) / mean)
    devices = max(sum(before[:4]), sum(before[4:]))
    assert report["peak"]["device_before"]["max"] == pytest.approx(devices / (mean * 4))
    assert report["lost_all"] == int((index[real] == 8).all(1).sum())


# Promises.


def test_a_refilled_slot_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patch of commit 174afe8 refills dropped slots from plain top-k, an error here."""
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5) as meter:
        layer = meter.layers[0]
        own: list[Tensor] = []
        layer.router.register_forward_hook(lambda _m, _a, out: own.append(out[2]), prepend=True)

        def refill(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return args[0], torch.where(args[1] < 8, args[1], own[0]), *args[2:]

        layer.experts.register_forward_pre_hook(refill, prepend=True)
        with pytest.raises(EnforcementError, match=r"bound exceeded in \d+ buckets"):
            run(model, batch())


def test_one_pair_too_many_is_caught() -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5) as meter:
        layer = meter.layers[0]
        own: list[Tensor] = []
        layer.router.register_forward_hook(lambda _m, _a, out: own.append(out[2]), prepend=True)

        def refill_one(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            index_TK = args[1].clone()
            load = torch.bincount(index_TK.reshape(-1), minlength=9)[:8]
            full = load.argmax()
            token, slot = ((index_TK == 8) & (own[0] == full)).nonzero()[0]
            index_TK[token, slot] = full
            return args[0], index_TK, *args[2:]

        layer.experts.register_forward_pre_hook(refill_one, prepend=True)
        with pytest.raises(EnforcementError, match="bound exceeded in 1 buckets"):
            run(model, batch())


def test_a_decision_that_keeps_too_much_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_all(scores: Any, *_: Any, **__: Any) -> Assignment:
        return Assignment(scores.topk_TK, torch.ones_like(scores.topk_TK, dtype=torch.bool))

    model = make("olmoe")
    with (
        capacity_aware(model, "score", gamma=0.5),
        pytest.raises(EnforcementError, match=r"[1-9]\d* overloads without a drop"),
    ):
        monkeypatch.setattr(hook, "decide", keep_all)
        run(model, batch())


def test_a_skipped_layer_is_caught() -> None:
    model = make("olmoe")
    with (
        capacity_aware(model, "score", gamma=0.5),
        pytest.raises(EnforcementError, match="not every MoE layer ran exactly once"),
    ):
        model.model.layers[1].mlp.forward = lambda hidden: hidden
        run(model, batch())


def test_a_layer_that_runs_twice_is_caught() -> None:
    model = make("olmoe")
    layer = model.model.layers[1].mlp
    forward_once = layer.forward
    with (
        capacity_aware(model, "score", gamma=0.5),
        pytest.raises(EnforcementError, match="some ran twice"),
    ):
        layer.forward = lambda hidden: forward_once(hidden + 0 * forward_once(hidden))
        run(model, batch())


def test_a_weight_change_by_others_is_caught() -> None:
    """A router whose weights are no longer its scores is not the router that was understood."""
    model = make("olmoe")
    with (
        capacity_aware(model, "score", gamma=0.5) as meter,
        pytest.raises(EnforcementError, match="weights off by"),
    ):
        meter.layers[0].router.register_forward_hook(
            lambda _m, _a, out: (out[0], out[1] * 1.5, out[2]), prepend=True
        )
        run(model, batch())


def test_a_part_of_the_model_cannot_run_alone() -> None:
    model = make("olmoe")
    with (
        capacity_aware(model, "score", gamma=0.5),
        pytest.raises(EnforcementError, match="outside a forward"),
    ):
        model.model(batch())


def test_random_draws_by_layer_and_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[tuple[int, int]] = []
    assign = hook.decide

    def noting(*args: Any, stream: tuple[int, int], **kwargs: Any) -> Assignment:
        streams.append(stream)
        return assign(*args, stream=stream, **kwargs)

    model = make("olmoe")
    with capacity_aware(model, "random", gamma=0.5):
        monkeypatch.setattr(hook, "decide", noting)
        run(model, batch())
        run(model, batch())
    assert streams == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_random_is_untouched_by_probe_forwards() -> None:
    model = make("olmoe")
    with capacity_aware(model, "random", gamma=0.5, seed=3, verify=False):
        without = run(model, batch())
    with capacity_aware(model, "random", gamma=0.5, seed=3, verify=True):
        with_probe = run(model, batch())
        again = run(model, batch())
    assert torch.equal(without, with_probe)
    assert not torch.equal(with_probe, again)  # the second forward draws anew


# Entering and leaving.


def test_nesting_is_refused_and_leaves_the_outer_block_alone() -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5) as meter:
        expected = run(model, batch())
        with (
            pytest.raises(UsageError, match="already under a capacity"),
            capacity_aware(model, "score", gamma=1.0),
        ):
            pass
        assert torch.equal(expected, run(model, batch()))
    assert meter.forwards == 2


@pytest.mark.parametrize(
    ("knobs", "line"),
    [
        ({"method": "scroe", "gamma": 1.0}, "did you mean 'score'"),
        ({"gama": 1.0, "gamma": 1.0}, "knob=gama: choose one of"),
        (
            {"method": create_method("score", 1.0), "gamma": 2.0},
            "gamma: is a knob of the method; set it there",
        ),
        (
            {"method": create_method("score", 1.0), "ep_size": 2},
            "ep_size: is a knob of the method; set it there",
        ),
        ({"gamma": 1.0, "ep_size": 3}, "ep_size=3: 8 experts cannot be spread evenly"),
        ({}, "gamma: method 'score' needs a capacity factor"),
    ],
)
def test_bad_knobs_are_refused_before_anything_happens(knobs: dict[str, Any], line: str) -> None:
    model = make("olmoe")
    with pytest.raises(UsageError, match=line), capacity_aware(model, **knobs):
        pass
    assert not any(m._forward_hooks for m in model.modules())


def test_gate_scores_are_averaged_rank_by_rank() -> None:
    """The baseline's meter notes Figure 8; pads are left out."""
    model = make("olmoe")
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    logits: list[torch.Tensor] = []
    layer = model.model.layers[0].mlp.gate
    handle = layer.register_forward_hook(lambda _m, _a, out: logits.append(out[0]))
    with torch.no_grad(), capacity_aware(model, "baseline", verify=False) as meter:
        model(input_ids=torch.arange(12).view(2, 6), attention_mask=mask)
    handle.remove()
    rows = [sorted(row.softmax(-1).tolist(), reverse=True) for row in logits[-1].double()]
    real = [row for row, yes in zip(rows, mask.flatten().tolist(), strict=True) if yes]
    expected = [sum(ranked) / len(real) for ranked in zip(*real, strict=True)]
    report = meter.report()["layers"][0]
    assert report["score_by_rank"] == pytest.approx(expected, abs=1e-6)
    assert sum(report["score_by_rank"]) == pytest.approx(1.0, abs=1e-5)
    with torch.no_grad(), capacity_aware(model, "score", 1.0, verify=False) as meter:
        model(input_ids=torch.arange(12).view(2, 6))
    assert meter.report()["layers"][0]["score_by_rank"] is None
