"""New, real and constrained tokens of a forward are known with every kind of cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, StaticCache, StoppingCriteria

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.wrapper import forward
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import ROUNDING, batch, make

pytestmark = pytest.mark.numeric

LENGTH = 32  # of the static cache


def padded_prompt() -> tuple[Tensor, Tensor]:
    """Return left-padded tokens and their mask [4, 6]: 18 real ones, two sequences of 3."""
    tokens, mask = batch(n_positions=6), torch.ones(4, 6, dtype=torch.long)
    mask[1, :3], mask[3, :3] = 0, 0
    return tokens, mask


def generate(model: Any, n_new: int = 5, **options: Any) -> tuple[Tensor, Meter]:
    """Return what a model generates under Token Drop at γ = 0.5, and the meter."""
    decode = options.pop("decode", "unconstrained")
    tokens, mask = padded_prompt()
    with capacity_aware(model, "score", gamma=0.5, decode=decode) as meter:
        generated = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=n_new,
            min_new_tokens=n_new,
            do_sample=False,
            **options,
        )
    return generated, meter


def counted(meter: Meter) -> dict[str, Any]:
    """Return all that a meter counted: numbers that rounding does not touch."""
    layers = meter.report()["layers"]
    for layer in layers:
        del layer["weight_deviation"]
    return {"summary": meter.summary(), "layers": layers}


# A mask that is longer than the tokens.


def full_length_mask(mask_BS: Tensor) -> Tensor:
    """Return the mask of a static cache's whole length, all of the future unknown (0)."""
    whole = torch.zeros(len(mask_BS), LENGTH, dtype=torch.long)
    whole[:, : mask_BS.shape[1]] = mask_BS
    return whole


@torch.no_grad()
def static_logits(model: nn.Module, cache: StaticCache, tokens: Tensor, mask: Tensor) -> Tensor:
    return model(tokens, attention_mask=mask, past_key_values=cache, use_cache=True).logits


def test_a_mask_of_the_caches_full_length_tells_the_same_tokens() -> None:
    model, (tokens, mask) = make("olmoe"), padded_prompt()
    with torch.no_grad(), capacity_aware(model, "score", gamma=0.5) as expected_meter:
        expected = model(tokens, attention_mask=mask).logits
    with capacity_aware(model, "score", gamma=0.5) as meter:
        cache = StaticCache(config=model.config, max_cache_len=LENGTH)
        logits = static_logits(model, cache, tokens, full_length_mask(mask))
    real = mask.bool()
    torch.testing.assert_close(logits[real], expected[real], **ROUNDING)
    assert counted(meter) == counted(expected_meter)


def test_a_large_gamma_leaves_a_static_cache_with_a_full_mask_as_it_is() -> None:
    model, (tokens, mask) = make("olmoe"), padded_prompt()
    whole = full_length_mask(mask)
    stock = static_logits(model, StaticCache(model.config, LENGTH), tokens, whole)
    with capacity_aware(model, "score", gamma=1e9) as meter:
        capped = static_logits(model, StaticCache(model.config, LENGTH), tokens, whole)
    torch.testing.assert_close(capped[mask.bool()], stock[mask.bool()], **ROUNDING)
    assert meter.summary()["tokens"] == 18


def test_a_second_part_of_a_prompt_counts_its_own_columns() -> None:
    """The second part, of 4 tokens behind 6 in the cache, has 2 pads; both masks say so."""
    model, (tokens, mask) = make("olmoe"), padded_prompt()
    part, part_mask = batch(1, n_positions=4), torch.ones(4, 4, dtype=torch.long)
    part_mask[2, 2:] = 0
    both = torch.cat([mask, part_mask], dim=1)
    for second in (both, full_length_mask(both)):
        with capacity_aware(model, "score", gamma=0.5) as meter:
            cache = StaticCache(config=model.config, max_cache_len=LENGTH)
            static_logits(model, cache, tokens, mask)
            static_logits(model, cache, part, second)
        assert meter.report()["layers"][0]["tokens"] == 18 + 14


def test_a_mask_that_stops_before_the_new_tokens_is_refused() -> None:
    model, (tokens, mask) = make("olmoe"), padded_prompt()
    with capacity_aware(model, "score", gamma=0.5), torch.no_grad():
        prompt = model(tokens, attention_mask=mask, use_cache=True)
        with pytest.raises(UsageError, match=r"\(4, 1\) does not cover .* pass \(4, 7\)"):
            model(
                tokens[:, :1],
                attention_mask=torch.ones(4, 1),
                past_key_values=prompt.past_key_values,
            )


def test_real_tokens_must_have_the_batchs_shape() -> None:
    model = make("olmoe")
    with (
        capacity_aware(model, "score", gamma=0.5) as meter,
        pytest.raises(UsageError, match=r"real_tokens: .*\(4, 13\) is not that of the batch"),
        meter.real_tokens(torch.ones(4, 13)),
    ):
        model(batch())


