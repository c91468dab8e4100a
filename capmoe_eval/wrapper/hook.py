"""Hook a model: plan its forwards one at a time, and route each MoE layer by a method.

The forward of one layer is score, decide, combine, emit. The forward of the model sees that every
layer ran, and that every invariant holds.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.routing.decision import Assignment, LayerContext, Scores, TokenGroups
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.gates import RouterOutput
from capmoe_eval.wrapper.generation import Decoding, Generation
from capmoe_eval.wrapper.kernel import experts_call, kept_pairs_kernel
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.plan import (
    ForwardPlan,
    cached_positions,
    check_unpacked,
    find_images,
    new_columns,
    read_call,
)
from capmoe_eval.wrapper.ranks import ALONE

# Shape suffixes: N rows of the batch, T counted tokens, K = top-k, S slots of a token, E experts,
# H hidden size. Of a mask of the batch: B sequences, S positions.


class LayerHook:
    """The forward of one layer under a method: a hook of its router and one of its experts."""

    def __init__(
        self, number: int, meter: Meter, running: Callable[[int, str], ForwardPlan]
    ) -> None:
        self.layer = meter.layers[number]
        self._number, self._method = number, meter.method.of_layer(number)
        self._calibrated = None if meter.calibrated is None else meter.calibrated[number]
        self._running = running  # returns the plan of the forward that runs
        self._experts: Any = self.layer.experts
        # See LayerForward.experts_ran; None while nobody asks for it.
        self._computed: list[Tensor] | None = None

    def note_computed(self, index: Tensor) -> None:
        """Note the experts of rows that the stock kernel computes."""
        if self._computed is not None:
            self._computed.append(index)

    def route(
        self, _router: nn.Module, args: tuple[Tensor, ...], output: RouterOutput
    ) -> RouterOutput | None:
        """Return the router's output under the method; None if that is the output itself."""
        plan = self._running(self._number, "router")
        self._computed = None
        self.compute_all()
        if not plan.constrained and not plan.observers:
            return None
        logits_NE, weight_NK, topk_NK = output
        event = LayerForward(
            plan,
            self._number,
            self.layer,
            self._method,
            logits_NE=logits_NE,
            weight_NK=weight_NK,
            topk_NK=topk_NK,
            hidden_NH=args[0].flatten(0, -2) if args else None,
            calibrated=self.calibrated_on(topk_NK.device),
        )
        if plan.constrained and not self._method.is_stock:
            event.assignment = decide(
                event.scores,
                self._method,
                event.groups,
                layer=self.layer,
                stream=(self._number, plan.number),
                image_T=event.image_T,
                hidden_TH=event.router_input_TH,
                calibrated=event.calibrated,
            )
        if plan.observers:
            plan.routed[self._number] = event
            self._computed = [] if self._drops else None
        return None if event.assignment is None else self.sent(event, event.assignment)

    def emit(
        self, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        """Show the layer's forward to the observers, when its experts have run."""
        plan = self._running(self._number, "experts")
        if not plan.observers:
            return
        if self._number not in plan.routed:
            raise EnforcementError(f"{self.layer.name}: the experts ran without their router")
        event: LayerForward = plan.routed.pop(self._number)
        computed = None if self._computed is None else tuple(self._computed)
        call = experts_call(experts, args, kwargs)
        event.experts_ran(*call, computed=computed, output_NH=output)
        self._computed = None  # an observer may have the experts compute other tokens
        with torch.no_grad():  # observers are no part of the graph of a backward pass
            for observer in plan.observers:
                observer.see(event)

    def compute_all(self) -> None:
        """Have the kernel compute every pair that it is called with."""
        if self._drops:
            self._experts.capmoe_untouched = True

    @property
    def _drops(self) -> bool:
        """True if the kernel of kept pairs is installed."""
        return hasattr(self._experts, "capmoe_untouched")

    def calibrated_on(self, device: torch.device) -> Tensor | None:
        """Return the layer's calibrated tensor on a device; None without a calibration."""
        if self._calibrated is not None:
            self._calibrated = self._calibrated.to(device)
        return self._calibrated

    def sent(self, event: LayerForward, assignment: Assignment) -> RouterOutput | None:
        """Return the router's output with the kept pairs; None if they are the router's own."""
        layer, groups = self.layer, event.groups
        changed_T = assignment.changed_T(layer.top_k)
        # A layer waits for its device here and nowhere else.
        n_changed, n_kept = torch.stack([changed_T.sum(), assignment.keep_TS.sum()]).tolist()
        # Where a capacity drops and adds nothing, the stock kernel runs on every row: the layer is
        # the model's own bit for bit. No pad is sent to another process, or activates an expert.
        pads_may_run = self._drops and self._method.unit is not None
        is_own = not n_changed and not normalises_all(layer, self._method)
        if is_own and (groups.every_row_counts or pads_may_run):
            return None
        weight_TK = groups.counted(event.weight_NK)
        weight_TS = combine(layer, self._method, event.scores, assignment, weight_TK, changed_T)
        dropped_TS, no_expert = ~assignment.keep_TS, layer.n_experts
        index_TS = assignment.index_TS.masked_fill(dropped_TS, no_expert)
        index_NS = groups.every_row(index_TS, no_expert)  # a row that does not count has none
        weight_NS = groups.every_row(weight_TS.masked_fill(dropped_TS, 0.0), 0.0)
        if self._drops:
            self._experts.capmoe_untouched = False
            self._experts.capmoe_counted = weakref.ref(index_NS), n_kept
        return event.logits_NE, weight_NS, index_NS


def decide(
    scores: Scores,
    method: Method,
    groups: TokenGroups,
    *,
    layer: MoeLayer,
    stream: tuple[int, int],
    image_T: Tensor | None = None,
    hidden_TH: Tensor | None = None,
    calibrated: Tensor | None = None,
) -> Assignment:
    """Return which pairs of the counted tokens are kept, and which are added.

    ``stream`` are the numbers of the layer and of the forward, which determine random numbers.
    """
    context = LayerContext.of(
        method,
        groups,
        top_k=layer.top_k,
        n_experts=layer.n_experts,
        layer=stream[0],
        forward=stream[1],
        image_T=image_T,
        hidden_TH=hidden_TH,
        calibrated=calibrated,
        total=layer.ranks.total,
    )
    return method.decide(scores, groups, context)


def combine(
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
    that changed are normalised over their kept pairs; with ``"always"``, in another family, all
    rows are. Where weights move with the tokens, a pair has the sum of those that it takes.
    """
    if assignment.slot_TK is not None:
        slots = torch.arange(assignment.index_TS.shape[1], device=weight_TK.device)
        taken_TKS = weight_TK[:, :, None].where(assignment.slot_TK[:, :, None] == slots, 0)
        exact = torch.promote_types(weight_TK.dtype, torch.float32)
        return taken_TKS.sum(dim=1, dtype=exact).to(weight_TK.dtype)
    index_TS, keep_TS = assignment.index_TS, assignment.keep_TS
    n_added = index_TS.shape[1] - layer.top_k
    anew_T = None
    if normalises_all(layer, method):
        anew_T = torch.ones_like(changed_T)
    elif method.renormalize != "before" and layer.gate.recipe.normalises:
        anew_T = changed_T
    if not n_added and anew_T is None:
        return weight_TK
    over_TS = None if anew_T is None else keep_TS
    computed_TS = layer.gate.weights(scores, index_TS, over_TS).to(weight_TK.dtype)
    router_TS = torch.cat([weight_TK, computed_TS[:, layer.top_k :]], dim=1)
    return router_TS if anew_T is None else torch.where(anew_T[:, None], computed_TS, router_TS)


def normalises_all(layer: MoeLayer, method: Method) -> bool:
    """Return whether the method normalises every token's weights although the family does not."""
    return method.renormalize == "always" and not layer.gate.recipe.normalises


CPU = torch.device("cpu")


def remembered(*counters: Any) -> Callable[[], None]:
    """Return a function that resets objects to their present counts.

    Attributes may be replaced until then, and so may the values of an attribute that is a
    dictionary. Lists, also in such a dictionary, may grow. Nothing else may change in place: it is
    not copied, so that the cost does not grow with the number of forwards.
    """
    states = [(vars(counter), dict(vars(counter))) for counter in counters]
    lists = []
    dictionaries = []
    for _, attributes in states:
        for value in attributes.values():
            if isinstance(value, dict):
                dictionaries.append((value, dict(value)))
                lists += [(part, len(part)) for part in value.values() if isinstance(part, list)]
            elif isinstance(value, list):
                lists.append((value, len(value)))

    def take_back() -> None:
        for current, before in (*states, *dictionaries):
            dict.clear(current)
            dict.update(current, before)  # a Counter's own adds
        for grown, length in lists:
            del grown[length:]

    return take_back


def _uncopied(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that a deep copy of the model shares: of a method it would copy the object."""

    def call(*inputs: Any) -> Any:
        return hook(*inputs)

    return call


@contextmanager
def hooked(model: nn.Module, meter: Meter) -> Iterator[None]:
    """Install hooks and kernels, and remove them on exit, also on an exception."""
    forward = _Forward(model, meter)
    with ExitStack() as stack:
        for hook in forward.layers:
            # Experts that are spread over processes never get a dropped slot: it is not sent.
            if not meter.method.is_stock and hook.layer.ranks is ALONE:
                stack.enter_context(kept_pairs_kernel(hook.layer.experts, hook.note_computed))
            router, experts = hook.layer.router, hook.layer.experts
            route, emit = _uncopied(hook.route), _uncopied(hook.emit)
            stack.callback(router.register_forward_hook(route).remove)
            stack.callback(experts.register_forward_hook(emit, with_kwargs=True).remove)
        stack.enter_context(forward.in_place())
        stack.enter_context(forward.generation.followed())
        yield


class _Forward:
    """The forward of a model under a capacity, also for those who call it as ``model.forward``."""

    def __init__(self, model: nn.Module, meter: Meter) -> None:
        functools.update_wrapper(self, model.forward)
        self._stock: Callable[..., Any] = model.forward
        self._model, self._meter = model, meter
        self._alone = threading.Lock()  # held by the forward that runs
        self._is_closed = False  # then it runs the stock forward, for those who kept this object
        self._signature = inspect.signature(model.forward)
        layers = range(len(meter.layers))
        self.layers = [LayerHook(number, meter, self._running) for number in layers]
        self._expected = [(layer, part) for layer in layers for part in ("router", "experts")]
        self._plan: ForwardPlan | None = None  # of the forward that runs
        # Without a capacity a decode step needs no count of its tokens, unless they are recorded.
        self.generation = Generation(
            model,
            lambda: (
                meter.method.decode != "unconstrained"
                or any(observer.every_forward for observer in meter.observers)
            ),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._stock, memo)  # the copy's own

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the model run this forward; restore its own on exit.

        Raises:
            UsageError: On exit, if a forward still runs in another thread.
        """
        model: Any = self._model
        before = vars(model).get("forward")  # accelerate sets one, too
        model.forward = self
        try:
            yield
        finally:
            self._is_closed = True
            if before is None:
                del model.forward
            else:
                model.forward = before
        if self._alone.locked():
            raise UsageError(
                "capacity_aware: the block ended while a forward still ran in another thread, "
                "whose last layers had no capacity; wait for the thread inside the block"
            )

    # Where a caller is compiled, the hooks are not: they count on the host.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward alone; if it fails, it is not counted."""
        if self._is_closed:
            return self._stock(*args, **kwargs)
        if not self._alone.acquire(blocking=False):
            raise UsageError(
                "capacity_aware: a forward of the model began while another one ran, inside it or "
                "in another thread; run them one after the other, or load the model twice"
            )
        try:
            return self._run(args, kwargs)
        finally:
            self._plan = None
            self._alone.release()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        undo = [remembered(self._meter, *self._meter.observers)]
        try:
            plan = self._plan = self._planned(args, kwargs)
            self._meter.begin(plan)
            undo.append(remembered(*(sums for of in plan.observers for sums in of.sums)))
            output = self._stock(*args, **kwargs)
            if plan.seen != self._expected:
                names = [layer.name for layer in self._meter.layers]
                missing = [names[n] for n, part in self._expected if (n, part) not in plan.seen]
                raise EnforcementError(
                    "not every MoE layer ran exactly once in a forward: "
                    f"{missing or 'some ran twice'}"
                )
            self._meter.end(plan)
        except EnforcementError:  # what a broken invariant counted stays: the proofs tell of it
            raise
        except BaseException:
            for take_back in undo:
                take_back()
            raise
        return output

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardPlan:
        """Return the plan of the forward that begins: its counted tokens, images and groups."""
        meter, config = self._meter, self._model.config
        arguments, tokens = read_call(self._signature, args, kwargs)
        n_cached = cached_positions(arguments)
        step = self.generation.step()
        decode = not step.first if step else tokens.shape[1] == 1 and n_cached > 0
        prompt_length = tokens.shape[1]  # positions of this forward that are no generated tokens
        if step and step.first:
            step.prompt_length = n_cached + tokens.shape[1]
        elif decode:
            prompt_length = max(0, step.prompt_length - n_cached) if step else 0
        mask, first_column = self._mask(arguments, tokens, step, n_cached)
        if step is None and arguments.get("attention_mask") is None:
            check_unpacked(arguments.get("position_ids"), mask)
        marked = meter.scope.real_tokens_BS
        return ForwardPlan(
            meter.method,
            number=meter.forwards,
            n_sequences=tokens.shape[0],
            n_new=tokens.shape[1],
            prompt_length=prompt_length,
            n_cached=n_cached,
            mask_BM=mask,
            first_column=first_column,
            is_prompt=step.first if step else None,
            is_idle=meter.ranks.idle,
            config=config,
            arguments=arguments,
            call_mask=arguments.get("attention_mask")
            if marked is None
            else meter.ranks.own(marked),
            ranks=meter.ranks,
            counted_BS=self._counted(mask, tokens, first_column),
            decode=decode,
            image_BS=find_images(
                config,
                arguments,
                tokens,
                meter.method.modality_setting,
                prompt_length=prompt_length,
            ),
        )

    def _mask(
        self, arguments: dict[str, Any], tokens: Tensor, step: Decoding | None, n_cached: int
    ) -> tuple[Any, int]:
        """Return a forward's mask of real tokens, and its first column of a new token."""
        ranks, real_BS = self._meter.ranks, self._meter.scope.real_tokens_BS
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

    def _running(self, number: int, part: str) -> ForwardPlan:
        """Return the plan of the forward that runs."""
        if self._plan is None or self._plan.thread != threading.get_ident():
            raise EnforcementError(
                "a router ran outside a forward of the model that is under a capacity: call that "
                "model, not a part or a copy of it, or put that under a capacity"
            )
        self._plan.seen.append((number, part))
        return self._plan
