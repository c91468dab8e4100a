"""Every kind of object that is given for a model works, or is refused in one line at entry.

So is every version of transformers and lm-eval.
"""

from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from capmoe_eval.errors import UsageError
from capmoe_eval.wrapper.generation import _LOOPS
from capmoe_eval.wrapper.kernel import experts_call
from capmoe_eval.wrapper.layers import find_moe_layers
from capmoe_eval.wrapper.seam import TRANSFORMERS, Library, Part
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.architectures import build
from tests.wrapper.models import batch, counted, make
from tests.wrapper.test_generation import Adapter


class ExpertsAdapter(nn.Module):
    """What peft puts in the place of experts whose parameters it adapts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.base_layer = experts
        self.lora_A = nn.ModuleDict({"default": nn.Linear(2, 2)})


def changed(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change a model in place."""
    return lambda model: (change(model), model)[1]


def adapted(model: Any) -> None:
    block = model.model.layers[1].mlp
    block.experts = ExpertsAdapter(block.experts)


class MegaBlocksMoeMLP(nn.Module):
    """Computes a whole MoE layer, as the kernel of the hub does."""

    def forward(self, hidden_BSH: Any) -> Any:
        return hidden_BSH


def of_the_hub(model: Any) -> None:
    block = model.model.layers[1].mlp  # as ``kernels`` puts a layer in the place of a module's own
    block.forward = MethodType(MegaBlocksMoeMLP.forward, block)


def of_odd_width(_: Any) -> nn.Module:
    fields = {"moe_intermediate_size": 36, "num_hidden_layers": 1}
    return build("qwen3_moe", fields, experts="grouped_mm").bfloat16()


def on_two_devices(model: Any) -> nn.Module:
    parallel = DataParallel(model)
    parallel.device_ids = [0, 1]  # as on a machine that has them
    return parallel


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda model: torch.compile(model, backend="eager"), "OptimizedModule is compiled"),
    (changed(lambda model: model.compile(backend="eager")), "OlmoeForCausalLM is compiled"),
    (
        changed(lambda m: setattr(m, "forward", torch.compile(m.forward, backend="eager"))),
        "OlmoeForCausalLM is compiled",
    ),
    (
        changed(adapted),
        r"ExpertsAdapter adapts the experts of model\.layers\.1\.mlp\.experts.* merge it first",
    ),
    (
        changed(of_the_hub),
        r"MegaBlocksMoeMLP.forward replaces the forward of model\.layers\.1\.mlp "
        r"\(OlmoeSparseMoeBlock\).* without use_kernels",
    ),
    (
        of_odd_width,
        "moe_intermediate_size=36: the kernel grouped_mm needs a multiple of 8 in torch.bfloat16 "
        r'.*multiple of 16 bytes.*; load the model with experts_implementation="eager"',
    ),
    (on_two_devices, "DataParallel copies the model to 2 devices"),
    (
        changed(lambda model: model.model.layers[1].mlp.experts.to("meta")),
        "2 weights are on the meta device.*layers.1.mlp.experts.gate_up_proj",
    ),
    (lambda model: model.model.layers[0], "OlmoeDecoderLayer: has no configuration"),
    (
        lambda model: nn.ModuleList([model, make("mixtral")]),
        r"ModuleList: .* \(2 transformers models in it\)",
    ),
    (lambda model: SimpleNamespace(model=model), "is no torch module; .* pipeline.model"),
]


@pytest.mark.parametrize(("module_of", "line"), REFUSED)
def test_what_cannot_have_a_capacity_is_refused_in_one_line(
    module_of: Callable[[Any], Any], line: str
) -> None:
    target = module_of(make("olmoe"))
    refused = pytest.raises(UsageError, match=line)
    with refused as error, capacity_aware(target, "score", gamma=0.5, verify=False):
        pass
    assert str(error.value).startswith("model=")
    assert "\n" not in str(error.value)


def offloaded(model: Any) -> nn.Module:
    cpu_offload(model, execution_device=torch.device("cpu"))
    return model  # type: ignore[no-any-return]


WORKING: dict[str, Callable[[Any], Any]] = {
    "adapter of an adapter": lambda model: Adapter(Adapter(model)),
    "data parallel on one device": DataParallel,
    "beside a model without experts": lambda model: nn.ModuleList([nn.Linear(2, 2), model]),
    "offloaded": offloaded,
}


