"""A mutation: a function of the package and what a slip makes of it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from capmoe_eval.routing.scores import Assignment
from tests.wrapper.mutations.concerns import everywhere, unchanged
from tests.wrapper.mutations.settings import Setting, with_knobs

Call = dict[str, Any]
Decide = Callable[..., Assignment]


@dataclass(frozen=True)
class Mutation:
    """A wrong decision by its name."""

    name: str
    target: str  # "routing.capacity:capacity", or "wrapper.plan:ForwardPlan.constrained"
    change: Callable[[Any], Any]  # of the function
    concerns: Callable[[Setting], bool] = everywhere
    world: Callable[[Setting], Setting] = unchanged  # the setting in which it can be seen

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the function in every module that has imported it."""
        module_name, _, path = self.target.partition(":")
        module = importlib.import_module(f"capmoe_eval.{module_name}")
        owner_name, _, name = path.rpartition(".")
        if owner_name:
            owner = getattr(module, owner_name)
            original = vars(owner)[name]
            if isinstance(original, property):
                monkeypatch.setattr(owner, name, property(self.change(original.fget)))
            else:
                monkeypatch.setattr(owner, name, self.change(original))
            return
        original = getattr(module, name)
        changed = self.change(original)
        for other in _modules(len(sys.modules)):
            if vars(other).get(name) is original:
                monkeypatch.setattr(other, name, changed)


@functools.lru_cache(maxsize=1)
def _modules(_count: int) -> list[ModuleType]:
    """Return the package's modules, looked for again when there are others."""
    return [module for name, module in sys.modules.items() if name.startswith("capmoe_eval")]


def decision(
    name: str,
    change: Callable[[Decide, Call], Assignment],
    concerns: Callable[[Setting], bool] = everywhere,
    world: Callable[[Setting], Setting] = unchanged,
) -> Mutation:
    """Return a mutation of the whole decision, which ``change`` makes by calling the true one.

    ``change`` gets the decision and its arguments by name.
    """

    def wrap(assign: Decide) -> Decide:
        def mutated(scores: Any, method: Any, groups: Any, **more: Any) -> Assignment:
            call = {"scores": scores, "method": method, "groups": groups, **more}
            decided = change(assign, call)
            if method.reads_hidden and decided.details is None:  # an assignment made anew
                details = assign(**call).details
                decided = dataclasses.replace(decided, details=details)
            return decided

        return mutated

    return Mutation(name, "wrapper.hook:decide", wrap, concerns, world)


def argument(name: str, argument_name: str, change: Callable[[Call], Any], *more: Any) -> Mutation:
    """Return a mutation of the decision that is made from another argument."""
    return decision(
        name, lambda decide, call: decide(**call | {argument_name: change(call)}), *more
    )


def knobs(name: str, change: Callable[[Any], dict[str, Any]], *more: Any) -> Mutation:
    """Return a mutation of the decision that is made as with other knobs of its method."""

    def other(call: Call) -> Any:
        return with_knobs(call["method"], **change(call["method"]))

    return argument(name, "method", other, *more)


def outcome(name: str, change: Callable[[Assignment, Call], Assignment], *more: Any) -> Mutation:
    """Return a mutation of what was decided."""
    return decision(name, lambda decide, call: change(decide(**call), call), *more)


def weights(name: str, change: Callable[[Tensor, Any], Tensor], *more: Any) -> Mutation:
    """Return a mutation of the combine weights of slots [T, S].

    ``change`` gets the weights and the arguments that they were computed from.
    """
    names = ("layer", "method", "scores", "assignment", "weight_TK", "changed_T")

    def wrap(combine: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def mutated(*arguments: Any) -> Tensor:
            call = SimpleNamespace(**dict(zip(names, arguments, strict=True)))
            return change(combine(*arguments).clone(), call)

        return mutated

    return Mutation(name, "wrapper.hook:combine", wrap, *more)


def sent(name: str, change: Callable[..., tuple[Tensor, Tensor]], *more: Any) -> Mutation:
    """Return a mutation of what is sent to the experts: ids and weights of slots [N, S].

    ``change`` gets both, and who counts among the rows.
    """

    def wrap(send: Callable[..., Any]) -> Callable[..., Any]:
        def mutated(hook: Any, plan: Any, *call: Any) -> Any:
            output = send(hook, plan, *call)
            if output is None:
                return None
            logits_NE, weight_NS, index_NS = output
            counts_N = torch.zeros(len(index_NS), dtype=torch.bool)
            counts_N[plan.groups.rows_T] = True
            about = SimpleNamespace(n_experts=hook.layer.n_experts, counts_N=counts_N)
            index_NS, weight_NS = change(index_NS.clone(), weight_NS.clone(), about)
            hook.layer.experts.capmoe_counted = None  # the kernel counts by itself
            return logits_NE, weight_NS, index_NS

        return mutated

    return Mutation(name, "wrapper.hook:LayerHook._sent", wrap, *more)


def result(name: str, target: str, change: Callable[..., Any], *more: Any) -> Mutation:
    """Return a mutation of what a function returns.

    ``change`` gets the true result and the function's arguments.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def mutated(*arguments: Any, **named: Any) -> Any:
            return change(function(*arguments, **named), *arguments, **named)

        return mutated

    return Mutation(name, target, wrap, *more)


def of_first_call(name: str, target: str, change: Callable[..., Any], *more: Any) -> Mutation:
    """Return a mutation of a result that is combined with that of the function's first call.

    ``change`` gets the first result and the present one.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        first: list[Any] = []

        def mutated(*arguments: Any, **named: Any) -> Any:
            present = function(*arguments, **named)
            first.append(present)
            return change(first[0], present)

        return mutated

    return Mutation(name, target, wrap, *more)
