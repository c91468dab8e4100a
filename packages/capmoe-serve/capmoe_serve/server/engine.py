"""Put one loaded vLLM model under a method: plan each step, route and compute each layer, check.

A step computes rows of several requests, one after the other: the whole or a chunk of a prompt, or
the one token that was generated last. A row is of a prompt if its position lies within the prompt;
a chunk of one row may end a prompt, so that the number of a request's rows tells nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.hook import combine, decide, normalises_all
from capmoe_eval.wrapper.kernel import KERNEL_TOLERANCE
from capmoe_eval.wrapper.kernel import combine as sum_of_pairs
from capmoe_eval.wrapper.layers import MoeLayer, expected_moe_layers
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.plan import ForwardPlan
from torch import Tensor

from capmoe_serve.server.gate import read_gate, rounds_to_logits, slack

# Shape suffixes: N rows of a step, T rows of one plan, E experts, K = top-k, S slots per token,
# P kept pairs, H hidden size.

Routing = tuple[Tensor, Tensor]  # weights [N, K] and experts [N, K], as vLLM's routers return them


@dataclass(frozen=True)
class StepRows:
    """The rows of a step that are tokens; padding comes behind them."""

    requests: tuple[str, ...]  # ids, in the order of their rows
    scheduled: tuple[int, ...]  # rows of each request
    computed: tuple[int, ...]  # tokens of each request that earlier steps computed
    prompt: tuple[int, ...]  # length of each request's prompt

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return sum(self.scheduled)

    @cached_property
    def decode_N(self) -> Tensor:
        """True for a row behind the prompt of its request."""
        scheduled, computed, prompt = (
            np.array(of, dtype=np.int64) for of in (self.scheduled, self.computed, self.prompt)
        )
        before = scheduled.cumsum() - scheduled
        behind_N = np.arange(self.n_rows) + np.repeat(computed - before - prompt, scheduled)
        return torch.from_numpy(behind_N >= 0)


class StepPlan(ForwardPlan):
    """The rows of one step that are under the method together, or those that are not."""

    rows_T: Tensor  # places of the rows in the step
    decode_T: Tensor  # True for a row behind the prompt
    step: StepRows

    def __init__(self, method: Method, number: int, step: StepRows, rows_T: Tensor) -> None:
        self.step, self.rows_T = step, rows_T
        self.decode_T = step.decode_N[rows_T]
        decode = bool(self.decode_T.all())
        super().__init__(
            method,
            number=number,
            n_sequences=1,
            n_new=len(rows_T),
            prompt_length=len(rows_T),
            is_prompt=not decode,
            counted_BS=torch.ones(1, len(rows_T), dtype=torch.bool),
            decode=decode,
        )

    @property
    def live(self) -> Tensor:
        """The number of requests []: the rows of a step are one sequence of the call."""
        scheduled = torch.tensor(self.step.scheduled, dtype=torch.long)
        request_N = torch.repeat_interleave(scheduled)
        return torch.tensor(len(set(request_N[self.rows_T].tolist())))

    def rows(self, value_N: Tensor) -> Tensor:
        """Return what the plan's rows [T, …] have of the values of every row of the step [N, …]."""
        if len(self.rows_T) == len(value_N):
            return value_N
        return value_N.index_select(0, self.rows_T.to(value_N.device))


def plan_step(method: Method, number: int, step: StepRows) -> Sequence[StepPlan]:
    """Return the plans of a step: of the rows under the method, and of the others.

    ``number`` is that of the first of them among all plans of the engine.
    """
    under_N = torch.ones(step.n_rows, dtype=torch.bool)
    if method.decode != "constrained":
        under_N = step.decode_N == (method.decode == "only")
    parts = [rows_T for part_N in (under_N, ~under_N) if len(rows_T := part_N.nonzero()[:, 0])]
    return [StepPlan(method, number + n, step, rows_T) for n, rows_T in enumerate(parts)]