@pytest.mark.parametrize(
    ("name", "family"), [*((name, "olmoe") for name in WORKING), ("offloaded", "deepseek_v3")]
)
@torch.no_grad()
def test_other_objects_work_as_the_model_does(name: str, family: str) -> None:
    """Called by themselves, by the model that they run, and by its forward."""
    model = make(family)
    recipes = [layer.gate.recipe for layer in find_moe_layers(model)]
    with capacity_aware(model, "score", gamma=0.5) as expected:
        logits = [model(batch()).logits for _ in range(3)]
    module_of = WORKING[name](make(family))
    inner = next(part for part in module_of.modules() if type(part) is type(model))
    with capacity_aware(module_of, "score", gamma=0.5) as meter:
        callers = [
            inner,
            inner.forward,
            inner if isinstance(module_of, nn.ModuleList) else module_of,
        ]
        answers = [caller(batch()).logits for caller in callers]
    assert [layer.gate.recipe for layer in meter.layers] == recipes
    assert all(map(torch.equal, answers, logits))
    assert counted(meter) == counted(expected)


@pytest.mark.slow
@pytest.mark.parametrize("before", [False, True])
@torch.no_grad()
def test_a_compiled_caller_of_the_model_runs_it_under_the_capacity(before: bool) -> None:
    """Whether it was compiled before the block or in it; afterwards it runs the stock model."""
    torch._dynamo.reset()
    model = make("olmoe")
    caller = torch.compile(model, backend="eager")
    stock = caller(batch()).logits if before else model(batch()).logits
    with capacity_aware(model, "score", gamma=0.5) as expected:
        logits = [model(batch(seed)).logits for seed in range(3)]
    with capacity_aware(model, "score", gamma=0.5) as meter:
        assert all(torch.equal(caller(batch(n)).logits, logits[n]) for n in range(3))
    assert counted(meter) == counted(expected)
    assert torch.equal(caller(batch()).logits, stock)
    torch._dynamo.reset()


# What the suite takes from inside a library is there, or the version is refused.


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (("json.decoder", "gone", ()), "there is no json.decoder.gone"),
        (("json.decoder", "JSONDecoder().gone", ()), "there is no json.decoder.JSONDecoder().gone"),
        (("json", "dumps", ("obj", "gone")), "dumps has no parameter gone"),
    ],
)
def test_a_version_without_a_part_is_refused(
    part: Part, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capmoe_eval.wrapper.seam.version", lambda _name: "5.99.0")
    with pytest.raises(UsageError) as caught:
        Library(("a-library",), ("5.1", "5.2"), (part,)).check()
    assert str(caught.value) == (
        f"a-library==5.99.0: {line}, so that a capacity cannot be enforced; install "
        "a-library==5.1 or 5.2"
    )


def test_every_loop_that_is_replaced_is_a_part() -> None:
    replaced = {f"{owner.__name__}.{name}" for owner, name in _LOOPS}
    assert replaced < {path for _, path, _ in TRANSFORMERS.parts}


# The experts' call.


def test_experts_that_are_called_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make("olmoe").model.layers[0].mlp.experts
    hidden, index, weights = torch.zeros(4, 8), torch.zeros(4, 2).long(), torch.zeros(4, 2)
    other = lambda self, hidden, weights, index: hidden  # noqa: E731
    monkeypatch.setattr(type(experts), "forward", other)
    call = {"hidden": hidden, "index": index, "weights": weights}
    with pytest.raises(UsageError, match=r"transformers==.* OlmoeExperts is called with hidden, "):
        experts_call(experts, (), call)


def test_a_model_may_name_the_arguments_of_its_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("olmoe")
    block = type(model.model.layers[0].mlp)
    stock = model(batch()).logits

    def forward(self: Any, hidden_BSH: Tensor) -> Tensor:
        rows = hidden_BSH.flatten(0, 1)
        _, weights, index = self.gate(rows)
        named = {"top_k_weights": weights, "top_k_index": index, "hidden_states": rows}
        return self.experts(**named).view_as(hidden_BSH)

    monkeypatch.setattr(block, "forward", forward)
    with capacity_aware(model, "score", gamma=1e9):
        assert torch.equal(model(batch()).logits, stock)
    with capacity_aware(model, "score", gamma=0.5) as meter:
        model(batch())
    assert meter.summary()["dropped"] > 0
