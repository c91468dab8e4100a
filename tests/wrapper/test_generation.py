"""Generations: which tokens count with every kind of cache, whatever object generates."""

import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, StoppingCriteria

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import batch, counted, make

pytestmark = pytest.mark.numeric

PROMPT = (6, 3, 6, 3)
"""The real tokens of four left-padded sequences."""


def padded_prompt() -> tuple[Tensor, Tensor]:
    """Return left-padded tokens and their mask [4, 6]."""
    mask = torch.arange(6) >= 6 - torch.tensor(PROMPT)[:, None]
    return batch(n_positions=6), mask.long()


def generate(
    model: Any, decode: str = "unconstrained", *, target: Any = None, by: Any = None, **options: Any
) -> tuple[Tensor, Meter]:
    """Return 5 tokens for each of :func:`padded_prompt` under Token Drop at γ = 0.5, and the meter.

    ``target`` is under the capacity, and ``by`` generates: the model, if nothing else is said.
    """
    tokens, mask = padded_prompt()
    model.generation_config.eos_token_id = None
    settings = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, **options}
    with capacity_aware(target or model, "score", gamma=0.5, decode=decode) as meter:
        generated = (by or model.generate)(input_ids=tokens, **settings)
    return generated, meter


# Sequences finish before others of their batch.


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


def generate_until(criterion: StoppingCriteria, **options: Any) -> tuple[Tensor, Meter]:
    """Return what a model makes of prompts of 6 tokens, every step under a capacity."""
    whole = {"attention_mask": torch.ones(4, 6), "stopping_criteria": [criterion]}
    return generate(make("olmoe"), "constrained", **whole, **options)


def test_a_sequence_that_ended_itself_takes_no_slot() -> None:
    never = Ends([99] * 4)
    text, _ = generate_until(never)
    eos = int(text[2, 7])  # the second token that the third sequence makes
    made = (text[:, 6:] == eos).int()
    ends = [int(row.argmax()) if row.any() else 5 for row in made]  # tokens before it
    _, meter = generate_until(never, eos_token_id=eos, pad_token_id=0)
    live = [sum(end >= step for end in ends) for step in range(1, 5)]
    assert min(live) < 4
    assert meter.summary()["decode"]["live"] == sum(live) / 4


def test_statistics_of_decode_steps_are_those_of_decode_steps_alone() -> None:
    _, meter = generate_until(Ends([11] * 4))
    _, prompt = generate(make("olmoe"), attention_mask=torch.ones(4, 6))
    assert "decode" not in prompt.summary()

    def more(name: str) -> int:
        """Return what the decode steps added to what both computed of the prompt."""
        of_layers = zip(meter.report()["layers"], prompt.report()["layers"], strict=True)
        return sum(both[name] - first[name] for both, first in of_layers)

    steps = meter.summary()["decode"]
    assert steps["drop_rate"] == more("dropped") / more("assignments") > 0
    assert steps["effective_gamma"] == more("slots") / more("assignments")
    assert steps["live"] == 4


# Generations are followed whatever object runs them, or refused in one line.


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


def in_a_thread(generate: Generate) -> Generate:
    """Generate in another thread, as servers and streamers do."""
    return lambda **call: ThreadPoolExecutor(1).submit(generate, **call).result()


def adapter(model: Any) -> Case:
    around = Adapter(model)
    return around, around.generate


OBJECTS: dict[str, Callable[[Any], Case]] = {
    "whole": lambda model: (model, model.generate),
    "without head": lambda model: (model.model, model.generate),
    "adapter": adapter,
    "parent": lambda model: (nn.ModuleDict({"lm": model}), model.generate),
    "in a thread": lambda model: (model, in_a_thread(model.generate)),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"use_cache": False},
    {"cache_implementation": "static"},
    {"prefill_chunk_size": 5},  # also its last chunk, of one token
    {"num_beams": 2},  # beams are sequences
]


