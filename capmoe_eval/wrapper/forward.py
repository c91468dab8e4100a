"""Hook a model's forwards: route by the method, count loads and check the invariants."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.routing.assign import assign, batch_counts
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.scores import Assignment, Scores
from capmoe_eval.routing.weighted import weigh
from capmoe_eval.wrapper.generation import Generation
from capmoe_eval.wrapper.invariants.event import ExpertsCall, ForwardEvent, RouterCall
from capmoe_eval.wrapper.kernel import kept_pairs_kernel
from capmoe_eval.wrapper.layer_meter import LayerMeter
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.modality import ImageFinder
from capmoe_eval.wrapper.plan import ForwardPlan, new_columns, read_call
from capmoe_eval.wrapper.ranks import ALONE

# Shape suffixes: B sequences, S positions (of a batch) or slots (of a token), N = B·S rows,
# M columns of a mask, T counted tokens, K = top-k, E experts.

CPU = torch.device("cpu")
ACTIVE = "capmoe_active"
"""Name of the attribute that marks a router under a capacity."""

RouterOutput = tuple[Tensor, Tensor, Tensor]  # logits [N, E], weights [N, K], indices [N, K]


@contextmanager
def hooked(model: nn.Module, meter: Meter) -> Iterator[None]:
    """Install hooks and kernels, and remove them on exit, also on an exception."""
    hooks = _ForwardHooks(model, meter)
    with ExitStack() as stack:
        for layer in (of_layer.layer for of_layer in meter.layers):
            setattr(layer.router, ACTIVE, True)
            stack.callback(delattr, layer.router, ACTIVE)
            # Experts that are spread over processes never get a dropped slot: it is not sent.
            if not meter.method.is_stock and layer.ranks is ALONE:
                stack.enter_context(kept_pairs_kernel(layer.experts, hooks.watch(layer)))
        for handle in hooks.install():
            stack.callback(handle.remove)
        stack.enter_context(hooks.generation.followed(model))
        yield


class _ForwardHooks:
    """The hooks of one :func:`hooked` block."""

    def __init__(self, model: nn.Module, meter: Meter) -> None:
        self._model = model
        self._meter = meter
        self._signature = inspect.signature(model.forward)
        self._images = ImageFinder(model)
        layers = range(len(meter.layers))
        self._expected = [(layer, part) for layer in layers for part in ("router", "experts")]
        self._plan: ForwardPlan | None = None
        self._last: ForwardPlan | None = None  # the forward that a backward pass may recompute
        # Without a capacity a decode step needs no count of its tokens, unless they are recorded.
        self.generation = Generation(
            lambda: meter.method.decode != "unconstrained" or meter.records_every_forward
        )

    def install(self) -> Iterator[Any]:
        """Register the hooks and yield their handles."""

        def unless_aside(hook: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *call: None if self._meter.is_aside else hook(*call)

        before, after = unless_aside(self._before_forward), unless_aside(self._after_forward)
        yield self._model.register_forward_pre_hook(before, with_kwargs=True)
        yield self._model.register_forward_hook(after)
        for number, meter in enumerate(self._meter.layers):
            router = unless_aside(self._router_hook(number, meter))
            experts = unless_aside(self._experts_hook(number, meter))
            yield meter.layer.router.register_forward_hook(router)
            yield meter.layer.experts.register_forward_pre_hook(experts, with_kwargs=True)

    def watch(self, layer: MoeLayer) -> Callable[[Tensor], None]:
        """Return a function that notes the experts that a layer's stock kernel computes."""
        numbers = {meter.layer.name: number for number, meter in enumerate(self._meter.layers)}

        def note(index: Tensor) -> None:
            event = None if self._plan is None else self._plan.event
            computed = None if event is None else event.experts[numbers[layer.name]].computed
            if computed is not None:
                computed.append(index)

        return note

    # The forward of the whole model.

    def _before_forward(
        self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        meter = self._meter
        arguments, tokens = read_call(self._signature, args, kwargs)
        cache = arguments.get("past_key_values")
        n_cached = 0 if cache is None else int(cache.get_seq_length())
        step = self.generation.take_step()
        decode = not step.first if step else tokens.shape[1] == 1 and n_cached > 0
        mask = arguments.get("attention_mask")
        if step and getattr(mask, "ndim", None) != 2:
            mask = None if step.mask is None else meter.ranks.own(step.mask)
        if step and step.finished_B is not None:  # sequences that have finished are pads
            if mask is None:
                mask = torch.ones(len(tokens), n_cached + tokens.shape[1], device=tokens.device)
            finished_B1 = meter.ranks.own(step.finished_B)[:, None]
            mask = mask.masked_fill(finished_B1.to(mask.device), 0)
        if meter.real_tokens_BS is not None:
            mask, n_cached = meter.ranks.own(meter.real_tokens_BS), 0
            if mask.shape != tokens.shape[:2]:
                raise UsageError(
                    f"real_tokens: the mask's shape {tuple(mask.shape)} is not that of the batch, "
                    f"{tuple(tokens.shape[:2])}"
                )
        plan = self._plan = ForwardPlan(
            meter.method,
            meter.forwards,
            counted_BS=self._counted(mask, tokens, n_cached),
            decode=decode,
            image_BS=self._images.find(arguments, tokens, meter.method.modality_setting),
            row_end_BS=self._images.row_ends(arguments),
            ranks=meter.ranks,
        )
        if plan.constrained and meter.examines_next:
            n_sequences, n_new = tokens.shape[:2]
            plan.event = ForwardEvent(
                plan.number, mask, n_cached, n_sequences, n_new, plan.image_BS, meter.ranks.idle
            )
        meter.note_forward(plan, mask)

    def _counted(self, mask: Any, tokens: Tensor, n_cached: int) -> Tensor:
        """Return a mask [B, S] of the tokens that count."""
        # One process makes its groups on the host.
        device = CPU if self._meter.ranks is ALONE else tokens.device
        everyone_BS = torch.ones(tokens.shape[:2], dtype=torch.bool, device=device)
        if self._meter.ranks.idle:
            return ~everyone_BS
        if self._meter.method.count_padding or mask is None:
            return everyone_BS
        return new_columns(mask, tokens, n_cached).to(tokens.device)

    def _after_forward(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        plan, self._plan = self._plan, None
        assert plan is not None
        if plan.seen != self._expected:
            names = [meter.layer.name for meter in self._meter.layers]
            missing = [names[n] for n, part in self._expected if (n, part) not in plan.seen]
            raise EnforcementError(
                f"not every MoE layer ran exactly once in a forward: {missing or 'some ran twice'}"
            )
        if plan.event is not None:
            self._meter.definition.examine(plan.event)
        if plan.constrained:  # else nothing was counted since the last check
            self._meter.check()
        checkpointed = self._model.training and any(
            getattr(module, "gradient_checkpointing", False) for module in self._model.modules()
        )
        self._last = plan if checkpointed else None

    def _running_plan(self, number: int, part: str) -> ForwardPlan:
        if self._plan is not None:
            self._plan.seen.append((number, part))
            return self._plan
        if self._last is not None:
            return self._last
        raise EnforcementError(
            "a router ran outside a forward of the model that is under a capacity: call that "
            "model, not a part of it"
        )

    # The forward of one layer.

    def _router_hook(self, number: int, meter: LayerMeter) -> Callable[..., RouterOutput | None]:
        method, layer = meter.method, meter.layer
        experts: Any = layer.experts
        kept_pairs = hasattr(experts, "capmoe_untouched")

        def hook(
            _router: nn.Module, args: tuple[Tensor, ...], output: RouterOutput
        ) -> RouterOutput | None:
            plan = self._running_plan(number, "router")
            again = plan is self._last
            if kept_pairs:
                experts.capmoe_untouched = True
            recorder = None if again else self._meter.recorder
            if not plan.constrained and not self._meter.records_every_forward:
                return None
            logits_NE, weight_NK, topk_NK = output
            if plan.event is not None and not again:
                hidden_NH = args[0].flatten(0, -2) if method.weighs_tokens else None
                plan.event.routers[number] = RouterCall(logits_NE, weight_NK, topk_NK, hidden_NH)
            groups, _, image_T, _ = plan.on(topk_NK.device)
            if len(topk_NK) != groups.n_rows:
                raise EnforcementError(
                    f"{layer.name}: {len(topk_NK)} rows for {groups.n_rows} tokens"
                )
            counted = map(groups.counted, (logits_NE, weight_NK, topk_NK))
            logits_TE, weight_TK, topk_TK = counted
            scores = layer.gate.scores(logits_TE, topk_TK)
            if recorder is not None:
                recorder.note(number, plan, scores)
            if not plan.constrained:
                return None
            if again and not torch.equal(plan.choices[number], topk_TK):
                raise EnforcementError(
                    f"{layer.name}: the backward pass computes another forward again than the last "
                    "one; with gradient checkpointing, go backward after every forward"
                )
            if not again:
                plan.choices[number] = topk_TK
                meter.note_router(scores, weight_TK)
            if method.is_stock:
                return None
            counts = None
            if method.decides_by_batch:
                counts = layer.ranks.total(batch_counts(scores, method))
            calibrated, weighted = meter.calibrated_on(topk_TK.device), None
            if method.weighs_tokens:
                assert calibrated is not None
                weighted = weigh(
                    method,
                    groups,
                    bias_E=calibrated,
                    top_k=layer.top_k,
                    hidden_TH=groups.counted(args[0].detach().flatten(0, -2)),
                    image_T=image_T,
                )
                meter.weighted = meter.weighted if again else weighted
            assignment = assign(
                scores,
                method,
                groups,
                image_T=image_T,
                stream=(number, plan.number),
                counts=counts,
                calibrated=calibrated,
                weighted=weighted,
            )
            changed_T = assignment.changed_T(layer.top_k)
            # A layer waits for its device here and nowhere else.
            n_changed, n_kept = torch.stack([changed_T.sum(), assignment.keep_TS.sum()]).tolist()
            if groups.every_row_counts and not n_changed:
                return None
            weight_TS = _combine_weights(layer, method, scores, assignment, weight_TK, changed_T)
            dropped_TS, no_expert = ~assignment.keep_TS, layer.n_experts
            index_TS = assignment.index_TS.masked_fill(dropped_TS, no_expert)
            index_NS = groups.every_row(index_TS, no_expert)  # a row that does not count has none
            weight_NS = groups.every_row(weight_TS.masked_fill(dropped_TS, 0.0), 0.0)
            if kept_pairs:
                experts.capmoe_untouched, experts.capmoe_counted = False, (index_NS, n_kept)
            return logits_NE, weight_NS, index_NS

        return hook

    def _experts_hook(self, number: int, meter: LayerMeter) -> Callable[..., None]:
        signature = inspect.signature(type(meter.layer.experts).forward)
        # (self, hidden, index, weights)
        hidden_name, index_name, weight_name = list(signature.parameters)[1:4]

        def hook(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            plan = self._running_plan(number, "experts")
            if plan is self._last or not plan.constrained:
                return
            called = signature.bind(experts, *args, **kwargs).arguments
            index_NS = called[index_name]
            if plan.event is not None:
                unit_T = None if meter.weighted is None else meter.weighted.unit_T
                computed: list[Tensor] | None = [] if hasattr(experts, "capmoe_stock") else None
                call = ExpertsCall(index_NS, called[weight_name], unit_T, computed)
                plan.event.experts[number] = call
            meter.note_experts(index_NS, plan)
            if self._meter.recorder is not None:
                self._meter.recorder.note_hidden(number, plan, called[hidden_name])

        return hook


def _combine_weights(
    layer: MoeLayer,
    method: Method,
    scores: Scores,
    assignment: Assignment,
    weight_TK: Tensor,
    changed_T: Tensor,
) -> Tensor:
    """Return the weight of every slot [T, S] in the router's own precision.

    The router's own pairs keep the router's own weights, bit for bit; an added pair gets its score
    over the same denominator. With ``renormalize="after"``, where the family normalises, the rows
    that changed are normalised over their kept pairs. Where weights move with the tokens, a pair
    has the sum of those that it takes.
    """
    if assignment.slot_TK is not None:
        slots = torch.arange(assignment.index_TS.shape[1], device=weight_TK.device)
        taken_TKS = weight_TK[:, :, None].where(assignment.slot_TK[:, :, None] == slots, 0)
        exact = torch.promote_types(weight_TK.dtype, torch.float32)
        return taken_TKS.sum(dim=1, dtype=exact).to(weight_TK.dtype)
    index_TS, keep_TS = assignment.index_TS, assignment.keep_TS
    n_added = index_TS.shape[1] - layer.top_k
    anew = method.renormalize == "after" and layer.gate.recipe.normalises
    if not n_added and not anew:
        return weight_TK
    over_TS = keep_TS if anew else None
    computed_TS = layer.gate.weights(scores, index_TS, over_TS).to(weight_TK.dtype)
    own_TS = torch.cat([weight_TK, computed_TS[:, layer.top_k :]], dim=1)
    return torch.where(changed_T[:, None], computed_TS, own_TS) if anew else own_TS
