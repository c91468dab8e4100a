"""A mutation puts a wrong value into one place of the package while a model runs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method, method_class
from capmoe_eval.wrapper import session
from capmoe_eval.wrapper.layers import MoeLayer, find_moe_layers
from capmoe_eval.wrapper.observers import invariants
from tests.wrapper import images, models

# Settings: tiny models under every method.

# The real tokens of five sequences in two forwards. Both have 46, but the two ranks, the first
# three sequences and the others, have other numbers of them each time.
LENGTHS = ((12, 7, 10, 12, 5), (10, 12, 12, 7, 5))


@dataclass(frozen=True)
class Setting:
    """A tiny model under a method, and the batches of two forwards."""

    method: Method
    family: str = "olmoe"
    lengths: tuple[tuple[int, ...], ...] = LENGTHS
    tied: bool = False  # the last router gives all experts of all tokens the same score
    # Returns the calibrated tensor of each layer, from a model and the number of its layers.
    calibration: Callable[[Any, int], list[Tensor]] | None = None

    def under(self, **knobs: Any) -> Setting:
        """Return the setting with other knobs of its method."""
        return dataclasses.replace(self, method=with_knobs(self.method, **knobs))


def of(family: str, **knobs: Any) -> Callable[[Setting], Setting]:
    """Make a world of another family of models, under other knobs of the method."""
    return lambda setting: dataclasses.replace(setting, family=family).under(**knobs)


def with_knobs(method: Method, *, name: str | None = None, **knobs: Any) -> Method:
    """Return a method with other knobs, of those that it has, or of another name."""
    kind = type(method) if name is None else method_class(name)
    fields = {field.name for field in dataclasses.fields(kind)}
    return method.converted(kind, **{knob: knobs[knob] for knob in knobs.keys() & fields})


def capped(name: str, gamma: float = 0.7, family: str = "olmoe", **knobs: Any) -> Setting:
    return Setting(create_method(name, gamma, ep_size=2, **knobs), family)


SETTINGS = {
    "order": capped("order"),
    "reverse_order": capped("reverse_order"),
    "random": capped("random", seed=3),
    "score": capped("score"),
    "expert_drop": Setting(create_method("expert_drop")),
    "expanded_drop local": capped("expanded_drop"),
    "expanded_drop ranked": capped("expanded_drop", candidates="ranked", m=3),
    "expanded_drop global": capped("expanded_drop", candidates="global"),
    "expanded_drop protect_topk": capped("expanded_drop", protect_topk=True),
    "expanded_drop max_k": capped("expanded_drop", 0.9, candidates="global", max_k=True),
    "expanded_drop device": capped("expanded_drop", granularity="device"),
    "token_reroute": capped("token_reroute"),
    "device_drop": capped("score", granularity="device"),
    "score image_first": capped("score", family="llava", modality="image_first"),
    "score text_first": capped("score", family="llava", modality="text_first"),
}
"""The methods of the paper, each by a name."""


@functools.cache
def _model(family: str, tied: bool) -> tuple[Any, list[MoeLayer]]:
    model = (images if family in images.FAMILIES else models).make(family)
    layers = find_moe_layers(model)
    if tied:
        with torch.no_grad():
            layers[-1].router.weight.zero_()
    return model, layers


@functools.cache
def _inputs(setting: Setting) -> tuple[list[dict[str, Tensor]], list[Tensor] | None]:
    """Return the inputs of the forwards, which no forward changes, and the calibrated tensors."""
    model, layers = _model(setting.family, setting.tied)
    calibrated = None if setting.calibration is None else setting.calibration(model, len(layers))
    if setting.family in images.FAMILIES:
        inputs = images.batch(setting.family, (1, 2, 1, 0))
        return [inputs, {name: value.flip(0) for name, value in inputs.items()}], calibrated
    batches = []
    for number, lengths in enumerate(setting.lengths):
        tokens = models.batch(number, len(lengths), max(lengths))
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        batches.append({"input_ids": tokens, "attention_mask": mask.long()})
    return batches, calibrated


# Mutations.

_PLACE = re.compile(r"([\w.]+)(?:\((\w+)(?:\.(\w+))?\)|->(\w*))")


@dataclass(frozen=True)
class Mutation:
    """A wrong decision by its name; those of one stage have what comes before the colon alike.

    Its place is one of

    - ``capacity(gamma)``, what a function is called with: of two functions of one name the module
      says which, as in ``hook.combine``, and of a method the class;
    - ``decide(scores.score_TE)``, a field of that;
    - ``capacity->``, what the function returns, or ``group_tokens->rows_T``, a field of that.

    ``change`` makes the wrong value of the true one, unless that is None, and of all arguments of
    the call by name, with ``again``, which calls the true function with some other arguments, and
    ``memory``, a dictionary of the run.
    """

    name: str
    place: str
    change: Callable[..., Any]
    world: Callable[[Setting], Setting] = lambda setting: setting

    @property
    def stage(self) -> str:
        return self.name.partition(":")[0]

    @property
    def target(self) -> str:
        """The function."""
        return re.split(r"->|\(", self.place)[0]

    def apply(self, monkeypatch: pytest.MonkeyPatch, holds: Callable[[], bool]) -> None:
        """Replace the function in every module that has imported it; it errs while it ``holds``."""
        match = _PLACE.fullmatch(self.place)
        assert match, self.place
        target, argument, part, field = match.groups()
        owner, name = owner_of(target)
        original = vars(owner)[name]
        is_property = isinstance(original, property)
        true = original.fget if is_property else original
        signature, memory = inspect.signature(true), dict[Any, Any]()

        @functools.wraps(true)
        def function(*arguments: Any, **named: Any) -> Any:
            if not holds():
                return true(*arguments, **named)
            call = signature.bind(*arguments, **named)
            call.apply_defaults()

            def again(**other: Any) -> Any:
                return true(**call.arguments | other)

            values = SimpleNamespace(**call.arguments, again=again, memory=memory)
            if argument is None:
                return self._changed(true(*arguments, **named), field, values)
            whole = call.arguments[argument]
            changed = self._changed(whole, part, values)
            if part == "score_TE":  # a token's own order stays
                changed = dataclasses.replace(changed, choice_TE=whole.ranking_TE)
            call.arguments[argument] = changed
            return true(*call.args, **call.kwargs)

        owners = [owner]
        if isinstance(owner, ModuleType):
            owners = [of for of in _modules(len(sys.modules)) if vars(of).get(name) is original]
        for each in owners:
            monkeypatch.setattr(each, name, property(function) if is_property else function)

    def _changed(self, whole: Any, part: str | None, call: SimpleNamespace) -> Any:
        if part:
            return dataclasses.replace(
                whole, **{part: self._changed(getattr(whole, part), "", call)}
            )
        return None if whole is None else self.change(whole, call)


@functools.lru_cache(maxsize=1)
def _modules(_count: int) -> list[ModuleType]:
    """Return the modules of decisions, looked for again when there are others."""
    return [
        module
        for name, module in sys.modules.items()
        if name.startswith(("capmoe_eval", "capmoe_methods"))
        and not name.endswith(("definition", "invariants"))
    ]


@functools.cache
def owner_of(target: str) -> tuple[Any, str]:
    """Return the module or the class that defines a target, and the target's name there."""
    first, _, name = target.partition(".")
    owners: list[Any] = []
    for module in _modules(len(sys.modules)):
        value = vars(module).get(first)
        if getattr(value, "__module__", None) == module.__name__:
            owners.append(value if name else module)
        if name in vars(module) and module.__name__.endswith(f".{first}"):
            owners.append(module)
    (owner,) = owners
    return owner, name or first


