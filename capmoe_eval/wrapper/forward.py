"""Hook a model's forwards: route by the method, count loads and check the invariants."""

from __future__ import annotations

import inspect
import threading
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
from capmoe_eval.wrapper.generation import Decoding, Generation
from capmoe_eval.wrapper.guard import guarded
from capmoe_eval.wrapper.invariants.definition import is_under_method
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
RouterOutput = tuple[Tensor, Tensor, Tensor]  # logits [N, E], weights [N, K], indices [N, K]


@contextmanager
def hooked(model: nn.Module, meter: Meter) -> Iterator[None]:
    """Install hooks and kernels, and remove them on exit, also on an exception."""
    hooks = _ForwardHooks(model, meter)
    with ExitStack() as stack:
        for number, layer in enumerate(of_layer.layer for of_layer in meter.layers):
            # Experts that are spread over processes never get a dropped slot: it is not sent.
            if not meter.method.is_stock and layer.ranks is ALONE:
                stack.enter_context(kept_pairs_kernel(layer.experts, hooks.watch(number)))
        for handle in hooks.install():
            stack.callback(handle.remove)
        stack.enter_context(guarded(model, meter, hooks))
        stack.enter_context(hooks.generation.followed())
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
            model, lambda: meter.method.decode != "unconstrained" or meter.records_every_forward
        )

    def install(self) -> Iterator[Any]:
        """Register the hooks and yield their handles."""

        def of(module: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
            def checked(called: nn.Module, *call: Any) -> Any:
                if called is not module:
                    raise UsageError(
                        f"{type(called).__name__}: is a copy that was made of a model under a "
                        "capacity, and would half stay under it; copy the model outside the block"
                    )
                return None if self._meter.is_aside else hook(called, *call)

            return checked

        for number, meter in enumerate(self._meter.layers):
            router, experts = meter.layer.router, meter.layer.experts
            yield router.register_forward_hook(of(router, self._router_hook(number, meter)))
            yield experts.register_forward_pre_hook(
                of(experts, self._experts_hook(number, meter)), with_kwargs=True
            )

    def watch(self, number: int) -> Callable[[Tensor], None]:
        """Return a function that notes the experts that a layer's stock kernel computes."""

        def note(index: Tensor) -> None:
            event = None if self._plan is None else self._plan.event
            call = None if event is None else event.experts.get(number)
            if call is not None and call.computed is not None:
                call.computed.append(index)

        return note

    # The forward of the whole model.

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardPlan:
        """Return the plan of the forward that begins: its counted tokens, images and groups."""
        meter = self._meter
        arguments, tokens = read_call(self._signature, args, kwargs)
        cache = arguments.get("past_key_values")
        n_cached = 0 if cache is None else int(cache.get_seq_length())
        step = self.generation.step()
        decode = not step.first if step else tokens.shape[1] == 1 and n_cached > 0
        prompt_length = tokens.shape[1]  # positions of this forward that are no generated tokens
        if step and step.first:
            step.prompt_length = n_cached + tokens.shape[1]
        elif decode:
            prompt_length = max(0, step.prompt_length - n_cached) if step else 0
        mask, first_column = self._mask(arguments, tokens, step, n_cached)
        event = ForwardEvent(
            meter.forwards,
            mask,
            first_column,
            n_sequences=tokens.shape[0],
            n_new=tokens.shape[1],
            n_cached=n_cached,
            is_prompt=step.first if step else None,
            is_idle=meter.ranks.idle,
            config=self._model.config,
            input_ids_BS=arguments.get("input_ids"),
            token_types_BS=arguments.get("mm_token_type_ids"),
            prompt_length=prompt_length,
        )
        plan = self._plan = ForwardPlan(
            meter.method,
            meter.forwards,
            counted_BS=self._counted(mask, tokens, first_column),
            decode=decode,
            image_BS=self._images.find(
                arguments, tokens, meter.method.modality_setting, prompt_length=prompt_length
            ),
            row_end_BS=self._images.row_ends(arguments),
            ranks=meter.ranks,
        )
        if plan.constrained and meter.examines_next:
            plan.event = event
        meter.note_forward(plan, mask, is_under_method(meter.method, event))
        return plan

    def _mask(
        self, arguments: dict[str, Any], tokens: Tensor, step: Decoding | None, n_cached: int
    ) -> tuple[Any, int]:
        """Return a forward's mask of real tokens, and its first column of a new token.

        The mask is None if all tokens are real.
        """
        ranks, real_BS = self._meter.ranks, self._meter.real_tokens_BS
        if real_BS is not None:
            real_BS = ranks.own(real_BS)
            if real_BS.shape != tokens.shape[:2]:
                raise UsageError(
                    f"real_tokens: the mask's shape {tuple(real_BS.shape)} is not that of the "
                    f"batch, {tuple(tokens.shape[:2])}"
                )
            return real_BS, 0
        mask = arguments.get("attention_mask")
        if step and getattr(mask, "ndim", None) != 2:
            mask = None if step.mask is None else ranks.own(step.mask)
        if step and step.finished_B is not None:  # sequences that have finished are pads
            if mask is None:
                mask = torch.ones(len(tokens), n_cached + tokens.shape[1], device=tokens.device)
            finished_B1 = ranks.own(step.finished_B)[:, None]
            mask = mask.masked_fill(finished_B1.to(mask.device), 0)
        return mask, n_cached

    def _counted(self, mask: Any, tokens: Tensor, first_column: int) -> Tensor:
        """Return a mask [B, S] of the tokens that count."""
        # One process makes its groups on the host.
        device = CPU if self._meter.ranks is ALONE else tokens.device
        everyone_BS = torch.ones(tokens.shape[:2], dtype=torch.bool, device=device)
        if self._meter.ranks.idle:
            return ~everyone_BS
        if self._meter.method.count_padding or mask is None:
            return everyone_BS
        return new_columns(mask, tokens, first_column).to(tokens.device)

    def after_forward(self) -> None:
        """Check that every layer ran once in the forward that ends, and every invariant."""
        plan = self._plan
        assert plan is not None
        if plan.seen != self._expected:
            names = [meter.layer.name for meter in self._meter.layers]
            missing = [names[n] for n, part in self._expected if (n, part) not in plan.seen]
            raise EnforcementError(
                f"not every MoE layer ran exactly once in a forward: {missing or 'some ran twice'}"
            )
        if plan.event is not None:
            self._meter.definition.examine(plan.event)
        # Without either nothing was counted since the last check.
        if plan.constrained or self._meter.misplanned:
            self._meter.check()
        checkpointed = self._model.training and any(
            getattr(module, "gradient_checkpointing", False) for module in self._model.modules()
        )
        self._last = plan if checkpointed else None

    def no_forward(self) -> None:
        """Note that no forward runs any more."""
        self._plan = None

    def _running_plan(self, number: int, part: str) -> ForwardPlan:
        if self._plan is not None and self._plan.thread == threading.get_ident():
            self._plan.seen.append((number, part))
            return self._plan
        if self._last is not None and self._plan is None:
            return self._last
        raise EnforcementError(
            "a router ran outside a forward of the model that is under a capacity: call that "
            "model, not a part of it, or put the part under the capacity that is called"
        )

    # The forward of one layer.

    def _router_hook(self, number: int, meter: LayerMeter) -> Callable[..., RouterOutput | None]:
        method, layer = meter.method, meter.layer
        experts: Any = layer.experts
        kept_pairs = hasattr(experts, "capmoe_untouched")
        # Where a capacity drops and adds nothing, the stock kernel runs on every row: the layer is
        # the model's own bit for bit. No pad is sent to another process, or activates an expert.
        pads_may_run = kept_pairs and method.bound is not None

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
                meter.note_router(scores, weight_TK, topk_NK)
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
            if not n_changed and (groups.every_row_counts or pads_may_run):
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
            index_NS, weighted = called[index_name], meter.weighted
            meter.note_experts(index_NS, plan)
            if self._meter.recorder is not None:  # which may have the experts compute other tokens
                self._meter.recorder.note_hidden(number, plan, called[hidden_name])
            if plan.event is not None:
                plan.event.experts[number] = ExpertsCall(
                    index_NS,
                    called[weight_name],
                    unit_T=None if weighted is None else weighted.unit_T,
                    computed=[] if hasattr(experts, "capmoe_stock") else None,
                )

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
