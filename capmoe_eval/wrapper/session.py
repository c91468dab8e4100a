"""Put a model under a capacity for the length of a ``with`` block, proven on entry."""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from transformers import PreTrainedModel

from capmoe_eval.errors import EnforcementError, UsageError, shown
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method, without_effect
from capmoe_eval.wrapper.hook import hooked
from capmoe_eval.wrapper.kernel import KERNEL_TOLERANCE, experts_call, kept_pairs_kernel
from capmoe_eval.wrapper.layers import MoeLayer, expected_moe_layers, find_moe_layers, is_experts
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.plan import placeholder_ids
from capmoe_eval.wrapper.ranks import ALONE

# Shape suffixes: B sequences, S positions (of a batch) or slots (of a token), T tokens, H hidden
# size, P kept pairs.

_ACTIVE = "capmoe_active"
"""Name of the attribute that marks experts under a capacity."""

_CLAIMS = threading.Lock()


def target_model(model: Any) -> PreTrainedModel:
    """Return the transformers model that an object is, or that a module around it runs.

    Whatever runs it runs its forward, so that a capacity there holds for adapters and parallel
    wrappers, too.

    Raises:
        UsageError: If there is none, several have experts, or hooks of it would not run.
    """
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model={name}: is no torch module; pass the loaded transformers model itself, for "
            "example that of a pipeline, pipeline.model"
        )
    for module in model.modules():
        if (  # torch compiled the module, its call or its forward
            hasattr(module, "_orig_mod")
            or getattr(module, "_compiled_call_impl", None) is not None
            or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        ):
            raise UsageError(
                f"model={name}: {type(module).__name__} is compiled, and compiled code leaves out "
                "the hooks of a capacity; pass a model without torch.compile and .compile()"
            )
        if isinstance(module, DataParallel) and len(module.device_ids) > 1:
            raise UsageError(
                f"model={name}: DataParallel copies the model to {len(module.device_ids)} devices "
                "in every forward; pass the model without it, or spread it with device_map=auto"
            )
    models = list(_outermost(model))
    if len(models) > 1:
        models = [part for part in models if any(map(is_experts, part.modules()))]
    if len(models) != 1:
        raise UsageError(
            f"model={name}: has no configuration that describes its MoE layers "
            f"({len(models)} transformers models in it); pass one whole transformers model"
        )
    _check_loaded(models[0])
    return models[0]


def _outermost(module: nn.Module) -> Iterator[PreTrainedModel]:
    """Yield a module's transformers models, without those inside another one."""
    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child)


def _check_loaded(model: PreTrainedModel) -> None:
    """Refuse a model with weights on the meta device that accelerate will not load."""
    name = type(model).__name__
    # Of accelerate, which need not be installed where nothing is offloaded.
    hook: Any = getattr(sys.modules.get("accelerate.hooks"), "ModelHook", ())
    offloaded = {
        part
        for module in model.modules()
        if any(isinstance(held, hook) for held in vars(module).values())
        for part in module.modules()
    }
    missing = [
        f"{path}.{weight}"
        for path, module in model.named_modules()
        for weight, tensor in module.named_parameters(recurse=False)
        if tensor.is_meta and module not in offloaded
    ]
    if missing:
        raise UsageError(
            f"model={name}: {len(missing)} weights are on the meta device, without numbers (first "
            f"{missing[0]}); load the model with from_pretrained"
        )


@contextmanager
def claimed(model: nn.Module) -> Iterator[None]:
    """Claim a model's experts for one capacity, until the ``with`` block ends.

    Raises:
        UsageError: If some of them are under a capacity, also of another thread.
    """
    experts = [module for module in model.modules() if is_experts(module)]
    with ExitStack() as stack:
        with _CLAIMS:
            if any(hasattr(module, _ACTIVE) for module in experts):
                raise UsageError(
                    "capacity_aware: the model is already under a capacity, or was copied from one "
                    "that is; leave the outer block first, and copy outside of it"
                )
            for module in experts:
                setattr(module, _ACTIVE, True)
                stack.callback(delattr, module, _ACTIVE)
        yield


