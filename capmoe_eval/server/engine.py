"""Put one loaded vLLM model under a method: route each step, compute the kept pairs, and check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.scores import Assignment, Scores
from capmoe_eval.server.gate import read_gate, rounds_to_logits, slack
from capmoe_eval.server.step import StepPlan, StepRows, plan_step
from capmoe_eval.wrapper.event import ExpertsCall, LayerForward, RouterCall
from capmoe_eval.wrapper.hook import combine, decide, normalises_all, score
from capmoe_eval.wrapper.kernel import combine as sum_of_pairs
from capmoe_eval.wrapper.layers import MoeLayer, expected_moe_layers
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.proof import KERNEL_TOLERANCE

# Shape suffixes: N rows of a step, T rows of one plan, E experts, K = top-k, S slots per token,
# P kept pairs, H hidden size.

Routing = tuple[Tensor, Tensor]  # weights [N, K] and experts [N, K], as vLLM's routers return them


class EngineCapacity:
    """The MoE layers of one engine under a method, and the meter that checks every step."""

    def __init__(self, model: Any, config: Any, method: Method, *, samples: bool = False) -> None:
        """Find and take over the routers and experts of a model that vLLM has loaded.

        Args:
            model: The model, an ``nn.Module``.
            config: Its configuration, of transformers.
            method: One that :func:`capmoe_eval.server.settings.check_method` takes.
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
        self._layers = [LayerCapacity(self, n, layer) for n, layer in enumerate(layers)]
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
            step = _rows(self._runner, self._scheduled)
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
            expected = [(layer, part) for layer in range(len(self._layers)) for part in _PARTS]
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
        for part in self._layers:
            part.install()

    def remove(self) -> None:
        """Give the routers and the experts back to vLLM, whose steps are then not checked."""
        self._is_installed = False
        for part in self._layers:
            part.remove()

    def report(self) -> dict[str, Any]:
        """Return summary, layers and proofs of all steps (``docs/reference/records.md``)."""
        return {"method": self.method.identity(), **self.meter.report()}


_PARTS = ("router", "experts")


def _rows(runner: Any, scheduled: Any) -> StepRows:
    """Return the rows of the step that a model runner computes, before it counts them."""
    batch, n = runner.input_batch, runner.input_batch.num_reqs
    requests = tuple(batch.req_ids[:n])
    return StepRows(
        requests,
        tuple(int(scheduled.num_scheduled_tokens[request]) for request in requests),
        tuple(batch.num_computed_tokens_cpu[:n].tolist()),
        tuple(batch.num_prompt_tokens[:n].tolist()),
    )


def _moe_layer(path: str, runner: Any, model: str) -> MoeLayer:
    """Return a layer of vLLM as the suite knows layers, or refuse the layer."""
    method, experts = runner._quant_method, runner.routed_experts
    fix = "serve this model without CAPMOE_METHOD"
    if method.is_monolithic:
        raise UsageError(
            f"model={model}: the kernel of {path} ({type(method).__name__}) chooses the experts by "
            f"itself, so that no router can be put under a capacity; {fix}"
        )
    if getattr(experts, "apply_router_weight_on_input", False):
        raise UsageError(
            f"model={model}: {path} weighs the input of its experts, so that a weight of 0 would "
            f"not drop a pair; {fix}"
        )
    router = runner.router
    if getattr(router, "eplb_state", None) is not None:
        raise UsageError(
            f"model={model}: the experts of {path} are placed by EPLB, whose numbers of experts "
            "are other ones; start the server without --enable-eplb"
        )
    return MoeLayer(
        path,
        router,
        method.moe_kernel.fused_experts,
        read_gate(f"model={model}: {path}", router),
        int(router.global_num_experts),
        int(router.top_k),
    )


class _Routed(NamedTuple):
    """The rows of one plan whose router ran, and whose experts have not run yet."""

    plan: StepPlan
    router: RouterCall
    scores: Scores
    assignment: Assignment | None


class LayerCapacity:
    """One layer of an engine under a method: its router and its experts."""

    def __init__(self, engine: EngineCapacity, number: int, layer: MoeLayer) -> None:
        self._engine, self._number, self._layer = engine, number, layer
        self._method = engine.method.of_layer(number)
        router, experts = layer.router, layer.experts
        self._stock_route: Any = router._select_experts
        self._stock_experts: Any = experts.apply
        # Only kernels that were tried are given rows of single pairs.
        self._compacts = any(of.__name__ == "CPUUnquantizedExperts" for of in type(experts).__mro__)
        self._is_proven = False
        self._rounds = rounds_to_logits(router)
        self._plans: Sequence[StepPlan] = ()  # of the step whose router ran
        self._routed: list[_Routed] = []  # those of its rows that are decided or observed
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
        self._plans = self._engine.plans(len(index_NK))
        for plan in self._plans:
            plan.seen.append((self._number, "router"))
            decides = plan.constrained and not self._method.is_stock
            if not decides and not plan.observers:
                continue
            router = RouterCall(
                plan.rows(hidden_states) if self._method.reads_hidden else None,
                plan.rows(router_logits),
                plan.rows(weight_NK),
                plan.rows(index_NK).long(),
                slack(plan.rows(router_logits)) if self._rounds and plan.observers else None,
            )
            scores, assignment = score(self._layer, plan, router), None
            if decides:
                assignment = decide(
                    scores,
                    self._method,
                    plan.on(index_NK.device).groups,
                    layer=self._layer,
                    stream=(self._number, plan.number),
                    hidden_TH=router.hidden_NH,
                )
                weight_NK, index_NK = self._sent(
                    plan, router, scores, assignment, weight_NK, index_NK
                )
            self._routed.append(_Routed(plan, router, scores, assignment))
        return weight_NK, index_NK

    def _sent(
        self,
        plan: StepPlan,
        router: RouterCall,
        scores: Scores,
        assignment: Assignment,
        weight_NK: Tensor,
        index_NK: Tensor,
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
        weight_TS = combine(layer, self._method, scores, assignment, router.weight_NK, changed_T)
        slots = assignment.index_TS.shape[1]
        shape = (len(index_NK), max(slots, index_NK.shape[1]))
        weight_NS, index_NS = weight_NK.new_zeros(shape), index_NK.new_zeros(shape)
        dropped_NS = torch.ones(shape, dtype=torch.bool, device=index_NK.device)
        own = slice(0, index_NK.shape[1])
        weight_NS[:, own], index_NS[:, own], dropped_NS[:, own] = weight_NK, index_NK, False
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
        proof = self._engine.meter.kernel_agrees
        self._engine.meter.kernel_agrees = {
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
        for plan, router, scores, assignment in routed:
            experts = ExpertsCall(
                plan.rows(call["hidden_states"]), plan.rows(index_NS), plan.rows(weight_NS)
            )
            event = LayerForward(
                plan=plan,
                number=self._number,
                layer=self._layer,
                method=self._method,
                calibrated=None,
                router=router,
                scores=scores,
                assignment=assignment,
                experts=experts,
                computed=None,
            )
            for observer in plan.observers:
                observer.see(event)