class LayerCapacity:
    """One layer of an engine under a method: its router and its experts."""

    def __init__(
        self,
        number: int,
        layer: MoeLayer,
        method: Method,
        meter: Meter,
        plans: Callable[[int], Sequence[StepPlan]],
    ) -> None:
        """Note the layer's own functions; nothing is replaced yet.

        Args:
            number: Of the layer among the MoE layers, from 0.
            layer: The layer.
            method: The method, with the layer's own γ.
            meter: The meter of the engine, for the proof of the kernel.
            plans: Returns the plans of the step that is computed, given its number of rows.
        """
        self._number, self._layer, self._method = number, layer, method
        self._meter, self._plans_of_step = meter, plans
        router, experts = layer.router, layer.experts
        self._stock_route: Any = router._select_experts
        self._stock_experts: Any = experts.apply
        # Only kernels that were tried are given rows of single pairs.
        self._compacts = any(of.__name__ == "CPUUnquantizedExperts" for of in type(experts).__mro__)
        self._is_proven = False
        self._rounds = rounds_to_logits(router)
        self._plans: Sequence[StepPlan] = ()  # of the step whose router ran
        # Each plan of it that is decided or observed, and its forward, whose experts have not run.
        self._routed: list[tuple[StepPlan, LayerForward]] = []
        self._dropped_NS: Tensor | None = None  # None where every slot of the step is computed

    def replace(self, *, by_stock: bool) -> None:
        """Take the place of the layer's router and of its experts' kernel, or give them back."""
        router: Any = self._layer.router
        experts: Any = self._layer.experts
        stock = self._stock_route, self._stock_experts
        router._select_experts, experts.apply = stock if by_stock else (self.route, self.compute)

    def route(
        self, hidden_states: Tensor, router_logits: Tensor, *args: Any, **kwargs: Any
    ) -> Routing:
        """Return the weights and experts of every row under the method."""
        weight_NK, index_NK = self._stock_route(hidden_states, router_logits, *args, **kwargs)
        self._routed, self._dropped_NS = [], None
        self._plans = self._plans_of_step(len(index_NK))
        for plan in self._plans:
            plan.seen.append((self._number, "router"))
            decides = plan.constrained and not self._method.is_stock
            if not decides and not plan.observers:
                continue
            event = LayerForward(
                plan,
                self._number,
                self._layer,
                self._method,
                logits_NE=plan.rows(router_logits),
                weight_NK=plan.rows(weight_NK),
                topk_NK=plan.rows(index_NK).long(),
                hidden_NH=plan.rows(hidden_states) if self._method.reads_hidden else None,
                slack=slack(plan.rows(router_logits)) if self._rounds and plan.observers else None,
            )
            if decides:
                event.assignment = decide(
                    event.scores,
                    self._method,
                    event.groups,
                    layer=self._layer,
                    stream=(self._number, plan.number),
                    hidden_TH=event.hidden_NH,
                )
                weight_NK, index_NK = self._sent(plan, event, weight_NK, index_NK)
            self._routed.append((plan, event))
        return weight_NK, index_NK

    def _sent(
        self, plan: StepPlan, event: LayerForward, weight_NK: Tensor, index_NK: Tensor
    ) -> Routing:
        """Return the routing of the step with the kept pairs of a plan's rows.

        A dropped slot keeps a valid expert and has the weight 0: other ids would be computed, or
        read memory out of bounds. Where nothing changes, the router's own tensors are returned.
        """
        layer, assignment = self._layer, event.assignment
        assert assignment is not None
        changed_T = assignment.changed_T(layer.top_k)
        # A layer waits for its device here.
        if not normalises_all(layer, self._method) and not bool(changed_T.any()):
            return weight_NK, index_NK
        weight_TS = combine(
            layer, self._method, event.scores, assignment, event.weight_NK, changed_T
        )
        slots, routers = assignment.index_TS.shape[1], slice(0, index_NK.shape[1])
        shape = (len(index_NK), max(slots, index_NK.shape[1]))
        weight_NS, index_NS = weight_NK.new_zeros(shape), index_NK.new_zeros(shape)
        dropped_NS = torch.ones(shape, dtype=torch.bool, device=index_NK.device)
        # The slots of the router's own choice, then those of the plan's rows.
        weight_NS[:, routers], index_NS[:, routers] = weight_NK, index_NK
        dropped_NS[:, routers] = False
        rows, taken = plan.rows_T.to(index_NK.device), slice(0, slots)
        dropped_NS[rows, taken] = ~assignment.keep_TS
        weight_NS[rows, taken] = weight_TS.masked_fill(~assignment.keep_TS, 0.0)
        index_NS[rows, taken] = assignment.index_TS.to(index_NK.dtype)
        self._dropped_NS = dropped_NS
        return weight_NS, index_NS

    def compute(self, **call: Any) -> Any:
        """Compute the experts as vLLM calls them, and show the layer's step to the observers."""
        dropped_NS, self._dropped_NS = self._dropped_NS, None
        if dropped_NS is None or not self._compacts:
            output = self._stock_experts(**call)
        else:
            output = self._compute_kept(call, ~dropped_NS)
        if dropped_NS is not None and not self._is_proven:
            self._prove(call, dropped_NS)
        self._emit(call, dropped_NS)
        return output

    def _compute_kept(self, call: dict[str, Any], keep_NS: Tensor) -> Any:
        """Compute the kept pairs alone: each is a row with one expert."""
        hidden_NH, output_NH = call["hidden_states"], call["output"]
        token_P, slot_P = keep_NS.nonzero().unbind(dim=1)
        if not len(token_P):
            output_NH.zero_()
            return None
        rows_PH = output_NH.new_empty(len(token_P), output_NH.shape[1])
        pairs = {
            "output": rows_PH,
            "hidden_states": hidden_NH.index_select(0, token_P),
            "topk_weights": call["topk_weights"][token_P, slot_P].unsqueeze(1).contiguous(),
            "topk_ids": call["topk_ids"][token_P, slot_P].unsqueeze(1).contiguous(),
        }
        output = self._stock_experts(**call | pairs)
        output_NH.copy_(sum_of_pairs(rows_PH, keep_NS))
        return output

    def _prove(self, call: dict[str, Any], dropped_NS: Tensor) -> None:
        """Compare the output with the stock kernel's, whose dropped pairs weigh 0.

        A dropped slot names another expert there, so that one that is computed shows.
        """
        output_NH, index_NS = call["output"], call["topk_ids"]
        other_NS = torch.where(dropped_NS, (index_NS + 1) % self._layer.n_experts, index_NS)
        expected_NH = torch.empty_like(output_NH)
        self._stock_experts(**call | {"output": expected_NH, "topk_ids": other_NS})
        most = expected_NH.abs().amax().clamp_min(torch.finfo(expected_NH.dtype).tiny)
        off = float((output_NH - expected_NH).abs().amax().float() / most.float())
        tolerance = KERNEL_TOLERANCE[output_NH.dtype]
        if not off <= tolerance:
            raise EnforcementError(
                f"{self._layer.name}: the kernel of the experts computes other pairs than the "
                f"kept: it is off by {off:.1e} of its largest output, {tolerance:.0e} allowed"
            )
        self._is_proven = True
        proof = self._meter.kernel_agrees
        self._meter.kernel_agrees = {
            "passed": True,
            "deviation": max(off, proof.get("deviation", 0.0)),
            "tolerance": tolerance,
            "compared": output_NH.numel() + proof.get("compared", 0),
        }

    def _emit(self, call: dict[str, Any], dropped_NS: Tensor | None) -> None:
        """Show the observers what the experts were called with."""
        for plan in self._plans:
            plan.seen.append((self._number, "experts"))
        routed = [(plan, event) for plan, event in self._routed if plan.observers]
        self._plans, self._routed = (), []
        if not routed:
            return
        index_NS, weight_NS = call["topk_ids"].long(), call["topk_weights"]
        if dropped_NS is not None:
            # A slot counts as dropped only if its weight, too, is 0 at the experts.
            dropped_NS = dropped_NS & (weight_NS == 0)
            index_NS = index_NS.masked_fill(dropped_NS, self._layer.n_experts)
        for plan, event in routed:
            event.experts_ran(*map(plan.rows, (call["hidden_states"], index_NS, weight_NS)))
            for observer in plan.observers:
                observer.see(event)