@contextmanager
def capacity_aware(
    model: nn.Module,
    method: str | Method = "score",
    gamma: float | None = None,
    *,
    verify: bool = True,
    calibrated: Sequence[Tensor] | None = None,
    **knobs: Any,
) -> Iterator[Meter]:
    """Run a transformers MoE model under a capacity; restore it on exit, also on an exception.

    Inside the block every forward of ``model`` routes by the method. The token mask is the
    ``attention_mask`` that the model is called with (or :meth:`Meter.real_tokens`); without one all
    tokens are real. Every forward is checked by invariants (``docs/reference/invariants.md``).
    ``generate`` works with any cache: the prompt is computed under the capacity, and with
    ``decode="constrained"`` the other forwards are, too; with ``decode="only"`` they alone are.

    Args:
        model: A loaded model with MoE layers (transformers ≥ 5), with or without a head, or a
            module around one, such as an adapter's: the capacity is the transformers model's.
        method: The name of a method, or a method, for example ``TokenDrop(gamma=1.0)``.
        gamma: Capacity factor γ, where the method is a name and has one.
        verify: Prove on entry, by a few small forwards, that γ=∞ gives the model's own logits, and
            that the experts kernel computes the kept pairs as the stock kernel does.
        calibrated: What a calibration measured of each MoE layer, where the method needs one. For
            ``sere`` it is the similarity [E, E] of the experts, for ``macs`` their modality [E],
            for ``placement="eplb"`` the experts of each rank [R, E/R], rising.
        **knobs: The other knobs of the method, where it is a name; one of other methods is refused.

    Yields:
        The meter: per-layer loads, drops, peaks, padding waste, proofs.

    Raises:
        UsageError: For an invalid knob, a model whose routers cannot be identified, a model that
            is under a capacity already, and in the block for a forward beside another one.
        EnforcementError: If an invariant is broken.
    """
    chosen = chosen_method(method, gamma, **knobs)
    with routed(model, chosen, verify=verify, calibrated=calibrated) as meter:
        yield meter


def chosen_method(method: str | Method, gamma: float | None = None, **knobs: Any) -> Method:
    """Return a method, by its name and knobs or ready-made, in its canonical form.

    Raises:
        UsageError: For knobs beside a method, which has its own, for those that a named method has
            not, and as :func:`create_method`.
    """
    settings = [*([] if gamma is None else ["gamma"]), *knobs]
    if isinstance(method, Method):
        for knob in settings:
            made_by = type(method).__name__
            raise UsageError(f"{knob}: is a knob of the method; set it there, {made_by}({knob}=…)")
        return method.canonical()
    chosen = create_method(method, gamma, **knobs)
    for knob in settings:
        if why := without_effect(knob, [method, chosen.name]):
            raise UsageError(f"{knob}: {why}; leave it out")
    return chosen


@contextmanager
def routed(
    model: nn.Module,
    method: Method,
    *,
    verify: bool = True,
    calibrated: Sequence[Tensor] | None = None,
) -> Iterator[Meter]:
    """Run a model as :func:`capacity_aware` does, under a method as it is.

    A method that is in no canonical form keeps its capacity groups where it drops nothing, as a
    calibration needs them.
    """
    target = target_model(model)
    with claimed(target):
        meter = _new_meter(target, method, calibrated)
        if verify:
            with _evaluating(target), torch.no_grad():
                tokens_BS = _probe_tokens(target, 2 * meter.ranks.size)
                meter.kernel_agrees = _compare_kernels(target, meter.layers, tokens_BS)
                meter.stock_at_infinity = _prove_stock_at_infinity(target, meter, tokens_BS)
        with hooked(target, meter):
            yield meter