# Something counts.


def test_a_forward_in_which_nothing_counts_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that reads the wrong columns finds pads alone, and every expert is silent."""
    model, (tokens, mask) = make("olmoe"), padded_prompt()
    monkeypatch.setattr(
        forward, "new_columns", lambda mask, tokens, _: mask[:, -tokens.shape[1] :].bool()
    )
    with capacity_aware(model, "score", gamma=0.5) as meter:
        cache = StaticCache(config=model.config, max_cache_len=LENGTH)
        with pytest.raises(EnforcementError, match="no token of a forward counted"):
            static_logits(model, cache, tokens, full_length_mask(mask))
    promise = meter.proofs()["tokens_counted"]
    assert promise == {"passed": False, "uncounted": 1, "all_pads": 0, "checked": 1}


def test_a_batch_of_pads_alone_counts_nothing() -> None:
    model = make("olmoe")
    with torch.no_grad(), capacity_aware(model, "score", gamma=0.5) as meter:
        model(batch(), attention_mask=torch.zeros(4, 12))
        model(batch(), attention_mask=torch.ones(4, 12))
    promise = meter.proofs()["tokens_counted"]
    assert promise == {"passed": True, "uncounted": 0, "all_pads": 1, "checked": 2}
    assert meter.summary()["tokens"] == 48


def test_a_decode_step_without_a_capacity_need_not_count() -> None:
    model, (tokens, mask) = make("olmoe"), padded_prompt()
    with torch.no_grad(), capacity_aware(model, "score", gamma=0.5) as meter:
        cache = model(tokens, attention_mask=mask, use_cache=True).past_key_values
        mask = torch.cat([mask, torch.zeros(4, 1)], dim=1)
        model(tokens[:, :1], attention_mask=mask, past_key_values=cache)
    promise = meter.proofs()["tokens_counted"]
    assert promise == {"passed": True, "uncounted": 0, "all_pads": 0, "checked": 1}


# Generation.


@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_a_static_cache_generates_and_counts_as_a_dynamic_one(name: str) -> None:
    model = make(name)
    dynamic, dynamic_meter = generate(model)
    static, static_meter = generate(model, cache_implementation="static")
    assert torch.equal(static, dynamic)
    assert counted(static_meter) == counted(dynamic_meter)
    assert dynamic_meter.summary()["tokens"] == 18


def test_a_prompt_without_pads_generates_with_a_static_cache() -> None:
    """transformers lays a mask of ones aside before it makes the static cache's own."""
    model, (tokens, _) = make("olmoe"), padded_prompt()
    for mask in (torch.ones_like(tokens), None):
        meters = []
        for cache in ({}, {"cache_implementation": "static"}):
            with torch.no_grad(), capacity_aware(model, "score", gamma=1.0) as meter:
                model.generate(tokens, attention_mask=mask, max_new_tokens=5, **cache)
            meters.append(counted(meter))
        assert meters[0] == meters[1]
        assert meter.summary()["tokens"] == tokens.numel()


def test_constrained_decoding_counts_alike_with_both_caches() -> None:
    model = make("olmoe")
    dynamic, dynamic_meter = generate(model, decode="constrained")
    static, static_meter = generate(model, decode="constrained", cache_implementation="static")
    assert torch.equal(static, dynamic)
    assert counted(static_meter) == counted(dynamic_meter)
    assert dynamic_meter.summary()["tokens"] == 18 + 4 * 4


def test_without_a_cache_only_the_prompt_is_under_the_capacity() -> None:
    model = make("olmoe")
    _, meter = generate(model, use_cache=False)
    assert (meter.forwards, meter.decode_forwards) == (5, 4)
    assert meter.summary()["tokens"] == 18
    assert meter.report()["layers"][0]["forwards"] == 1


def test_without_a_cache_a_decode_step_is_the_stock_forward() -> None:
    """The second token is the stock model's choice after the first, which γ = 0 made."""
    model = make("olmoe")
    tokens = batch(n_positions=6)
    with capacity_aware(model, "score", gamma=0.0):
        generated = model.generate(tokens, max_new_tokens=2, do_sample=False, use_cache=False)
    with torch.no_grad():
        stock = model(generated[:, :-1]).logits[:, -1].argmax(dim=-1)
    assert torch.equal(generated[:, -1], stock)


def test_without_a_cache_constrained_decoding_counts_all_that_is_computed() -> None:
    _, meter = generate(make("olmoe"), use_cache=False, decode="constrained")
    assert (meter.forwards, meter.decode_forwards) == (5, 4)
    assert meter.summary()["tokens"] == sum(18 + 4 * step for step in range(5))


