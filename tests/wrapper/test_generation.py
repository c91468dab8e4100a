"""New, real and constrained tokens of a forward are known with every kind of cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import StaticCache, StoppingCriteria

from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import ROUNDING, batch, counted, logits, make

pytestmark = pytest.mark.numeric

LENGTH = 32  # of the static cache
STATIC = {"cache_implementation": "static"}
NO_CACHE = {"use_cache": False}


def padded_prompt() -> tuple[Tensor, Tensor]:
    """Return left-padded tokens and their mask [4, 6]: 18 real ones, two sequences of 3."""
    tokens, mask = batch(n_positions=6), torch.ones(4, 6, dtype=torch.long)
    mask[1, :3], mask[3, :3] = 0, 0
    return tokens, mask


def generate(model: Any, decode: str = "unconstrained", **options: Any) -> tuple[Tensor, Meter]:
    """Return what a model generates under Token Drop at γ = 0.5, and the meter."""
    tokens, mask = padded_prompt()
    length = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    with capacity_aware(model, "score", gamma=0.5, decode=decode) as meter:
        generated = model.generate(tokens, **{"attention_mask": mask} | length | options)
    return generated, meter


# A mask that is longer than the tokens.


def full_length(mask_BS: Tensor) -> Tensor:
    """Return the mask of a static cache's whole length, all of the future unknown (0)."""
    return nn.functional.pad(mask_BS, (0, LENGTH - mask_BS.shape[1]))


def static_logits(model: Any, *parts: tuple[Tensor, Tensor]) -> Tensor:
    """Return the logits of the last part of a prompt behind a static cache of those before."""
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    for tokens, mask in parts:
        last = logits(model, tokens, attention_mask=mask, past_key_values=cache, use_cache=True)
    return last


@pytest.mark.parametrize("gamma", [0.5, 1e9])
def test_a_mask_of_the_caches_full_length_tells_the_same_tokens(gamma: float) -> None:
    model, (tokens, mask) = make("olmoe"), padded_prompt()
    stock = static_logits(model, (tokens, full_length(mask)))
    with capacity_aware(model, "score", gamma=gamma) as expected_meter:
        expected = logits(model, tokens, attention_mask=mask)
    with capacity_aware(model, "score", gamma=gamma) as meter:
        capped = static_logits(model, (tokens, full_length(mask)))
    real = mask.bool()
    torch.testing.assert_close(capped[real], expected[real], **ROUNDING)
    assert torch.allclose(capped[real], stock[real], **ROUNDING) == (gamma > 1)
    assert counted(meter) == counted(expected_meter)
    assert meter.summary()["tokens"] == 18


def test_a_batch_of_pads_alone_counts_nothing() -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5) as meter:
        for value in (0, 1):
            logits(model, attention_mask=torch.full((4, 12), value))
    counts = {"uncounted": 0, "all_pads": 1, "checked": 2}
    assert meter.proofs()["tokens_counted"] == {"passed": True, **counts}
    assert meter.summary()["tokens"] == 48


# Generation.


@pytest.mark.parametrize(
    ("name", "decode"),
    [
        ("olmoe", "constrained"),
        ("qwen3_moe", "unconstrained"),
        ("deepseek_v2", "constrained"),
        ("gpt_oss", "constrained"),
    ],
)
def test_a_static_cache_generates_and_counts_as_a_dynamic_one(name: str, decode: str) -> None:
    model = make(name)
    dynamic, dynamic_meter = generate(model, decode)
    static, static_meter = generate(model, decode, **STATIC)
    assert torch.equal(static, dynamic)
    assert counted(static_meter) == counted(dynamic_meter)


@pytest.mark.parametrize(
    ("decode", "options", "forwards", "tokens"),
    [
        ("unconstrained", {}, 5, 18),
        ("unconstrained", NO_CACHE, 5, 18),
        ("unconstrained", {"prefill_chunk_size": 5}, 6, 18),  # also its last chunk, of one token
        ("unconstrained", {"num_beams": 2}, 5, 36),  # beams are sequences
        ("unconstrained", {"num_beams": 2} | NO_CACHE, 5, 36),
        ("constrained", {}, 5, 18 + 4 * 4),
        ("constrained", NO_CACHE, 5, sum(18 + 4 * step for step in range(5))),
        ("constrained", {"num_beams": 2}, 5, 36 + 4 * 8),
        ("only", {}, 5, 4 * 4),
    ],
)
def test_the_tokens_of_a_generation_are_counted(
    decode: str, options: dict[str, Any], forwards: int, tokens: int
) -> None:
    _, meter = generate(make("olmoe"), decode, **options)
    assert (meter.forwards, meter.decode_forwards) == (forwards, 4)
    assert meter.summary()["tokens"] == tokens
    layer_forwards = {"unconstrained": forwards - 4, "constrained": forwards, "only": 4}[decode]
    assert meter.report()["layers"][0]["forwards"] == layer_forwards


