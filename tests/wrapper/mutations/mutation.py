"""A mutation: a function of the package and what a slip makes of it.

A *kind* of mutations is a function from a name, a change, whom it concerns and the world in which
it can be seen. What ``change`` gets and returns is the kind's.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from capmoe_eval.routing.scores import Assignment
from tests.wrapper.mutations.settings import Setting, with_knobs

Call = dict[str, Any]
Decide = Callable[..., Assignment]
Change = Callable[..., Any]
Kind = Callable[..., "Mutation"]


@dataclass(frozen=True)
class Mutation:
    """A wrong decision by its name; those of one stage have what comes before the colon alike."""

    name: str
    target: str  # "capacity" or "Gate.scores"; with its module if two have the name: "hook.combine"
    change: Callable[[Any], Any]  # of the function
    concerns: Callable[[Setting], bool] = lambda _: True
    world: Callable[[Setting], Setting] = lambda setting: setting

    @property
    def stage(self) -> str:
        return self.name.partition(":")[0]

    def apply(
        self, monkeypatch: pytest.MonkeyPatch, holds: Callable[[], bool] = lambda: True
    ) -> None:
        """Replace the function in every module that has imported it; it errs while it ``holds``."""
        owner, name = _owner(self.target)
        original = vars(owner)[name]
        is_property = isinstance(original, property)
        true = original.fget if is_property else original
        wrong = self.change(true)

        @functools.wraps(true)
        def function(*arguments: Any, **named: Any) -> Any:
            return (wrong if holds() else true)(*arguments, **named)

        changed = property(function) if is_property else function
        owners = [owner]
        if isinstance(owner, ModuleType):
            owners = [of for of in _modules(len(sys.modules)) if vars(of).get(name) is original]
        for each in owners:
            monkeypatch.setattr(each, name, changed)


@functools.lru_cache(maxsize=1)
def _modules(_count: int) -> list[ModuleType]:
    """Return the modules of decisions, looked for again when there are others."""
    return [
        module
        for name, module in sys.modules.items()
        if name.startswith(("capmoe_eval", "capmoe_methods")) and not name.endswith("definition")
    ]


@functools.cache
def _owner(target: str) -> tuple[Any, str]:
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


def wrapped(target: str) -> Kind:
    """A function; ``change`` makes it from the true one."""
    return lambda name, change, *more: Mutation(name, target, change, *more)


def result(target: str, field: str | None = None) -> Kind:
    """What a function returns, or a field of it; ``change`` gets its arguments as well."""

    def kind(name: str, change: Change, *more: Any) -> Mutation:
        def wrap(function: Change) -> Change:
            @functools.wraps(function)
            def mutated(*arguments: Any, **named: Any) -> Any:
                true = function(*arguments, **named)
                if field is None:
                    return change(true, *arguments, **named)
                changed = change(getattr(true, field), *arguments, **named)
                return dataclasses.replace(true, **{field: changed})

            return mutated

        return Mutation(name, target, wrap, *more)

    return kind


def argument(target: str, number: int) -> Kind:
    """One of the arguments that a function is called with."""

    def kind(name: str, change: Change, *more: Any) -> Mutation:
        def wrap(function: Change) -> Change:
            def mutated(*call: Any, **named: Any) -> Any:
                changed = change(call[number])
                return function(*call[:number], changed, *call[number + 1 :], **named)

            return mutated

        return Mutation(name, target, wrap, *more)

    return kind


def of_first_call(target: str, *more: Any) -> Mutation:
    """A function returns for ever what its first call returned."""

    def wrap(function: Change) -> Change:
        results: list[Any] = []

        def mutated(*call: Any, **named: Any) -> Any:
            results.append(function(*call, **named))
            return results[0]

        return mutated

    return Mutation(f"{target} is that of its first call", target, wrap, *more)


# The decision.


def decision(name: str, change: Callable[[Decide, Call], Assignment], *more: Any) -> Mutation:
    """The whole decision; ``change`` gets the true one and its arguments by name."""

    def wrap(decide: Decide) -> Decide:
        def mutated(scores: Any, method: Any, groups: Any, **named: Any) -> Assignment:
            call = {"scores": scores, "method": method, "groups": groups, **named}
            decided = change(decide, call)
            if method.reads_hidden and decided.details is None:  # an assignment made anew
                decided = dataclasses.replace(decided, details=decide(**call).details)
            return decided

        return mutated

    return Mutation(name, "hook.decide", wrap, *more)


def decided_by(argument_name: str) -> Kind:
    """An argument of the decision; ``change`` gets all of them."""
    return lambda name, change, *more: decision(
        name, lambda decide, call: decide(**call | {argument_name: change(call)}), *more
    )


def decided_by_part(argument_name: str, field: str) -> Kind:
    """A field of an argument of the decision, for example the scores [T, E]."""

    def kind(name: str, change: Change, *more: Any) -> Mutation:
        def other(call: Call) -> Any:
            whole = call[argument_name]
            changed = {field: change(getattr(whole, field))}
            if field == "score_TE":  # a token's own order stays
                changed["choice_TE"] = whole.ranking_TE
            return dataclasses.replace(whole, **changed)

        return decided_by(argument_name)(name, other, *more)

    return kind


def knobs(name: str, change: Callable[[Any], dict[str, Any]], *more: Any) -> Mutation:
    """Other knobs of the decision's method, which ``change`` gets."""
    return decided_by("method")(
        name, lambda call: with_knobs(call["method"], **change(call["method"])), *more
    )


def outcome(name: str, change: Callable[[Assignment, Call], Assignment], *more: Any) -> Mutation:
    """What was decided."""
    return decision(name, lambda decide, call: change(decide(**call), call), *more)


def kept(name: str, change: Callable[[Tensor, Call], Tensor], *more: Any) -> Mutation:
    """The mask [T, S] of kept slots, of which ``change`` gets a copy."""

    def other(decided: Assignment, call: Call) -> Assignment:
        return dataclasses.replace(decided, keep_TS=change(decided.keep_TS.clone(), call))

    return outcome(name, other, *more)


def weights(name: str, change: Callable[[Tensor, Any], Tensor], *more: Any) -> Mutation:
    """The combine weights of slots [T, S]; ``change`` gets what they were computed from."""
    names = ("layer", "method", "scores", "assignment", "weight_TK", "changed_T")

    def wrap(combine: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def mutated(*arguments: Any) -> Tensor:
            call = SimpleNamespace(**dict(zip(names, arguments, strict=True)))
            return change(combine(*arguments).clone(), call)

        return mutated

    return Mutation(name, "hook.combine", wrap, *more)


def sent(name: str, change: Callable[..., tuple[Tensor, Tensor]], *more: Any) -> Mutation:
    """The ids and weights of slots [N, S] that are sent to the experts.

    ``change`` gets both, who counts among the rows, and the number of experts.
    """

    def wrap(send: Change) -> Change:
        def mutated(hook: Any, plan: Any, *call: Any) -> Any:
            output = send(hook, plan, *call)
            if output is None:
                return None
            logits_NE, weight_NS, index_NS = output
            counts_N = torch.zeros(len(index_NS), dtype=torch.bool)
            counts_N[plan.groups.rows_T] = True
            hook.layer.experts.capmoe_counted = None  # the kernel counts by itself
            changed = change(index_NS.clone(), weight_NS.clone(), counts_N, hook.layer.n_experts)
            return logits_NE, *reversed(changed)

        return mutated

    return Mutation(name, "LayerHook.sent", wrap, *more)
