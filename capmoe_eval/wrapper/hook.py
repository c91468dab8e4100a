"""Route one MoE layer by a method: plan, score, decide, combine, emit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from capmoe_eval.errors import EnforcementError
from capmoe_eval.routing.decision import LayerContext
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.scores import Assignment, Scores
from capmoe_eval.routing.tokens import TokenGroups
from capmoe_eval.wrapper.event import ExpertsCall, LayerForward, RouterCall
from capmoe_eval.wrapper.kernel import experts_call
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.plan import ForwardPlan

# Shape suffixes: N rows of the batch, T counted tokens, K = top-k, S slots of a token, E experts,
# H hidden size.

RouterOutput = tuple[Tensor, Tensor, Tensor]  # logits [N, E], weights [N, K], indices [N, K]


class _Routed(NamedTuple):
    """A layer whose router ran in this forward, and whose experts have not run yet."""

    router: RouterCall
    assignment: Assignment | None


class LayerHook:
    """The forward of one layer under a method: a hook of its router and one of its experts."""

    def __init__(
        self,
        number: int,
        layer: MoeLayer,
        method: Method,
        calibrated: Tensor | None,
        running: Callable[[int, str], tuple[ForwardPlan, bool]],
    ) -> None:
        self.layer = layer
        self._number, self._method, self._calibrated = number, method, calibrated
        # Returns the plan of the forward that runs, and whether a backward pass computes it again.
        self._running = running
        self._experts: Any = layer.experts
        # See LayerForward.computed; None while nobody asks for it.
        self._computed: list[Tensor] | None = None

    def note_computed(self, index: Tensor) -> None:
        """Note the experts of rows that the stock kernel computes."""
        if self._computed is not None:
            self._computed.append(index)

    def route(
        self, _router: nn.Module, args: tuple[Tensor, ...], output: RouterOutput
    ) -> RouterOutput | None:
        """Return what the router returns under the method; None if that is what it did return."""
        plan, is_again = self._running(self._number, "router")
        self._computed = None
        if self._drops:
            self._experts.capmoe_untouched = True
        if not plan.constrained and not plan.observers:
            return None
        groups = plan.on(output[2].device).groups
        router = RouterCall(self.layer, groups, args[0].flatten(0, -2) if args else None, *output)
        if plan.constrained:
            self._check_choice(plan, router, is_again)
        assignment = None
        if plan.constrained and not self._method.is_stock:
            assignment = self._decide(plan, router)
        if plan.observers and not is_again:
            plan.routed[self._number] = _Routed(router, assignment)
            self._computed = [] if self._drops else None
        return None if assignment is None else self.sent(router, assignment)

    def emit(
        self, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        """Show the layer's forward to the observers, when its experts have run."""
        plan, is_again = self._running(self._number, "experts")
        if is_again or not plan.observers:
            return
        routed: _Routed | None = plan.routed.pop(self._number, None)
        if routed is None:
            raise EnforcementError(f"{self.layer.name}: the experts ran without their router")
        call = ExpertsCall(*experts_call(experts, args, kwargs))
        event = LayerForward(
            plan=plan,
            number=self._number,
            layer=self.layer,
            method=self._method,
            calibrated=self.calibrated_on(call.index_NA.device),
            router=routed.router,
            assignment=routed.assignment,
            experts=call,
            computed=None if self._computed is None else tuple(self._computed),
            output_NH=output,
        )
        self._computed = None  # an observer may have the experts compute other tokens
        with torch.no_grad():  # observers are no part of the graph of a backward pass
            for observer in plan.observers:
                observer.see(event)

    @property
    def _drops(self) -> bool:
        """True if the kernel of kept pairs is installed."""
        return hasattr(self._experts, "capmoe_untouched")

    def calibrated_on(self, device: torch.device) -> Tensor | None:
        """Return what a calibration measured of the layer; it is moved to a device once."""
        if self._calibrated is not None:
            self._calibrated = self._calibrated.to(device)
        return self._calibrated

    def _check_choice(self, plan: ForwardPlan, router: RouterCall, is_again: bool) -> None:
        """Check that a forward which is computed again is the one that was computed before."""
        if not is_again:
            plan.choices[self._number] = router.topk_TK
        elif not torch.equal(plan.choices[self._number], router.topk_TK):
            raise EnforcementError(
                f"{self.layer.name}: the backward pass computes another forward again than the "
                "last one; with gradient checkpointing, go backward after every forward"
            )

    def _decide(self, plan: ForwardPlan, router: RouterCall) -> Assignment:
        """Return the decision on the counted tokens."""
        groups, device = router.groups, router.topk_NK.device
        hidden_TH = None
        if self._method.reads_hidden:
            assert router.hidden_NH is not None
            hidden_TH = groups.counted(router.hidden_NH.detach())
        return decide(
            router.scores,
            self._method,
            groups,
            layer=self.layer,
            stream=(self._number, plan.number),
            image_T=plan.on(device).image_T,
            hidden_TH=hidden_TH,
            calibrated=self.calibrated_on(device),
        )

    def sent(self, router: RouterCall, assignment: Assignment) -> RouterOutput | None:
        """Return the router's output with the kept pairs; None if they are the router's own."""
        layer, groups = self.layer, router.groups
        changed_T = assignment.changed_T(layer.top_k)
        # A layer waits for its device here and nowhere else.
        n_changed, n_kept = torch.stack([changed_T.sum(), assignment.keep_TS.sum()]).tolist()
        # Where a capacity drops and adds nothing, the stock kernel runs on every row: the layer is
        # the model's own bit for bit. No pad is sent to another process, or activates an expert.
        pads_may_run = self._drops and self._method.unit is not None
        is_own = not n_changed and not normalises_all(layer, self._method)
        if is_own and (groups.every_row_counts or pads_may_run):
            return None
        weight_TK = groups.counted(router.weight_NK)
        weight_TS = combine(layer, self._method, router.scores, assignment, weight_TK, changed_T)
        dropped_TS, no_expert = ~assignment.keep_TS, layer.n_experts
        index_TS = assignment.index_TS.masked_fill(dropped_TS, no_expert)
        index_NS = groups.every_row(index_TS, no_expert)  # a row that does not count has none
        weight_NS = groups.every_row(weight_TS.masked_fill(dropped_TS, 0.0), 0.0)
        if self._drops:
            self._experts.capmoe_untouched = False
            self._experts.capmoe_counted = weakref.ref(index_NS), n_kept
        return router.logits_NE, weight_NS, index_NS


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
    own_TS = torch.cat([weight_TK, computed_TS[:, layer.top_k :]], dim=1)
    return own_TS if anew_T is None else torch.where(anew_T[:, None], computed_TS, own_TS)


def normalises_all(layer: MoeLayer, method: Method) -> bool:
    """Return whether every token's weights are normalised, which the family does not."""
    return method.renormalize == "always" and not layer.gate.recipe.normalises
