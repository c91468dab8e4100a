"""Put one MoE layer of an engine under a method: route the step's rows, compute the kept pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from capmoe_eval.errors import EnforcementError
from capmoe_eval.routing.decision import Assignment
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.hook import combine, decide, normalises_all
from capmoe_eval.wrapper.kernel import KERNEL_TOLERANCE
from capmoe_eval.wrapper.kernel import combine as sum_of_pairs
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.meter import Meter
from torch import Tensor

from capmoe_serve.server.gate import rounds_to_logits, slack
from capmoe_serve.server.step import StepPlan

# Shape suffixes: N rows of a step, T rows of one plan, E experts, K = top-k, S slots per token,
# P kept pairs, H hidden size.

Routing = tuple[Tensor, Tensor]  # weights [N, K] and experts [N, K], as vLLM's routers return them


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
        # Of each plan of it that is decided or observed; its experts have not run yet.
        self._routed: list[LayerForward] = []
        self._dropped_NS: Tensor | None = None  # None where every slot of the step is computed

    def install(self) -> None:
        """Take the place of the layer's router and of its experts' kernel."""
        router: Any = self._layer.router
        experts: Any = self._layer.experts
        router._select_experts, experts.apply = self.route, self.compute

    def remove(self) -> None:
        """Give the router and the experts back."""
        router: Any = self._layer.router
        experts: Any = self._layer.experts
        router._select_experts, experts.apply = self._stock_route, self._stock_experts

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
                weight_NK, index_NK = self._sent(event, event.assignment, weight_NK, index_NK)
            self._routed.append(event)
        return weight_NK, index_NK

    def _sent(
        self, event: LayerForward, assignment: Assignment, weight_NK: Tensor, index_NK: Tensor
    ) -> Routing:
        """Return the routing of the step with the kept pairs of a plan's rows.

        A dropped slot keeps a valid expert and has the weight 0: other ids would be computed, or
        read memory out of bounds. Where nothing changes, the router's own tensors are returned.
        """
        layer = self._layer
        changed_T = assignment.changed_T(layer.top_k)
        # A layer waits for its device here.
        if not normalises_all(layer, self._method) and not bool(changed_T.any()):
            return weight_NK, index_NK
        scores, router_NK = event.scores, event.weight_NK
        weight_TS = combine(layer, self._method, scores, assignment, router_NK, changed_T)
        slots = assignment.index_TS.shape[1]
        shape = (len(index_NK), max(slots, index_NK.shape[1]))
        weight_NS, index_NS = weight_NK.new_zeros(shape), index_NK.new_zeros(shape)
        dropped_NS = torch.ones(shape, dtype=torch.bool, device=index_NK.device)
        routers = slice(0, index_NK.shape[1])  # the slots of its own choice
        weight_NS[:, routers], index_NS[:, routers] = weight_NK, index_NK
        dropped_NS[:, routers] = False
        rows, taken = _plan(event).rows_T.to(index_NK.device), slice(0, slots)
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
        routed = [of for of in self._routed if of.plan.observers]
        self._plans, self._routed = (), []
        if not routed:
            return
        index_NS, weight_NS = call["topk_ids"].long(), call["topk_weights"]
        if dropped_NS is not None:
            # A slot counts as dropped only if its weight, too, is 0 at the experts.
            dropped_NS = dropped_NS & (weight_NS == 0)
            index_NS = index_NS.masked_fill(dropped_NS, self._layer.n_experts)
        for event in routed:
            plan = _plan(event)
            event.experts_ran(
                plan.rows(call["hidden_states"]), plan.rows(index_NS), plan.rows(weight_NS)
            )
            for observer in plan.observers:
                observer.see(event)


def _plan(event: LayerForward) -> StepPlan:
    """Return the rows of a step that a layer's forward is about."""
    assert isinstance(event.plan, StepPlan)
    return event.plan
