"""A forward runs alone, counts whole or not at all, and leaves nothing behind in any copy."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationMixin, LogitsProcessor

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.extensions.adaptive_gamma.curves import Curves
from capmoe_eval.extensions.sere.similarity import Similarities
from capmoe_eval.wrapper import hook
from capmoe_eval.wrapper.layers import is_experts
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.observers.trace import Recorder
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper import images
from tests.wrapper.models import batch, make, similarities
from tests.wrapper.test_generation import counted

ALONE = "a forward of the model began while another one ran"


@torch.no_grad()
def run(model: Any, tokens: Tensor, **options: Any) -> Tensor:
    return model(tokens, **options).logits


@contextmanager
def during(module: nn.Module, act: Callable[[], Any]) -> Iterator[None]:
    """Do something whenever a module begins."""
    handle = module.register_forward_pre_hook(lambda *_: (act(), None)[1])
    try:
        yield
    finally:
        handle.remove()


# One forward at a time.


def outcome(act: Callable[[], Any]) -> Any:
    """Return the result of a function, or its exception."""
    try:
        return act()
    except Exception as error:
        return error


def in_thread(act: Callable[[], Any]) -> Any:
    """Return the outcome of a function in another thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(outcome(act)))
    thread.start()
    thread.join()
    return results[0]


def aside(meter: Meter, act: Callable[[], Any]) -> Any:
    with meter.aside():
        return act()


@pytest.mark.parametrize("is_aside", [False, True])
@pytest.mark.parametrize("place", ["model.embed_tokens", "model.layers.1.mlp.experts", "lm_head"])
def test_a_forward_of_another_thread_is_refused(place: str, is_aside: bool) -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5) as expected_meter:
        expected = run(model, batch())
    errors: list[Any] = []
    with capacity_aware(model, "score", gamma=0.5) as meter:

        def other() -> Tensor:
            return run(model, batch(1))

        def disturb() -> None:
            if not errors:  # nor by the forward that disturbs
                errors.append(None)
                act = (lambda: aside(meter, other)) if is_aside else other
                errors[0] = in_thread(act)

        with during(model.get_submodule(place), disturb):
            logits = run(model, batch())
        assert torch.equal(logits, expected) and counted(meter) == counted(expected_meter)
        run(model, batch(1))
    assert isinstance(errors[0], UsageError) and ALONE in str(errors[0])
    assert "\n" not in str(errors[0])


@pytest.mark.parametrize("place", ["model.embed_tokens", "model.layers.1.mlp.experts", "lm_head"])
def test_a_forward_inside_another_is_refused(place: str) -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5) as meter:
        with (
            during(model.get_submodule(place), lambda: run(model, batch(1))),
            pytest.raises(UsageError, match=ALONE),
        ):
            run(model, batch())
        assert meter.forwards == meter.report()["layers"][0]["forwards"] == 0
        run(model, batch())
    assert meter.summary()["tokens"] == 48


def test_a_part_that_another_thread_calls_is_refused() -> None:
    model, errors = make("olmoe"), []
    part = model.model.layers[0].mlp
    with capacity_aware(model, "score", gamma=0.5) as meter:
        act = lambda: errors.append(in_thread(lambda: part(torch.randn(4, 12, 32))))  # noqa: E731
        with during(model.lm_head, act):
            run(model, batch())
    assert isinstance(errors[0], EnforcementError)
    assert "outside a forward" in str(errors[0])
    assert meter.report()["layers"][0]["forwards"] == 1


def test_threads_take_turns() -> None:
    """A mask, and the block in which nothing counts, are of the thread that opens them."""
    model = make("olmoe")
    mask = torch.zeros(4, 12)
    mask[:, :3] = 1
    with capacity_aware(model, "score", gamma=0.5) as meter:
        with meter.real_tokens(mask):
            in_thread(lambda: run(model, batch()))
        assert meter.summary()["tokens"] == 48
        with meter.aside():
            in_thread(lambda: run(model, batch()))
        assert meter.summary()["tokens"] == 96
        with meter.aside():
            run(model, batch())
    assert meter.summary()["tokens"] == 96


