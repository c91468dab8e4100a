"""Generations are followed whatever object runs them, or refused in one line."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationMixin, LogitsProcessor

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import batch, counted, make
from tests.wrapper.test_generation import Ends

Generate = Callable[..., Any]
Case = tuple[nn.Module, Generate]


class Adapter(nn.Module):
    """An adapter around a model, which generates and forwards as PEFT's do.

    Its ``generate`` puts a method of its own into the model, and its ``forward`` calls the model's
    ``forward`` without its hooks.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.stock_preparation = model.prepare_inputs_for_generation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return self.stock_preparation(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.model.prepare_inputs_for_generation = self.prepare_inputs_for_generation
        try:
            return self.model.generate(*args, **kwargs)
        finally:
            self.model.prepare_inputs_for_generation = self.stock_preparation


class Parent(nn.Module):
    """A module that has a model and knows nothing of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"lm": model})

    def forward(self, tokens: Tensor, **kwargs: Any) -> Any:
        return self.inner["lm"](tokens, **kwargs)


def in_a_thread(generate: Generate) -> Generate:
    """Generate in another thread, as servers and streamers do."""

    def started(*args: Any, **kwargs: Any) -> Any:
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(generate(*args, **kwargs)))
        thread.start()
        thread.join()
        return answers[0]

    return started


def adapter(model: Any) -> Case:
    around = Adapter(model)
    return around, around.generate


CASES: dict[str, Callable[[Any], Case]] = {
    "whole": lambda model: (model, model.generate),
    "without head": lambda model: (model.model, model.generate),
    "adapter": adapter,
    "adapted": lambda model: (model, Adapter(model).generate),
    "parent": lambda model: (Parent(model), model.generate),
    "in a thread": lambda model: (model, in_a_thread(model.generate)),
    "by the class": lambda model: (
        model,
        lambda *args, **kwargs: type(model).generate(model, *args, **kwargs),
    ),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"use_cache": False},
    {"cache_implementation": "static"},
    {"prefill_chunk_size": 4},
    {"num_beams": 2},
]


def run(case: str, decode: str, options: dict[str, Any]) -> tuple[list[Any], Meter]:
    """Return what is generated under the capacity of a case, whose sequences finish one by one."""
    model = make("olmoe")
    model.generation_config.eos_token_id = None
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[1, :3] = 0
    target, generate = CASES[case](model)  # bound before the block
    criteria = [] if "num_beams" in options else [Ends([8, 7, 10, 11])]
    options = {"max_new_tokens": 5, "do_sample": False, "stopping_criteria": criteria, **options}
    with capacity_aware(target, "score", gamma=0.5, decode=decode) as meter:
        answers = generate(input_ids=batch(n_positions=6), attention_mask=mask, **options)
    return answers.tolist(), meter


def nameless(meter: Meter) -> dict[str, Any]:
    """Return all that a meter counted, without the names of layers."""
    every = counted(meter)
    for layer in every["layers"]:
        del layer["name"]
    return every


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "decode",
    [
        "unconstrained",
        pytest.param("constrained", marks=pytest.mark.slow),
        pytest.param("only", marks=pytest.mark.slow),
    ],
)
def test_a_generation_counts_alike_whatever_object_runs_it(
    decode: str, options: dict[str, Any]
) -> None:
    answers, meter = run("whole", decode, options)
    assert meter.decode_forwards == 4
    for case in CASES:
        other_answers, other_meter = run(case, decode, options)
        assert nameless(other_meter) == nameless(meter), case
        assert other_answers == answers, case


class Asks(LogitsProcessor):
    """A processor that runs a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.model(input_ids)
        return scores


def test_a_generation_of_another_model_may_ask_this_one() -> None:
    """Its processors' forwards of our model are plain ones."""
    ours, other = make("olmoe"), make("mixtral")
    with capacity_aware(ours, "score", gamma=0.5) as meter:
        other.generate(batch(), max_new_tokens=2, logits_processor=[Asks(ours)])
    assert meter.summary()["tokens"] == 4 * 12 + 4 * 13


# What is refused.


def loop_of_ones_own(model: Any, input_ids: Tensor, **options: Any) -> Tensor:
    for _ in range(2):
        logits = model(input_ids, use_cache=False).logits[:, -1]
        input_ids = torch.cat([input_ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return input_ids


def greedy(model: Any, *args: Any, **kwargs: Any) -> Any:
    return GenerationMixin._sample(model, *args, **kwargs)


ASSISTED = "assisted decoding .* drafted tokens"
NO_STEPS = "generate: it runs the model in forwards that are not the steps"
PACKED = "generate_batch: continuous batching"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (lambda _: {"prompt_lookup_num_tokens": 3}, ASSISTED),
        (lambda _: {"assistant_model": make("mixtral")}, ASSISTED),
        (lambda _: {"assistant_early_exit": 1}, ASSISTED),
        (lambda _: {"custom_generate": loop_of_ones_own}, NO_STEPS),
        (lambda _: {"guidance_scale": 1.5}, NO_STEPS),
        (lambda model: {"logits_processor": [Asks(model)]}, NO_STEPS),
        (lambda _: {"cache_implementation": "paged"}, PACKED),
    ],
)
@pytest.mark.parametrize("case", ["whole", "adapter"])
def test_other_ways_to_generate_are_refused_in_one_line(
    case: str, options: Callable[[Any], dict[str, Any]], line: str
) -> None:
    model = make("olmoe")
    target, generate = CASES[case](model)
    tokens = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    with capacity_aware(target, "score", gamma=0.5) as meter:
        with pytest.raises(UsageError, match=line) as error:
            generate(tokens, max_new_tokens=8, do_sample=False, **options(model))
        assert "\n" not in str(error.value)
        before = (meter.forwards, meter.decode_forwards)
        generate(tokens, max_new_tokens=3, do_sample=False)
    assert (meter.forwards, meter.decode_forwards) == (before[0] + 3, before[1] + 2)


def test_a_custom_loop_that_runs_transformers_own_is_followed() -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5) as meter:
        model.generate(batch(), max_new_tokens=3, use_cache=False, custom_generate=greedy)
    assert (meter.forwards, meter.decode_forwards) == (3, 2)


@pytest.mark.parametrize(
    ("call", "error", "line"),
    [
        (lambda m: m.generate_batch(batch().tolist()), UsageError, PACKED),
        (lambda m: m.init_continuous_batching(), UsageError, PACKED),
        # as a manager of continuous batching from before the block packs them
        (
            lambda m: m(batch(n_sequences=1), cu_seq_lens_q=torch.tensor([0, 4, 12])),
            UsageError,
            "cu_seq_lens_q: sequences are packed into one row",
        ),
        (
            lambda m: m(batch(n_sequences=1), seq_idx=torch.tensor([[0] * 4 + [1] * 8])),
            UsageError,
            "seq_idx: sequences are packed into one row",
        ),
        (
            lambda m: m(batch(), position_ids=torch.tensor([[*range(4), *range(8)]])),
            UsageError,
            "position_ids: do not count on within a row: sequences are packed into one row",
        ),
        (
            lambda m: make("mixtral").generate(batch(n_sequences=1), assistant_model=m),
            UsageError,
            ASSISTED,
        ),
        (
            lambda m: m.model(batch()),
            EnforcementError,
            "outside a forward.*put the part under the capacity that is called",
        ),
    ],
)
def test_other_calls_are_refused(
    call: Callable[[Any], Any], error: type[Exception], line: str
) -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5), pytest.raises(error, match=line):
        call(model)