def test_under_constrained_decoding_every_beam_is_live() -> None:
    """A beam that finishes leaves the search, so that none of the computed ones has finished."""
    model = make("olmoe")
    # A token that only some of the candidates end in, and that ends their search; longer answers
    # are better: the search goes on.
    free, _ = generate(model, "constrained", num_beams=2, num_return_sequences=2)
    ends = {"eos_token_id": int(free[0, 7]), "min_new_tokens": None, "length_penalty": 5.0}
    _, meter = generate(model, "constrained", num_beams=2, **ends)
    assert meter.decode_forwards > 1
    assert meter.summary()["tokens"] == 36 + 8 * meter.decode_forwards


def whole(model: Any) -> None:
    model.generate(batch(n_positions=6), max_new_tokens=1, use_cache=False)


def failed(model: Any) -> None:
    with pytest.raises(IndexError):
        model.generate(torch.full((2, 3), 1000), max_new_tokens=2)


def broken_off_between_steps(model: Any) -> None:
    calls: list[int] = []

    def break_off(_model: nn.Module, _args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(break_off, prepend=True)
    with pytest.raises(KeyboardInterrupt):
        model.generate(batch(n_positions=6), max_new_tokens=4, use_cache=False)
    handle.remove()


@pytest.mark.parametrize(
    ("generation", "forwards"), [(whole, 1), (failed, 0), (broken_off_between_steps, 1)]
)
def test_a_forward_after_a_generation_is_a_prompt(
    generation: Callable[[Any], None], forwards: int
) -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5) as meter:
        attributes = set(vars(model))
        generation(model)
        assert set(vars(model)) == attributes
        inputs = model.prepare_inputs_for_generation(batch(), use_cache=False)
        logits(model, inputs.pop("input_ids"), **inputs)
    assert (meter.forwards, meter.decode_forwards) == (forwards + 1, 0)
    assert meter.summary()["tokens"] == 24 * forwards + 48


# Sequences that finish before others of their batch.


class Ends(StoppingCriteria):
    """Finishes sequence b when it has as many tokens as ``lengths[b]``."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return input_ids.shape[1] >= self.lengths


class EndsTogether(Ends):
    """Finishes a batch when all of it is done, as lm-eval's criteria for stop strings do."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        self.done_tracker = super().__call__(input_ids, scores).tolist()
        return all(self.done_tracker)


LENGTHS = [8, 7, 10, 11]
LIVE = [3, 2, 2, 1]  # of the lengths, those above 7, 8, 9, 10: who makes the next token


def generate_until(criterion: StoppingCriteria | None, **options: Any) -> tuple[Tensor, Meter]:
    """Return what a model makes of prompts of 6 tokens, every step under a capacity."""
    model = make("olmoe")
    model.generation_config.eos_token_id = options.pop("eos", None)
    knobs = {"gamma": 0.5, "decode": "constrained"} | options.pop("knobs", {})
    criteria = [criterion] if criterion else None
    length = {"max_new_tokens": 5, "do_sample": False}
    with capacity_aware(model, "score", **knobs) as meter:
        for _ in range(options.pop("times", 1)):
            text = model.generate(
                batch(n_positions=6), stopping_criteria=criteria, **length, **options
            )
    return text, meter


@pytest.mark.parametrize("criterion", [Ends, EndsTogether])
@pytest.mark.parametrize("options", [{}, STATIC, NO_CACHE])
def test_a_finished_sequence_takes_no_slot(criterion: type[Ends], options: dict[str, Any]) -> None:
    _, meter = generate_until(criterion(LENGTHS), **options)
    assert meter.decode_forwards == 4
    computed = [7, 8, 9, 10] if options == NO_CACHE else [1, 1, 1, 1]
    tokens = 4 * 6 + sum(n * each for n, each in zip(LIVE, computed, strict=True))
    assert meter.summary()["tokens"] == tokens
    assert meter.summary()["decode"]["live"] == sum(LIVE) / 4
    assert meter.proofs()["pads_take_no_slot"]["passed"]


def test_a_sequence_that_ended_itself_takes_no_slot() -> None:
    text, _ = generate_until(None)
    eos = int(text[2, 7])  # the second token that the third sequence makes
    made = (text[:, 6:] == eos).int()
    ends = [int(row.argmax()) if row.any() else 5 for row in made]  # tokens before it
    _, meter = generate_until(None, eos=eos, pad_token_id=0)
    live = [sum(end >= step for end in ends) for step in range(1, 5)]
    assert min(live) < 4
    assert meter.summary()["decode"]["live"] == sum(live) / 4


def test_statistics_of_decode_steps_are_those_of_decode_steps_alone() -> None:
    _, meter = generate_until(Ends([11] * 4))
    steps = meter.summary()["decode"]
    _, prompt = generate_until(Ends([11] * 4), knobs={"decode": "unconstrained"})
    assert "decode" not in prompt.summary()

    def more(name: str) -> int:
        """Return what the decode steps added to what both computed of the prompt."""
        of_layers = zip(meter.report()["layers"], prompt.report()["layers"], strict=True)
        return sum(both[name] - first[name] for both, first in of_layers)

    assert steps["drop_rate"] == more("dropped") / more("assignments") > 0
    assert steps["effective_gamma"] == more("slots") / more("assignments")
    assert steps["live"] == 4
