"""``capacity_aware``: a model runs under a capacity, with proof, and is itself again afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from capmoe_eval.errors import EnforcementError, UsageError, bad_choice
from capmoe_eval.reroute.call import read_call
from capmoe_eval.reroute.kernel import KERNEL
from capmoe_eval.reroute.layers import MoeLayer, expected_moe_layers, find_moe_layers
from capmoe_eval.reroute.meter import LayerMeter, Meter
from capmoe_eval.reroute.plan import ForwardPlan
from capmoe_eval.reroute.ranks import ALONE
from capmoe_eval.routing import (
    Assignment,
    Method,
    Scores,
    assign,
    expert_load,
    experts_per_rank,
)

# Shape suffixes: B sequences, S positions (of a batch) or slots (of a token), N = B·S rows,
# T counted tokens, K = top-k, E experts.

_ACTIVE = "capmoe_active"

RouterOutput = tuple[Tensor, Tensor, Tensor]  # logits [N, E], weights [N, K], indices [N, K]


@contextmanager
def capacity_aware(
    model: nn.Module,
    method: str | Method = "score",
    gamma: float | None = None,
    *,
    verify: bool = True,
    **knobs: Any,
) -> Iterator[Meter]:
    """Run a transformers MoE model under a capacity; restore it on exit, also on an exception.

    Inside the block every forward of ``model`` routes by the method. The token mask is the
    ``attention_mask`` that the model is called with (or :meth:`Meter.real_tokens`); without one all
    tokens are real. After every forward the promises of the semantics are checked.

    Args:
        model: A loaded causal language model with MoE layers (transformers ≥ 5).
        method: A name of :data:`capmoe_eval.routing.METHODS`, or a ready :class:`Method`.
        gamma: Capacity factor γ; not needed by ``baseline`` and ``expert_drop``.
        verify: Prove on entry, by two small forwards, that γ=∞ gives the model's own logits.
        **knobs: The other fields of :class:`Method`: ep_size, scope, candidates, m, protect_topk,
            max_k, rounds, granularity, rounding, count_padding, decode, renormalize, seed.

    Yields:
        The meter: per-layer loads, drops, peaks, padding waste, proofs.

    Raises:
        UsageError: For a bad knob, a model whose routers are not understood, or nesting.
        EnforcementError: If a promise is broken.
    """
    chosen = method if isinstance(method, Method) else _method(method, gamma, knobs)
    if any(hasattr(module, _ACTIVE) for module in model.modules()):
        raise UsageError(
            "capacity_aware: the model is already under a capacity; leave the outer block first"
        )
    layers = find_moe_layers(model)
    for layer in layers:
        experts_per_rank(layer.n_experts, chosen.ep_size)
    _check_ranks(layers, chosen)
    meter = Meter(layers, chosen, expected_moe_layers(model.config))
    hooked = meter.proofs()["every_layer_hooked"]
    if not hooked["passed"]:
        raise UsageError(
            f"model={type(model).__name__}: its configuration announces {hooked['expected']} MoE "
            f"layers, {hooked['hooked']} were found; this architecture is not supported"
        )
    if verify:
        meter.stock_at_infinity = _prove_stock_at_infinity(model, layers, chosen)
    with _hooked(model, layers, meter):
        yield meter


def _check_ranks(layers: list[MoeLayer], method: Method) -> None:
    """Refuse a number of ranks that is not that of the processes which share the experts."""
    sizes = {layer.ranks.size for layer in layers if layer.ranks is not ALONE}
    if method.uses_ranks and sizes - {method.ep_size}:
        (size,) = sizes
        raise UsageError(
            f"ep_size={method.ep_size}: the model's experts are spread over {size} processes, each "
            f"of which is a rank; set ep_size={size}"
        )


def _method(name: str, gamma: float | None, knobs: dict[str, Any]) -> Method:
    known = set(inspect.signature(Method).parameters) - {"name", "gamma"}
    for knob in knobs:
        if knob not in known:
            raise bad_choice("knob", knob, sorted(known))
    return Method(name, gamma, **knobs)


@contextmanager
def _hooked(model: Any, layers: list[MoeLayer], meter: Meter) -> Iterator[None]:
    """Install the hooks, and take them off again whatever happens."""
    session = _Session(model, layers, meter)
    with ExitStack() as stack:
        stack.callback(_restore, model, layers, model.get_experts_implementation())
        for layer in layers:
            experts: Any = layer.experts
            setattr(layer.router, _ACTIVE, True)
            experts.capmoe_stock = experts.config._experts_implementation
            experts.capmoe_untouched = True
        # Experts that are spread over processes never see a dropped slot: it is not sent.
        if not meter.method.is_stock and layers[0].ranks is ALONE:
            model.set_experts_implementation(KERNEL)
            _check_kernel(layers)
        for handle in session.install():
            stack.callback(handle.remove)
        yield


def _check_kernel(layers: list[MoeLayer]) -> None:
    for layer in layers:
        experts: Any = layer.experts
        if experts.config._experts_implementation != KERNEL:
            raise UsageError(
                f"model: {layer.name} does not let its experts kernel be replaced; "
                "load the model with one of transformers' own classes"
            )


def _restore(model: Any, layers: list[MoeLayer], implementation: dict[str, Any]) -> None:
    model.set_experts_implementation(implementation)
    for layer in layers:
        for module, names in (
            (layer.router, (_ACTIVE,)),
            (layer.experts, ("capmoe_stock", "capmoe_untouched")),
        ):
            for name in names:
                if hasattr(module, name):
                    delattr(module, name)


class _Session:
    """The hooks of one :func:`capacity_aware` block."""

    def __init__(self, model: nn.Module, layers: list[MoeLayer], meter: Meter) -> None:
        self._model = model
        self._layers = layers
        self._meter = meter
        self._signature = inspect.signature(model.forward)
        self._ranks = layers[0].ranks
        self._plan: ForwardPlan | None = None

    def install(self) -> Iterator[Any]:
        """Register the hooks and yield their handles."""
        yield self._model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        yield self._model.register_forward_hook(self._after_forward)
        for number, layer in enumerate(self._layers):
            meter = self._meter.layers[number]
            yield layer.router.register_forward_hook(self._router_hook(number, layer, meter))
            yield layer.experts.register_forward_pre_hook(
                self._experts_hook(number, layer, meter), with_kwargs=True
            )

    # The forward of the whole model.

    def _before_forward(
        self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._meter.is_aside:
            return
        given, tokens = read_call(self._signature, args, kwargs)
        n_positions = tokens.shape[1]
        past = given.get("past_key_values")
        past_length = int(past.get_seq_length()) if past is not None else 0
        decode = n_positions == 1 and past_length > 0
        counted_BS = self._counted(given.get("attention_mask"), tokens)
        meter = self._meter
        self._plan = ForwardPlan.of(
            meter.method, meter.forwards, counted_BS=counted_BS, decode=decode, ranks=self._ranks
        )
        meter.forwards += 1
        meter.decode_forwards += decode

    def _counted(self, attention_mask: Any, tokens: Tensor) -> Tensor:
        """Return which tokens of the batch count [B, S]."""
        n_sequences, n_positions = tokens.shape[:2]
        everyone_BS = torch.ones(n_sequences, n_positions, dtype=torch.bool, device=tokens.device)
        if self._ranks.idle:
            return ~everyone_BS
        if self._meter.method.count_padding:
            return everyone_BS
        mask_BS = self._meter.real_tokens_BS
        if mask_BS is not None:
            mask_BS = self._ranks.own(mask_BS)
        if mask_BS is None:
            if attention_mask is None:
                return everyone_BS
            if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
                raise UsageError(
                    "attention_mask: a capacity needs the 2-dimensional mask [B, S] to know the "
                    "pads; pass that, or say them with meter.real_tokens(mask)"
                )
            mask_BS = attention_mask[:, -n_positions:].bool()
        if mask_BS.shape != everyone_BS.shape:
            raise UsageError(
                f"mask: its shape {tuple(mask_BS.shape)} is not that of the batch, "
                f"{tuple(everyone_BS.shape)}"
            )
        return mask_BS.to(tokens.device)

    def _after_forward(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        if self._meter.is_aside:
            return
        plan, self._plan = self._plan, None
        assert plan is not None
        expected = [(n, part) for n in range(len(self._layers)) for part in ("router", "experts")]
        if plan.seen != expected:
            missing = [self._layers[n].name for n, part in expected if (n, part) not in plan.seen]
            raise EnforcementError(
                f"not every MoE layer ran exactly once in a forward: {missing or 'some ran twice'}"
            )
        self._meter.check()

    def _running_plan(self, number: int, part: str) -> ForwardPlan:
        if self._plan is None:
            raise EnforcementError(
                "a router ran outside a forward of the model that is under a capacity: call that "
                "model, not a part of it"
            )
        self._plan.seen.append((number, part))
        return self._plan

    # The forward of one layer.

    def _router_hook(
        self, number: int, layer: MoeLayer, meter: LayerMeter
    ) -> Callable[..., RouterOutput | None]:
        method = self._meter.method
        experts: Any = layer.experts

        def hook(_router: nn.Module, _args: Any, output: RouterOutput) -> RouterOutput | None:
            if self._meter.is_aside:
                return None
            plan = self._running_plan(number, "router")
            experts.capmoe_untouched = True
            if not plan.constrained:
                return None
            logits_NE, _, topk_NK = output
            groups = plan.groups_on(topk_NK.device)
            if len(topk_NK) != groups.n_rows:
                raise EnforcementError(
                    f"{layer.name}: {len(topk_NK)} rows for {groups.n_rows} tokens"
                )
            everyone = groups.every_row_counts
            logits_TE, weight_TK, topk_TK = output
            if not everyone:
                logits_TE, weight_TK, topk_TK = (
                    part.index_select(0, groups.rows_T) for part in output
                )
            scores = layer.recipe.scores(layer.router, logits_TE, topk_TK)
            deviation = layer.recipe.deviation(layer.router, scores, weight_TK, topk_TK)
            meter.note_router(topk_TK, groups, deviation, weight_TK.dtype)
            if method.is_stock:
                meter.note_scores(scores.score_TE)
                return None
            load_E = None
            if method.name == "expert_drop":
                load_E = layer.ranks.total(expert_load(topk_TK, layer.n_experts))
            assignment = assign(scores, method, groups, stream=(number, plan.number), load_E=load_E)
            changed_T = assignment.changed_T(layer.top_k)
            if everyone and not bool(changed_T.any()):
                return None
            experts.capmoe_untouched = False
            weight_TS = _combine_weights(layer, method, scores, assignment, weight_TK, changed_T)
            # A row that does not count goes to no expert: it takes no slot and is not computed.
            dropped_TS = ~assignment.keep_TS
            index_NS = assignment.index_TS.masked_fill(dropped_TS, layer.n_experts)
            weight_NS = weight_TS.masked_fill(dropped_TS, 0.0)
            if not everyone:
                shape = (groups.n_rows, dropped_TS.shape[1])
                nowhere_NS = index_NS.new_full(shape, layer.n_experts)
                index_NS = nowhere_NS.index_copy_(0, groups.rows_T, index_NS)
                weight_NS = weight_NS.new_zeros(shape).index_copy_(0, groups.rows_T, weight_NS)
            return logits_NE, weight_NS, index_NS

        return hook

    def _experts_hook(self, number: int, layer: MoeLayer, meter: LayerMeter) -> Callable[..., None]:
        signature = inspect.signature(type(layer.experts).forward)
        index_name = list(signature.parameters)[2]  # (self, hidden, index, weights)

        def hook(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._meter.is_aside:
                return
            plan = self._running_plan(number, "experts")
            if not plan.constrained:
                return
            index_NS = signature.bind(experts, *args, **kwargs).arguments[index_name]
            meter.note_experts(index_NS, plan, untouched=bool(layer.experts.capmoe_untouched))

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

    The router's own pairs keep the router's own weights, to the bit; what is added gets its score
    over the same denominator. With ``renormalize="after"``, where the family normalises, the rows
    that changed are normalised over what they kept.
    """
    index_TS, keep_TS = assignment.index_TS, assignment.keep_TS
    n_added = index_TS.shape[1] - layer.top_k
    anew = method.renormalize == "after" and layer.recipe.normalises
    if not n_added and not anew:
        return weight_TK
    computed_TS = layer.recipe.weights(
        layer.router, scores, index_TS, over_TS=keep_TS if anew else None
    ).to(weight_TK.dtype)
    own_TS = torch.cat([weight_TK, computed_TS[:, layer.top_k :]], dim=1)
    return torch.where(changed_T[:, None], computed_TS, own_TS) if anew else own_TS