@pytest.mark.parametrize("place", ["between steps", "in a forward"])
def test_a_block_does_not_end_before_its_generations(place: str) -> None:
    """A streamer's thread would go on without a capacity, and nobody would see it."""
    model = make("olmoe")
    waits, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        goes_on.wait(60)

    class Waits(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            wait()
            return scores

    processors = [Waits()] if place == "between steps" else []
    options: dict[str, Any] = {"max_new_tokens": 3, "logits_processor": processors}
    thread = threading.Thread(target=lambda: outcome(lambda: model.generate(batch(), **options)))
    before = state(model)
    with (
        during(model.lm_head, wait if place == "in a forward" else lambda: None),
        pytest.raises(UsageError, match=r"the block ended while .* in another thread"),
        capacity_aware(model, "score", gamma=0.5, verify=False),
    ):
        thread.start()
        waits.wait(60)
    goes_on.set()
    thread.join()
    assert same(state(model), before)


def test_two_threads_cannot_both_begin_a_block() -> None:
    model = make("olmoe")
    ready = threading.Barrier(2)
    outcomes: list[str] = []

    def begin() -> None:
        ready.wait()
        try:
            with capacity_aware(model, "score", gamma=0.5):
                outcomes.append("began")
                left.wait(60)  # for ever, if both began
        except UsageError as error:
            outcomes.append("refused" if "already under a capacity" in str(error) else "?")
            left.set()

    left = threading.Event()
    threads = [threading.Thread(target=begin) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["began", "refused"]


# Whole or not at all.

PLACES = ["model.embed_tokens", "model.layers.0.mlp.experts", "model.layers.1.mlp", "lm_head"]
METHODS: list[dict[str, Any]] = [
    {"method": "score", "gamma": 0.5},
    {"method": "random", "gamma": 0.5},
    {"method": "baseline"},
    {"method": "oea", "k0": 1},
    {"method": "sere", "calibrated": True},
    {"method": "score", "gamma": 0.5, "decode": "constrained"},
]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("knobs", METHODS)
def test_a_forward_that_is_broken_off_counts_nothing(
    knobs: dict[str, Any], place: str, error: type[BaseException]
) -> None:
    model = make("olmoe")
    if "calibrated" in knobs:
        knobs = knobs | {"calibrated": similarities(model)}

    def break_off() -> None:
        raise error("stop")

    def forwards(*, disturbed: bool) -> tuple[list[Tensor], Meter]:
        logits = []
        with capacity_aware(model, verify=False, **knobs) as meter:
            for seed in range(2):
                if disturbed:
                    before = copy.deepcopy(counted(meter)) if seed else None
                    with during(model.get_submodule(place), break_off), pytest.raises(error):
                        run(model, batch(7 + seed))
                    assert before is None or counted(meter) == before
                logits.append(run(model, batch(seed)))
        return logits, meter

    expected, expected_meter = forwards(disturbed=False)
    logits, meter = forwards(disturbed=True)
    assert all(map(torch.equal, logits, expected))
    assert counted(meter) == counted(expected_meter)
    assert meter.proofs() == expected_meter.proofs()


def test_images_of_a_forward_that_is_broken_off_are_not_counted() -> None:
    model, inputs = images.make("llava"), images.batch("llava")

    def break_off() -> None:
        raise RuntimeError("stop")

    with torch.no_grad(), capacity_aware(model, "score", gamma=0.5) as expected:
        model(**inputs)
    with torch.no_grad(), capacity_aware(model, "score", gamma=0.5) as meter:
        with during(model.lm_head, break_off), pytest.raises(RuntimeError):
            model(**inputs)
        model(**inputs)
    assert counted(meter) == counted(expected)


def test_a_decode_step_that_is_broken_off_counts_nothing() -> None:
    model = make("olmoe")
    calls: list[int] = []

    def break_off_second() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with capacity_aware(model, "score", gamma=0.5, decode="constrained") as meter:
        with during(model.lm_head, break_off_second), pytest.raises(KeyboardInterrupt):
            model.generate(batch(), max_new_tokens=4, do_sample=False)
        assert (meter.forwards, meter.decode_forwards) == (1, 0)
        assert meter.summary()["tokens"] == 48
        run(model, batch())
    assert (meter.forwards, meter.decode_forwards) == (2, 0)


def test_a_broken_promise_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5) as meter:
        monkeypatch.setattr(hook, "combine", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(model, batch())
        monkeypatch.undo()
        layer = meter.layers[0]
        with (
            during(layer.experts, lambda: None),
            pytest.raises(EnforcementError, match="not every MoE layer ran"),
        ):
            model.model.layers[1].mlp.forward = lambda hidden: hidden
            run(model, batch())
    assert meter.forwards == 1


def test_what_observers_keep_has_nothing_of_half_a_forward() -> None:
    model = make("olmoe")

    def break_off() -> None:
        raise RuntimeError("stop")

    with capacity_aware(model, "score", gamma=0.5) as meter:
        recorder, similarities = Recorder(1000), Similarities(meter.layers, 1000)
        curves = Curves(meter.layers, meter.method, (0.5,))
        for observer in (recorder, similarities, curves):
            meter.observe(observer)
        with pytest.raises(UsageError, match="does not cover"):
            run(model, batch(), attention_mask=torch.ones(4, 3))
        run(model, batch())
        once = curves.curves()
        with during(model.lm_head, break_off), pytest.raises(RuntimeError):
            run(model, batch(1))
        assert curves.curves() == once
        run(model, batch())
    assert recorder.tokens == recorder.seen == similarities.tokens == 2 * batch().numel()
    recorded = recorder.recorded()
    for array_TLK in (recorded.expert_TLK, recorded.score_TLK):
        first, second = np.split(array_TLK, 2)
        assert (first == second).all()
    assert curves.curves() == once, "the same batch twice has the curves of one"


def test_forwards_aside_are_stock_after_any_other() -> None:
    """Also the kernel, which in bfloat16 adds in another precision than that of kept pairs."""
    model = make("olmoe", experts="eager").bfloat16()
    stock = run(model, batch())
    with capacity_aware(model, "score", gamma=0.1) as meter:
        run(model, batch(1))
        with meter.aside():
            assert torch.equal(run(model, batch()), stock)


# Copies.

COPIES: dict[str, Callable[[Any], Any]] = {
    "whole": lambda model: model,
    "without head": lambda model: model.model,
    "layer": lambda model: model.model.layers[0],
    "block": lambda model: model.model.layers[0].mlp,
    "router": lambda model: model.model.layers[0].mlp.gate,
}


@pytest.mark.parametrize("part", COPIES)
def test_a_copy_from_inside_the_block_is_refused(part: str) -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5) as meter:
        copied = copy.deepcopy(model)
        part_copied = copy.deepcopy(COPIES[part](model))
        run(model, batch())
        called = [COPIES[part](copied), part_copied]
        tokens = batch() if part in ("whole", "without head") else torch.randn(4, 12, 32)
        for inside in called:
            refuse(inside, tokens)
        run(model, batch())
    assert meter.forwards == 2
    for after in called:
        refuse(after, tokens)
    with pytest.raises(UsageError, match="copied from one"):
        capacity_aware(copied, "score", gamma=0.5).__enter__()


def refuse(module: Any, given: Tensor) -> None:
    calls = [module, module.forward] if isinstance(given, Tensor) and given.ndim == 2 else [module]
    for call in calls:
        with pytest.raises(UsageError, match="is a copy that was made of a model under"):
            if given.ndim == 3 and hasattr(module, "self_attn"):
                module.mlp(given)
            else:
                call(given)


def test_what_was_kept_of_a_model_is_stock_after_the_block() -> None:
    model = make("olmoe")
    stock = run(model, batch())
    with capacity_aware(model, "score", gamma=0.5):
        call, shallow = model.forward, copy.copy(model)
        generate = model.generate
    with torch.no_grad():
        assert torch.equal(call(batch()).logits, stock)
        assert torch.equal(shallow(batch()).logits, stock)
    assert torch.equal(
        generate(batch(), max_new_tokens=3), model.generate(batch(), max_new_tokens=3)
    )


# Leaving.


def state(model: nn.Module) -> dict[str, Any]:
    """Return all that a module can be changed by: attributes, hooks, methods and weights."""
    every: dict[str, Any] = {"library": {k: id(v) for k, v in vars(GenerationMixin).items()}}
    for name, module in model.named_modules():
        held = {}
        for attribute, value in vars(module).items():
            whole = {k: id(v) for k, v in value.items()} if isinstance(value, dict) else None
            plain = value if isinstance(value, bool | int | str | float) else id(value)
            held[attribute] = plain if whole is None else (id(value), whole)
        every[name] = (type(module), held, vars(type(module)).copy())
        config = getattr(module, "config", None)
        every[f"{name}.config"] = None if config is None else str(vars(config))
    every["weights"] = {name: value.clone() for name, value in model.state_dict().items()}
    return every


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    weights = [dict(part) for part in (one.pop("weights"), other.pop("weights"))]
    equal = weights[0].keys() == weights[1].keys() and all(
        torch.equal(value, weights[1][name]) for name, value in weights[0].items()
    )
    return equal and one == other


def leave_plainly(model: Any) -> None:
    run(model, batch())


def leave_in_the_block(model: Any) -> None:
    run(model, batch())
    raise _Left


def leave_in_a_forward(model: Any) -> None:
    with during(model.model.layers[1].mlp.experts, _raise):
        run(model, batch())


def leave_in_a_generation(model: Any) -> None:
    with during(model.model.layers[1].mlp.experts, _Second()):
        model.generate(batch(), max_new_tokens=4)


class _Left(BaseException):
    pass


def _raise() -> None:
    raise _Left


class _Second:
    calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == 2:
            raise _Left


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize(
    "leave", [leave_plainly, leave_in_the_block, leave_in_a_forward, leave_in_a_generation]
)
@pytest.mark.parametrize(
    ("knobs", "has_forward"),
    [({"method": "score", "gamma": 0.5}, False), ({"method": "baseline"}, True)],
)
def test_a_block_leaves_every_module_as_it_was(
    knobs: dict[str, Any],
    leave: Callable[[Any], None],
    error: type[BaseException],
    has_forward: bool,
) -> None:
    model = make("olmoe")
    model.train()
    model.model.layers[0].eval()
    if has_forward:  # as accelerate gives a model that it dispatches
        model.forward = model.forward
    before = state(model)
    try:
        with capacity_aware(model, verify=False, **knobs):
            try:
                leave(model)
            except _Left as left:
                raise error("leave") from left
    except error:
        pass
    assert same(state(model), before)


def test_a_model_is_stock_again_after_a_block() -> None:
    model = make("olmoe")
    stock = run(model, batch())
    with capacity_aware(model, "score", gamma=0.5):
        assert not torch.equal(run(model, batch()), stock)
    assert torch.equal(run(model, batch()), stock)
    experts = [module for module in model.modules() if is_experts(module)]
    assert experts and all(module.config is model.config for module in experts)


@pytest.mark.parametrize("number", range(1, 12))
def test_a_proof_on_entry_that_is_broken_off_leaves_every_module_as_it_was(number: int) -> None:
    model = make("olmoe")
    before = state(model)
    calls: list[int] = []
    norm = type(model.model.norm)

    class Breaks(norm):  # type: ignore[misc, valid-type]
        def forward(self, hidden: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) == number:
                raise KeyboardInterrupt
            return super().forward(hidden)

    model.model.norm.__class__ = Breaks
    try:
        with capacity_aware(model, "score", gamma=0.5):
            pass
    except KeyboardInterrupt:
        assert len(calls) == number
    else:
        assert 3 < len(calls) < number
    model.model.norm.__class__ = norm
    assert same(state(model), before)