def test_every_generation_begins_anew() -> None:
    model = make("olmoe")
    tokens, mask = padded_prompt()
    with capacity_aware(model, "score", gamma=0.5) as meter:
        for _ in range(2):
            model.generate(
                tokens,
                attention_mask=mask,
                max_new_tokens=3,
                min_new_tokens=3,
                do_sample=False,
                use_cache=False,
            )
        with torch.no_grad():
            model(tokens[:, :1])
    assert (meter.forwards, meter.decode_forwards) == (7, 4)
    assert meter.summary()["tokens"] == 18 + 18 + 4


def test_a_prompt_in_chunks_is_a_prompt() -> None:
    """Also its last chunk, of one token."""
    _, whole = generate(make("olmoe"))
    _, meter = generate(make("olmoe"), prefill_chunk_size=5)
    assert (meter.forwards, meter.decode_forwards) == (6, 4)
    assert meter.summary()["tokens"] == whole.summary()["tokens"] == 18


def test_beams_are_sequences() -> None:
    _, meter = generate(make("olmoe"), num_beams=2)
    _, without_cache = generate(make("olmoe"), num_beams=2, use_cache=False)
    assert meter.summary()["tokens"] == without_cache.summary()["tokens"] == 36
    assert meter.decode_forwards == without_cache.decode_forwards == 4


def test_under_constrained_decoding_every_beam_is_live() -> None:
    """A beam that finishes leaves the search, so that none of the computed ones has finished."""
    model = make("olmoe")
    _, meter = generate(model, num_beams=2, decode="constrained")
    assert meter.summary()["tokens"] == 36 + 4 * 8
    # A token that only some of the candidates end in, and that ends their search.
    free, _ = generate(model, num_beams=2, num_return_sequences=2, decode="constrained")
    tokens, mask = padded_prompt()
    with capacity_aware(model, "score", gamma=0.5, decode="constrained") as meter:
        model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=5,
            do_sample=False,
            num_beams=2,
            eos_token_id=int(free[0, 7]),
            length_penalty=5.0,  # longer answers are better: the search goes on
        )
    steps = meter.decode_forwards
    assert steps > 1
    assert meter.summary()["tokens"] == 36 + 8 * steps


def test_forwards_of_a_generation_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers would: with a static cache on a GPU; the caller's options stay."""
    model, asked = make("olmoe"), []
    monkeypatch.setattr(
        type(model),
        "_valid_auto_compile_criteria",
        lambda _self, _kwargs, options: asked.append(options.disable_compile),
    )
    options = GenerationConfig(max_new_tokens=3)
    with capacity_aware(model, "score", gamma=0.5):
        model.generate(batch(), generation_config=options)
    assert asked == [True] and not options.disable_compile


def test_a_failed_generation_leaves_nothing_behind() -> None:
    model = make("olmoe")
    methods = set(vars(model))
    with capacity_aware(model, "score", gamma=0.5) as meter:
        with pytest.raises(IndexError):
            model.generate(torch.full((2, 3), 1000), max_new_tokens=2)
        with torch.no_grad():
            model(batch())
    assert meter.summary()["tokens"] == 48
    assert set(vars(model)) == methods


def test_a_generation_that_is_broken_off_between_steps_is_over() -> None:
    """The next forward is a prompt, although the broken one would have been a decode step."""
    model = make("olmoe")
    calls: list[int] = []

    def break_off(_model: nn.Module, _args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with capacity_aware(model, "score", gamma=0.5) as meter:
        handle = model.register_forward_pre_hook(break_off, prepend=True)
        with pytest.raises(KeyboardInterrupt):
            model.generate(batch(n_positions=6), max_new_tokens=4, use_cache=False)
        handle.remove()
        with torch.no_grad():
            model(batch())
    assert (meter.forwards, meter.decode_forwards) == (2, 0)
    assert meter.summary()["tokens"] == 24 + 48


def test_a_loop_of_ones_own_begins_with_a_prompt() -> None:
    """Also after a generation: only that one says which of its forwards are the first."""
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5) as meter, torch.no_grad():
        model.generate(batch(n_positions=6), max_new_tokens=1, use_cache=False)
        model(**model.prepare_inputs_for_generation(batch(), use_cache=False))
    assert (meter.forwards, meter.decode_forwards) == (2, 0)
    assert meter.summary()["tokens"] == 24 + 48


# Sequences that finish before others of their batch.


class Ends(StoppingCriteria):
    """Finishes sequence b when it has as many tokens as ``lengths[b]``."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids.shape[1] >= self.lengths


class EndsTogether(Ends):
    """Finishes a batch when all of it is done, as lm-eval's criteria for stop strings do."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        self.done_tracker = super().__call__(input_ids, scores).tolist()
        return all(self.done_tracker)


LENGTHS = [8, 7, 10, 11]  # of which 3, 2, 2, 1 are above 7, 8, 9, 10: who makes the next token