def _input_device(model: nn.Module) -> torch.device:
    """Return where inputs go; parameters that are offloaded say ``meta``."""
    devices = (parameter.device for parameter in model.parameters())
    return next((d for d in devices if d.type != "meta"), torch.device("cpu"))


def _prove_stock_at_infinity(
    model: nn.Module, layers: list[MoeLayer], method: Method
) -> dict[str, Any]:
    """Compare the model's logits with those under the method where no bound can bind.

    Twice: at γ=∞ on a padded batch, and at γ=E on one without pads, where the whole decision is
    made and must come out as the router's own. A method that adds candidates has no γ=∞ that equals
    the stock model; its hooks are proven with ``score``, as are those of methods without γ.
    """
    name = method.name if method.candidate_rule == "topk" and method.gamma is not None else "score"
    knobs = {
        knob: getattr(method, knob)
        for knob in ("ep_size", "scope", "granularity", "count_padding", "seed")
    }
    config: Any = model.config
    vocabulary = int(config.get_text_config().vocab_size)
    device = _input_device(model)
    n_sequences = 2 * layers[0].ranks.size  # two for each process that shares the model
    tokens = (torch.arange(8 * n_sequences) * 7919 % vocabulary).view(-1, 8).to(device)
    padded_BS = torch.ones(n_sequences, 8, dtype=torch.bool, device=device)
    padded_BS[1::2, 5:] = False
    never_binds = float(max(layer.n_experts for layer in layers))

    def stock() -> Tensor:
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits

    def wrapped(gamma: float, real_BS: Tensor) -> Tensor:
        meter = Meter(layers, Method(name, gamma=gamma, **knobs), None)
        with _hooked(model, layers, meter), meter.real_tokens(real_BS):
            return stock()

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits = stock()
            equal = torch.equal(logits, wrapped(float("inf"), padded_BS)) and torch.equal(
                logits, wrapped(never_binds, torch.ones_like(padded_BS))
            )
            if not equal and not torch.equal(logits, stock()):
                return {"passed": None, "why": "the stock model is not deterministic"}
    finally:
        model.train(training)
    if not equal:
        raise EnforcementError("γ=∞ does not give the stock model's logits bit for bit")
    return {"passed": True, "method": name, "compared": 2 * logits.numel()}
