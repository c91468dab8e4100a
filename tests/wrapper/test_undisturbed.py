"""A forward runs alone, counts whole or not at all, and leaves nothing behind in any copy."""

import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationMixin, LogitsProcessor

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.observers import Observer
from capmoe_eval.wrapper.plan import ForwardPlan
from capmoe_eval.wrapper.session import capacity_aware
from tests.satellites import HAS_METHODS
from tests.wrapper import images
from tests.wrapper.models import batch, counted, during, logits, make, similarities

ALONE = "a forward of the model began while another one ran"
PLACES = ["model.embed_tokens", "model.layers.1.mlp.experts", "lm_head"]


class Stopped(BaseException):
    """What breaks a forward off."""


def stop() -> None:
    raise Stopped


# One forward at a time.


@pytest.mark.parametrize("place", PLACES)
def test_a_forward_inside_another_or_of_another_thread_is_refused(place: str) -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5) as expected_meter:
        inside = during(model.get_submodule(place), lambda: logits(model, batch(1)))
        with inside, pytest.raises(UsageError, match=ALONE):
            logits(model)
        assert expected_meter.forwards == 0
        expected = logits(model)
    errors: list[Any] = []
    with capacity_aware(model, "score", gamma=0.5) as meter:

        def disturb() -> None:
            if not errors:  # nor by the forward that disturbs
                errors.append(None)
                with ThreadPoolExecutor(1) as pool:
                    errors[0] = pool.submit(logits, model, batch(1)).exception()

        with during(model.get_submodule(place), disturb):
            assert torch.equal(logits(model), expected)
        assert counted(meter) == counted(expected_meter)
        logits(model, batch(1))
    assert isinstance(errors[0], UsageError)
    assert ALONE in str(errors[0])


@pytest.mark.parametrize("place", ["between steps", "in a forward"])
def test_a_block_does_not_end_before_its_forwards(place: str) -> None:
    """A thread, as of a streamer, would go on without a capacity, and nobody would see it."""
    model = make("olmoe")
    waits, goes_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> Any:
        waits.set()
        goes_on.wait(60)
        return _[-1] if _ else None

    class Waits(LogitsProcessor):
        __call__ = lambda self, input_ids, scores: wait(scores)  # noqa: E731

    between = place == "between steps"
    options: dict[str, Any] = {"logits_processor": [Waits()] if between else []}

    def run() -> Any:
        return model.generate(batch(), max_new_tokens=3, **options) if between else logits(model)

    pool = ThreadPoolExecutor(1)
    before = state(model)
    with (
        during(model.lm_head, (lambda: None) if between else wait),
        pytest.raises(UsageError, match=r"the block ended while .* in another thread"),
        capacity_aware(model, "score", gamma=0.5, verify=False),
    ):
        pool.submit(run)
        waits.wait(60)
    goes_on.set()
    pool.shutdown()
    assert state(model) == before


# Whole or not at all.

METHODS: list[dict[str, Any]] = [
    {"method": "random", "gamma": 0.5, "decode": "constrained"},
    {"method": "baseline"},
]
if HAS_METHODS:  # with observers of their own
    METHODS += [{"method": "oea", "k0": 1}, {"method": "sere", "calibrated": True}]


class Sees(Observer):
    """Keeps a number, and lists in a dictionary."""

    every_forward: ClassVar[bool] = True

    def __init__(self) -> None:
        self.tokens = 0
        self.layers: dict[int, list[Any]] = {}

    def begin(self, plan: ForwardPlan) -> None:
        self.tokens += plan.groups.n_tokens

    def see(self, event: LayerForward) -> None:
        self.layers.setdefault(event.number, []).append(event.scores.topk_TK.tolist())