class EngineCapacity:
    """The MoE layers of one engine under a method, and the meter that checks every step."""

    def __init__(self, model: Any, config: Any, method: Method, *, samples: bool = False) -> None:
        """Find and take over the routers and experts of a model that vLLM has loaded.

        Args:
            model: The model, an ``nn.Module``.
            config: Its configuration, of transformers.
            method: One that :func:`capmoe_serve.server.settings.check_method` takes.
            samples: Whether what no step can break is checked in the examined steps alone.

        Raises:
            UsageError: If the model has no MoE layer, or one that cannot be put under the method.
        """
        name = type(model).__name__
        runners = [
            (path, module)
            for path, module in model.named_modules()
            if hasattr(module, "router") and hasattr(module, "routed_experts")
        ]
        expected = expected_moe_layers(config)
        if not runners:
            raise UsageError(
                f"model={name}: has no Mixture-of-Experts layer, so that CAPMOE_METHOD has no "
                "effect; unset the variable, or serve an MoE model"
            )
        if expected not in (None, len(runners)):
            raise UsageError(
                f"model={name}: its configuration announces {expected} MoE layers, {len(runners)} "
                "were found; serve this model without CAPMOE_METHOD"
            )
        self.method = method
        layers = [_moe_layer(path, runner, name) for path, runner in runners]
        for layer in layers:
            method.check_layers(len(layers), layer.n_experts, layer.top_k)
        self.meter = Meter(layers, method, expected, samples=samples)
        self._layers = [
            LayerCapacity(n, layer, method.of_layer(n), self.meter, self.plans)
            for n, layer in enumerate(layers)
        ]
        self._number = 0  # plans so far
        self._runner: Any = None  # the model runner whose step is computed
        self._scheduled: Any = None
        self._plans: Sequence[StepPlan] | None = None
        self.install()

    def begin(self, runner: Any, scheduled: Any) -> None:
        """Begin a step; ``scheduled`` is what vLLM's scheduler put into the step."""
        if self._is_installed:
            self._runner, self._scheduled, self._plans = runner, scheduled, None

    def plans(self, n_rows: int) -> Sequence[StepPlan]:
        """Return the plans of the step that is computed; none in a warm-up, which has no requests.

        Raises:
            EnforcementError: If the step computes fewer rows than its requests have.
        """
        if self._runner is None:
            return ()
        if self._plans is None:
            # What the model runner computes, before it counts these tokens as computed.
            batch = self._runner.input_batch
            requests = tuple(batch.req_ids[: batch.num_reqs])
            step = StepRows(
                requests,
                tuple(int(self._scheduled.num_scheduled_tokens[request]) for request in requests),
                tuple(batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()),
                tuple(batch.num_prompt_tokens[: batch.num_reqs].tolist()),
            )
            if step.n_rows > n_rows:
                raise EnforcementError(f"a step computes {n_rows} rows of {step.n_rows} tokens")
            self._plans = plan_step(self.method, self._number, step)
            self._number += len(self._plans)
            for plan in self._plans:
                self.meter.begin(plan)
        return self._plans

    def end(self) -> None:
        """End a step: check that every layer ran, and every invariant.

        Raises:
            EnforcementError: If a layer did not run, or an invariant is broken.
        """
        plans, scheduled = self._plans, self._scheduled
        self.abandon()
        if plans is None and scheduled and any(scheduled.num_scheduled_tokens.values()):
            raise EnforcementError("no MoE layer ran under the method in a step with tokens")
        for plan in plans or ():
            expected = list(itertools.product(range(len(self._layers)), ("router", "experts")))
            if plan.seen != expected:
                raise EnforcementError(
                    f"not every MoE layer ran exactly once in a step: {len(plan.seen)} calls of "
                    f"routers and experts for {len(self._layers)} layers"
                )
            self.meter.end(plan)

    def abandon(self) -> None:
        """Leave a step that was broken off."""
        self._runner = self._scheduled = self._plans = None

    def install(self) -> None:
        """Take over the routers and the experts, also after :meth:`remove`."""
        self._is_installed = True
        for layer in self._layers:
            layer.replace(by_stock=False)

    def remove(self) -> None:
        """Give the routers and the experts back to vLLM, whose steps are then not checked."""
        self._is_installed = False
        for layer in self._layers:
            layer.replace(by_stock=True)

    def report(self) -> dict[str, Any]:
        """Return summary, layers and proofs of all steps (``docs/reference/records.md``)."""
        return {"method": self.method.identity(), **self.meter.report()}


def _moe_layer(path: str, runner: Any, model: str) -> MoeLayer:
    """Return a layer of vLLM as the suite knows layers, or refuse the layer."""
    method, router = runner._quant_method, runner.router
    reason = ""
    if method.is_monolithic:
        reason = (
            f"the kernel of {path} ({type(method).__name__}) chooses the experts by itself, so "
            "that no router can be put under a capacity; serve this model without CAPMOE_METHOD"
        )
    elif getattr(runner.routed_experts, "apply_router_weight_on_input", False):
        reason = (
            f"{path} weighs the input of its experts, so that a weight of 0 would not drop a pair; "
            "serve this model without CAPMOE_METHOD"
        )
    elif getattr(router, "eplb_state", None) is not None:
        reason = (
            f"the experts of {path} are placed by EPLB, whose numbers of experts are other ones; "
            "start the server without --enable-eplb"
        )
    if reason:
        raise UsageError(f"model={model}: {reason}")
    return MoeLayer(
        path,
        router,
        method.moe_kernel.fused_experts,
        read_gate(f"model={model}: {path}", router),
        int(router.global_num_experts),
        int(router.top_k),
    )
