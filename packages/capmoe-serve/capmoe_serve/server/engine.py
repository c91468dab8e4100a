"""Put one loaded vLLM model under a method: plan each step, and check it when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.layers import MoeLayer, expected_moe_layers
from capmoe_eval.wrapper.meter import Meter

from capmoe_serve.server.gate import read_gate
from capmoe_serve.server.layer import LayerCapacity
from capmoe_serve.server.step import StepPlan, StepRows, plan_step


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