@pytest.mark.parametrize("place", [*PLACES, "model.layers.1.mlp"])
@pytest.mark.parametrize("knobs", METHODS)
def test_a_forward_that_is_broken_off_counts_nothing(knobs: dict[str, Any], place: str) -> None:
    model = make("olmoe")
    if "calibrated" in knobs:
        knobs = knobs | {"calibrated": similarities(model)}

    def forwards(*, disturbed: bool) -> tuple[list[Tensor], Meter, Sees]:
        results, observer = [], Sees()
        with capacity_aware(model, verify=False, **knobs) as meter:
            meter.observe(observer)
            for seed in range(2):
                if disturbed:
                    before = copy.deepcopy(counted(meter)) if seed else None
                    with during(model.get_submodule(place), stop), pytest.raises(Stopped):
                        logits(model, batch(7 + seed))
                    assert before is None or counted(meter) == before
                results.append(logits(model, batch(seed)))
                with pytest.raises(UsageError, match="does not cover"):  # before it begins
                    logits(model, attention_mask=torch.ones(4, 3))
        assert observer.tokens == 2 * batch().numel()
        return results, meter, observer

    expected, expected_meter, expected_observer = forwards(disturbed=False)
    results, meter, observer = forwards(disturbed=True)
    assert all(map(torch.equal, results, expected))
    assert observer.layers == expected_observer.layers
    assert counted(meter) == counted(expected_meter)
    assert meter.proofs() == expected_meter.proofs()


# Torch's defaults.


@contextmanager
def defaults(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    """Have torch make tensors of another type, or where a tensor has no numbers."""
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.parametrize(("dtype", "device"), [(torch.bfloat16, None), (torch.float64, "meta")])
@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("olmoe", {"method": "random", "gamma": 0.5, "seed": 3}),
        ("deepseek_v2_groups", {"method": "token_reroute", "gamma": 0.5}),
        ("deepseek_v3", {"method": "expanded_drop", "gamma": 0.5, "ep_size": 2}),
        ("llava", {"method": "score", "gamma": 0.5, "modality": "image_first"}),
    ],
)
def test_torchs_defaults_change_nothing(
    name: str, knobs: dict[str, Any], dtype: torch.dtype, device: str | None
) -> None:
    if name in images.FAMILIES:
        model, inputs = images.make(name), images.batch(name)
    else:
        mask = torch.arange(12) < torch.tensor([[12], [5], [9], [12]])
        model, inputs = make(name), {"input_ids": batch(), "attention_mask": mask.long()}

    def run() -> tuple[Tensor, dict[str, Any]]:
        with capacity_aware(model, **knobs) as meter, torch.no_grad():
            return model(**inputs).logits, meter.report()

    plain_BSV, plain = run()
    with defaults(dtype, device):
        logits_BSV, report = run()
    assert torch.equal(logits_BSV, plain_BSV)
    assert report == plain


# Copies.


def test_a_copy_from_inside_the_block_is_refused() -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5) as meter:
        copied = copy.deepcopy(model)
        for part in (copied, copied.model, copied.model.layers[0].mlp):
            with pytest.raises(EnforcementError, match="a copy of it"), torch.no_grad():
                part(torch.randn(4, 12, 32) if part is copied.model.layers[0].mlp else batch())
        logits(model)
    assert meter.forwards == 1
    with pytest.raises(UsageError, match="copied from one"):
        capacity_aware(copied, "score", gamma=0.5).__enter__()


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
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    return every | {"weights": weights}


def leave_in_the_block(model: Any) -> None:
    logits(model)
    raise Stopped


def leave_in_a_forward(model: Any) -> None:
    with during(model.model.layers[1].mlp.experts, stop):
        logits(model)


def leave_in_a_generation(model: Any) -> None:
    calls = itertools.count()  # it stops at the second
    with during(model.model.layers[1].mlp.experts, lambda: next(calls) and stop()):
        model.generate(batch(), max_new_tokens=4)


@pytest.mark.parametrize(
    ("leave", "error"),
    [
        (logits, RuntimeError),
        (leave_in_the_block, KeyboardInterrupt),
        (leave_in_the_block, GeneratorExit),
        (leave_in_a_forward, KeyboardInterrupt),
        (leave_in_a_generation, RuntimeError),
    ],
)
@pytest.mark.parametrize("method", ["score", "baseline"])
def test_a_block_leaves_every_module_as_it_was(
    method: str, leave: Callable[[Any], Any], error: type[BaseException]
) -> None:
    model = make("olmoe")
    model.train()
    model.model.layers[0].eval()
    if method == "baseline":  # as accelerate gives a model that it dispatches
        model.forward = model.forward
    before = state(model)
    try:
        with capacity_aware(model, create_method(method, 0.5), verify=False):
            try:
                leave(model)
            except Stopped as stopped:
                raise error("leave") from stopped
    except error:
        pass
    assert state(model) == before