def of_first_call(target: str) -> Mutation:
    """A function returns for ever what its first call returned."""
    return Mutation(
        f"{target} is that of its first call",
        f"{target}->",
        lambda value, call: call.memory.setdefault("first", value),
    )


# Stages, each with every change of values like its own, and knobs with other values.

Change = Callable[[Any], Any]


def stage(
    title: str,
    place: str,
    changes: dict[str, Change],
    by: Callable[[Change], Callable[[Any, Any], Any]] = lambda change: lambda x, _call: change(x),
) -> list[Mutation]:
    """Return a stage with each of its changes; ``by`` is how a change is made."""
    return [Mutation(f"{title}: {name}", place, by(change)) for name, change in changes.items()]


def other_knobs(knobs: dict[str, list[Any]]) -> list[Mutation]:
    """Return each knob with each of its other values."""

    def changed(knob: str, value: Any) -> Callable[[Method, Any], Method]:
        # Ranked candidates that are all of them are the global ones.
        other = {knob: value} | ({"m": 1} if value == "ranked" else {})
        return lambda method, _call: with_knobs(method, **other)

    return [
        Mutation(f"other knobs: {knob}={value}", "hook.decide(method)", changed(knob, value))
        for knob, values in knobs.items()
        for value in values
    ]


# Runs.