def generate_until(criterion: StoppingCriteria | None, **options: Any) -> tuple[Tensor, Meter]:
    """Return what a model makes of prompts of 6 tokens, every step under a capacity."""
    model = make("olmoe")
    model.generation_config.eos_token_id = options.pop("eos", None)
    knobs = {"gamma": 0.5, "decode": "constrained"} | options.pop("knobs", {})
    with capacity_aware(model, "score", **knobs) as meter:
        generated = model.generate(
            batch(n_positions=6),
            max_new_tokens=5,
            do_sample=False,
            stopping_criteria=[criterion] if criterion else None,
            **options,
        )
    return generated, meter


@pytest.mark.parametrize("criterion", [Ends, EndsTogether])
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"use_cache": False}])
def test_a_finished_sequence_takes_no_slot(criterion: type[Ends], options: dict[str, Any]) -> None:
    _, meter = generate_until(criterion(LENGTHS), **options)
    assert meter.decode_forwards == 4
    live = [3, 2, 2, 1]
    computed = [7, 8, 9, 10] if "use_cache" in options else [1, 1, 1, 1]
    tokens = 4 * 6 + sum(n * each for n, each in zip(live, computed, strict=True))
    summary = meter.summary()
    assert summary["tokens"] == tokens
    assert summary["decode"]["live"] == sum(live) / 4
    assert meter.proofs()["pads_take_no_slot"]["passed"]


def test_a_sequence_that_ended_itself_takes_no_slot() -> None:
    whole, _ = generate_until(None)
    eos = int(whole[2, 7])  # the second token that the third sequence makes
    made = (whole[:, 6:] == eos).int()
    ends = [int(row.argmax()) if row.any() else 5 for row in made]  # tokens before it
    _, meter = generate_until(None, eos=eos, pad_token_id=0)
    live = [sum(end >= step for end in ends) for step in range(1, 5)]
    assert min(live) < 4
    assert meter.summary()["decode"]["live"] == sum(live) / 4


def test_what_a_finished_companion_would_be_given_changes_nothing() -> None:
    """The live sequences' tokens are the same whatever the finished ones are fed with."""
    texts = [
        generate_until(Ends(LENGTHS), eos=96, pad_token_id=pad, knobs={"gamma": 0.2})[0]
        for pad in (0, 5, 11, 23)
    ]
    assert [int(text[1, -1]) for text in texts] == [0, 5, 11, 23]
    for text in texts:
        assert torch.equal(text[3], texts[0][3]) and torch.equal(text[2, :10], texts[0][2, :10])


def test_finished_sequences_count_where_pads_do() -> None:
    _, meter = generate_until(Ends(LENGTHS), knobs={"count_padding": True})
    assert meter.summary()["tokens"] == 4 * 6 + 4 * 4
    assert meter.summary()["decode"]["live"] == 4


def test_the_next_generation_begins_with_all_of_its_sequences() -> None:
    model = make("olmoe")
    model.generation_config.eos_token_id = None
    with capacity_aware(model, "score", gamma=0.5, decode="constrained") as meter:
        for criteria in ([Ends(LENGTHS)], None):
            model.generate(batch(n_positions=6), max_new_tokens=5, stopping_criteria=criteria)
    assert meter.summary()["tokens"] == 2 * 24 + (3 + 2 + 2 + 1) + 4 * 4


def test_a_batch_of_finished_sequences_alone_counts_nothing() -> None:
    """As with lm-eval's stop strings, of which each waits for the whole batch by itself."""

    class Never(EndsTogether):
        def __call__(self, *call: Any, **_: Any) -> Any:
            super().__call__(*call)
            return False

    _, meter = generate_until(Never([7, 7, 8, 8]))
    assert meter.summary()["tokens"] == 24 + 2
    promise = meter.proofs()["tokens_counted"]
    assert promise == {"passed": True, "uncounted": 0, "all_pads": 3, "checked": 5}


def test_statistics_of_decode_steps_are_those_of_decode_steps_alone() -> None:
    _, meter = generate_until(Ends([11] * 4))
    told = meter.summary()["decode"]
    layers = meter.report()["layers"]
    with capacity_aware(make("olmoe"), "score", gamma=0.5) as prompt:
        pass
    _, without = generate_until(Ends([11] * 4), knobs={"decode": "unconstrained"})
    assert "decode" not in without.summary() and "decode" not in prompt.summary()
    # Both computed the same prompt.
    first = without.report()["layers"]

    def more(name: str) -> int:
        return sum(a[name] - b[name] for a, b in zip(layers, first, strict=True))

    assert told["drop_rate"] == more("dropped") / more("assignments") > 0
    assert told["effective_gamma"] == more("slots") / more("assignments")
    assert told["live"] == 4