def _new_meter(model: Any, chosen: Method, calibrated: Sequence[Tensor] | None) -> Meter:
    """Return the meter of a model under a method that fits it."""
    layers = find_moe_layers(model)
    if layers[0].ranks is not ALONE:
        chosen.check_processes(layers[0].ranks.size)
    for layer in layers:
        chosen.check_layers(len(layers), layer.n_experts, layer.top_k)
    setting = chosen.modality_setting
    if setting is not None and not placeholder_ids(model.config):
        raise UsageError(
            f"{setting}: model {type(model).__name__} has no images; choose a model of images and "
            f"text, or another {setting.partition('=')[0]}"
        )
    tensors = _checked(chosen, layers, calibrated)
    meter = Meter(layers, chosen, expected_moe_layers(model.config), tensors)
    layer_count = meter.proofs()["every_layer_hooked"]
    if not layer_count["passed"]:
        raise UsageError(
            f"model={type(model).__name__}: its configuration announces {layer_count['expected']} "
            f"MoE layers, {layer_count['hooked']} were found; this architecture is not supported"
        )
    return meter


def _checked(
    method: Method, layers: Sequence[MoeLayer], calibrated: Sequence[Tensor] | None
) -> Sequence[Tensor] | None:
    """Return a calibration's tensors, one for each layer, after checks; None if none is needed."""
    rules = [rule for layer in layers if (rule := method.calibrated_rule(layer.n_experts))]
    if not rules:
        return None
    rule = rules[0]
    if calibrated is None:
        raise UsageError(
            f"{rule.asked_by}: needs {rule.content}, which a calibration finds, as python -m "
            "capmoe_eval does; here pass calibrated=[…], a tensor for each MoE layer, or "
            f"{rule.instead}"
        )
    if not isinstance(calibrated, Iterable) or not all(isinstance(t, Tensor) for t in calibrated):
        raise UsageError(
            f"calibrated={shown(calibrated)}: must be a list with a torch tensor for each MoE layer"
        )
    shapes, expected = [tuple(tensor.shape) for tensor in calibrated], [of.shape for of in rules]
    if shapes != expected:
        raise UsageError(
            f"calibrated: has shapes {shown(shapes)}; give {rule.content} for each of "
            f"{len(layers)} MoE layers, {shown(expected)}"
        )
    for layer, tensor in zip(layers, calibrated, strict=True):
        if not rule.holds(tensor):
            raise UsageError(f"calibrated: {layer.name} must have {rule.values}")
    return calibrated


# Proofs on entry: γ=∞ is the stock model, and the kernels agree.


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; on exit restore the mode of each of its modules."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _probe_tokens(model: Any, n_sequences: int) -> Tensor:
    """Return a batch of sequences of 8 text tokens, on the device of the model's inputs."""
    devices = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
    whole: dict[str, Any] = {"dtype": torch.long, "device": next(devices, torch.device("cpu"))}
    text = torch.arange(int(model.config.get_text_config().vocab_size), **whole)
    text = text[~torch.isin(text, torch.tensor(placeholder_ids(model.config), **whole))]
    return text[torch.arange(8 * n_sequences, **whole) * 7919 % len(text)].view(-1, 8)


def _run(model: nn.Module, tokens_BS: Tensor) -> Tensor:
    """Return the model's logits, or the last hidden states of a model without a head."""
    output = model(input_ids=tokens_BS, use_cache=False)
    logits: Tensor | None = getattr(output, "logits", None)
    return output.last_hidden_state if logits is None else logits


def _prove_stock_at_infinity(model: nn.Module, under: Meter, tokens_BS: Tensor) -> dict[str, Any]:
    """Compare the model's logits with those under the method where no bound is reached."""
    layers = under.layers

    def run_under(unbounded: Method, real_BS: Tensor) -> Tensor:
        meter = Meter(layers, unbounded, None, under.calibrated, examines=False)
        with hooked(model, meter), meter.real_tokens(real_BS):
            return _run(model, tokens_BS)

    everyone_BS = torch.ones_like(tokens_BS, dtype=torch.bool)
    padded_BS = everyone_BS.clone()
    padded_BS[1::2, 5:] = False
    never_binds = under.method.never_binding(
        max(layer.n_experts for layer in layers), min(layer.top_k for layer in layers)
    )
    if never_binds.renormalize == "always":  # it would change weights where nothing is dropped
        never_binds = dataclasses.replace(never_binds, renormalize="before")  # type: ignore[type-var]
    no_capacity = create_method("baseline")
    logits = _run(model, tokens_BS)
    is_same = functools.partial(torch.allclose, logits, rtol=0, atol=0, equal_nan=True)
    pads_run = under.ranks is ALONE and never_binds.unit is not None
    decided_BS = padded_BS if pads_run else everyone_BS
    equal = all(
        is_same(run_under(unbounded, real_BS))
        for unbounded, real_BS in ((no_capacity, padded_BS), (never_binds, decided_BS))
    )
    if not equal and not is_same(_run(model, tokens_BS)):
        return {"passed": None, "why": "the stock model is not deterministic"}
    if not equal:
        raise EnforcementError("γ=∞ does not give the stock model's logits bit for bit")
    return {"passed": True, "method": never_binds.name, "compared": 2 * logits.numel()}