def counts(decode: str, options: dict[str, Any]) -> tuple[int, int]:
    """Return the forwards under the capacity, and the tokens that count in them."""
    if "num_beams" in options:  # none of which finishes
        prompt, steps = 2 * sum(PROMPT), [8] * 4
    else:
        prompt = sum(PROMPT)
        rows, cached = zip(PROMPT, LENGTHS, strict=True), "use_cache" not in options
        steps = [
            1 if cached else real + step
            for real, end in rows
            for step in range(1, end - 6)
            if step < 5
        ]
    prompts = 2 if "prefill_chunk_size" in options else 1
    return {
        "unconstrained": (prompts, prompt),
        "constrained": (prompts + 4, prompt + sum(steps)),
        "only": (4, sum(steps)),
    }[decode]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("decode", "objects"),
    [
        ("unconstrained", OBJECTS),
        ("constrained", ["whole"]),
        pytest.param("constrained", OBJECTS, marks=pytest.mark.slow),
        pytest.param("only", OBJECTS, marks=pytest.mark.slow),
    ],
)
def test_a_generation_counts_its_tokens_whatever_object_runs_it(
    decode: str, objects: Iterable[str], options: dict[str, Any]
) -> None:
    """A finished sequence takes no slot; nor a pad."""
    answers, reports = [], []
    for name, criterion in itertools.product(objects, (Ends, EndsTogether)):
        model = make("olmoe")
        target, by = OBJECTS[name](model)  # bound before the block
        criteria = [] if "num_beams" in options else [criterion(LENGTHS)]
        text, meter = generate(
            model, decode, target=target, by=by, stopping_criteria=criteria, **options
        )
        report = counted(meter)
        for layer in report["layers"]:
            del layer["name"]
        layer_forwards = report["layers"][0]["forwards"]
        assert (layer_forwards, report["summary"]["tokens"]) == counts(decode, options), name
        assert (meter.forwards, meter.decode_forwards) == (counts("constrained", options)[0], 4)
        assert meter.proofs()["pads_take_no_slot"]["passed"]
        answers.append(text.tolist())
        reports.append(report)
    assert all(answer == answers[0] for answer in answers)
    assert all(report == reports[0] for report in reports)


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


ASSISTED = "assisted decoding .* drafted tokens"
NO_STEPS = "generate: it runs the model in forwards that are not the steps"
PACKED = "generate_batch: continuous batching"


REPEATED = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])


def with_options(options: Callable[[Any], dict[str, Any]]) -> Callable[[Any, Generate], Any]:
    return lambda model, generate: generate(
        REPEATED, max_new_tokens=8, do_sample=False, **options(model)
    )


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (with_options(lambda _: {"prompt_lookup_num_tokens": 3}), ASSISTED),
        (with_options(lambda _: {"assistant_model": make("mixtral")}), ASSISTED),
        (with_options(lambda _: {"custom_generate": loop_of_ones_own}), NO_STEPS),
        (with_options(lambda _: {"guidance_scale": 1.5}), NO_STEPS),
        (with_options(lambda model: {"logits_processor": [Asks(model)]}), NO_STEPS),
        (with_options(lambda _: {"cache_implementation": "paged"}), PACKED),
        (lambda model, _: model.generate_batch(batch().tolist()), PACKED),
        # as a manager of continuous batching from before the block packs them
        (
            lambda model, _: model(batch(n_sequences=1), cu_seq_lens_q=torch.tensor([0, 4, 12])),
            "cu_seq_lens_q: sequences are packed into one row",
        ),
        (
            lambda model, _: model(batch(), position_ids=torch.tensor([[*range(4), *range(8)]])),
            "position_ids: do not count on within a row: sequences are packed into one row",
        ),
        (
            lambda model, _: make("mixtral").generate(batch(n_sequences=1), assistant_model=model),
            ASSISTED,
        ),
    ],
)
def test_other_ways_to_generate_are_refused_in_one_line(
    call: Callable[[Any, Generate], Any], line: str
) -> None:
    model = make("olmoe")
    target, generate = adapter(model)
    with capacity_aware(target, "score", gamma=0.5) as meter:
        with pytest.raises(UsageError, match=line) as error:
            call(model, generate)
        assert "\n" not in str(error.value)
        before = (meter.forwards, meter.decode_forwards)
        generate(REPEATED, max_new_tokens=3, do_sample=False)
    assert (meter.forwards, meter.decode_forwards) == (before[0] + 3, before[1] + 2)


def test_a_part_that_is_called_alone_is_refused() -> None:
    model = make("olmoe")
    line = "outside a forward.*put that under a capacity"
    with capacity_aware(model, "score", gamma=0.5), pytest.raises(EnforcementError, match=line):
        model.model(batch())