Forward = list[tuple[Tensor, ...]]
"""What each layer's experts were called with, and what came out, and at last the logits."""


def _pairs(index_NS: Tensor, weight_NS: Tensor, n_experts: int) -> tuple[Tensor, ...]:
    """Return the number and the weight of each pair [N, E], and the weight of no pair [N]."""
    zero_NE = weight_NS.new_zeros(len(index_NS), n_experts + 1)
    count_NE = zero_NE.scatter_add(1, index_NS, torch.ones_like(weight_NS))
    weight_NE = zero_NE.scatter_add(1, index_NS, weight_NS)
    return count_NE[:, :n_experts], weight_NE


def run(
    setting: Setting,
    n_forwards: int | None = None,
    mutation: Mutation | None = None,
    holds: Callable[[int], bool] = lambda _number: True,
    *,
    examined: bool = True,
) -> tuple[list[Forward], set[str]]:
    """Run the forwards of a setting until an invariant refuses one.

    Args:
        setting: The setting, whose batches are run in turn.
        n_forwards: The number of forwards; one of each batch if there is none.
        mutation: What errs.
        holds: Whether it errs in a forward, by its number.
        examined: Whether layers are examined as in any run, or in no forward, as between the
            examined ones of a long run.

    Returns:
        The forwards, of which the last may be cut short, and the invariants that refused it.
    """
    model, layers = _model(setting.family, setting.tied)
    batches, calibrated = _inputs(setting)
    forwards: list[Forward] = []
    refused_by, number = set[str](), 0

    def note(experts: Any, call: tuple[Tensor, ...], output: Tensor) -> None:
        pairs = _pairs(call[1].clone(), call[2].clone(), experts.num_experts)
        forwards[-1].append((*pairs, output.clone()))

    with pytest.MonkeyPatch.context() as monkeypatch:
        # Of a model that stays the same the layers are looked for once.
        monkeypatch.setattr(session, "find_moe_layers", lambda _: layers)
        if not examined:
            monkeypatch.setattr(invariants, "is_examined", lambda *_: False)
        if mutation is not None:
            mutation.apply(monkeypatch, lambda: holds(number))
        method = setting.method
        with session.capacity_aware(model, method, calibrated=calibrated, verify=False) as meter:
            hooks = [of.experts.register_forward_hook(note, prepend=True) for of in layers]
            try:
                with torch.no_grad():
                    for number in range(n_forwards or len(batches)):
                        forwards.append([])
                        output = model(**batches[number % len(batches)])
                        forwards[-1].append((output.logits,))
            except EnforcementError as error:
                refused_by.add(str(error))
            finally:
                for hook in hooks:
                    hook.remove()
    failed = {name for name, proof in meter.proofs().items() if proof["passed"] is False}
    return forwards, failed or refused_by


@functools.cache
def true_run(setting: Setting, n_forwards: int | None = None) -> list[Forward]:
    """Return the forwards of the code as it is."""
    forwards, refused_by = run(setting, n_forwards)
    assert not refused_by, f"{setting}: refused by {refused_by}"
    return forwards


def mutated_run(
    mutation: Mutation,
    setting: Setting,
    holds: Callable[[int], bool] = lambda _number: True,
    n_forwards: int | None = None,
    *,
    examined: bool = True,
) -> tuple[set[str], dict[int, int], int]:
    """Return what refuses a run with a mutation, where the run differs, and its last forward.

    The differences are the forwards that differ from the true ones, each with the number of the
    first layer that does, or the number of layers if the logits alone differ.
    """
    try:
        true = true_run(setting, n_forwards)
        forwards, refused_by = run(setting, n_forwards, mutation, holds, examined=examined)
    except NOTHING_IS_DECIDED:
        return set(), {}, -1
    first = {}
    for number, pair in enumerate(zip(forwards, true, strict=False)):
        for place, parts in enumerate(zip(*pair, strict=False)):
            if not all(map(torch.equal, *parts)):
                first[number] = place
                break
    return refused_by, first, len(forwards) - 1


NOTHING_IS_DECIDED = (AttributeError, IndexError, RuntimeError, TypeError, UsageError, ValueError)
"""The errors of a wrong value with which no decision can be made, or of a model without images."""