def _compare_kernels(
    model: nn.Module, layers: Sequence[MoeLayer], tokens_BS: Tensor
) -> dict[str, Any]:
    """Compare the outputs of every layer's experts in the probe, by both kernels."""
    if layers[0].ranks is not ALONE:
        why = "the experts are spread over processes: another kernel, which never sends a drop"
        return {"passed": None, "why": why}
    pairs: list[tuple[Tensor, Tensor]] = []

    def compare(
        experts: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], stock_TH: Tensor
    ) -> None:
        call = experts_call(experts, args, kwargs)
        pairs.extend(_both_kernels(experts, *call, stock_TH=stock_TH))

    with ExitStack() as stack:
        for layer in layers:
            handle = layer.experts.register_forward_hook(compare, with_kwargs=True)
            stack.callback(handle.remove)
        _run(model, tokens_BS)
    if not all(bool(stock_TH.isfinite().all()) for _, stock_TH in pairs):
        return {"passed": None, "why": "the stock experts' outputs are not finite"}
    deviation = 0.0  # the largest difference over the largest stock output; infinity for NaN
    for ours_TH, stock_TH in pairs:
        most = stock_TH.abs().amax().clamp_min(torch.finfo(stock_TH.dtype).tiny)
        off = (ours_TH - stock_TH).abs().amax() / most
        deviation = max(deviation, float(off.double().nan_to_num(nan=torch.inf)))
    tolerance = KERNEL_TOLERANCE[pairs[-1][1].dtype]
    if deviation > tolerance:
        raise EnforcementError(
            f"the kept-pairs kernel is off by {deviation:.1e} of the stock kernel's largest "
            f"output, {tolerance:.0e} allowed"
        )
    compared = sum(stock_TH.numel() for _, stock_TH in pairs)
    return {"passed": True, "deviation": deviation, "tolerance": tolerance, "compared": compared}


def _both_kernels(
    experts: Any, hidden_TH: Tensor, index_TS: Tensor, weight_TS: Tensor, *, stock_TH: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the outputs of the kept-pairs kernel and of the stock kernel, for two sets of pairs."""
    slot_TS = torch.arange(index_TS.numel(), device=index_TS.device).view(index_TS.shape)
    keep_TS = (slot_TS + slot_TS // index_TS.shape[1]) % 2 == 0
    keep_TS[0] = False  # a token that loses all experts
    some_TH = experts.forward(hidden_TH, index_TS, weight_TS * keep_TS)
    for kept_TS, expected_TH in ((torch.ones_like(keep_TS), stock_TH), (keep_TS, some_TH)):
        computed: list[Tensor] = []
        with kept_pairs_kernel(experts, computed.append):
            experts.capmoe_untouched = False
            nowhere_TS = index_TS.masked_fill(~kept_TS, experts.num_experts)
            # As a decision sends them: a dropped slot weighs nothing.
            output_TH = experts.forward(hidden_TH, nowhere_TS, weight_TS * kept_TS)
        kept_P = index_TS[kept_TS]
        # No call of the stock kernel where nothing is kept.
        computed_P = torch.cat([kept_P[:0], *(index.reshape(-1) for index in computed)])
        if not torch.equal(computed_P.sort().values, kept_P.sort().values):
            raise EnforcementError("the kept-pairs kernel computes other pairs than the kept")
        yield output_TH, expected_TH
