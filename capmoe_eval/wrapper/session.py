"""Put a model under a capacity for the length of a ``with`` block: ``capacity_aware``."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from transformers import PreTrainedModel

from capmoe_eval.errors import UsageError, shown
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method, without_effect
from capmoe_eval.wrapper.hook import hooked
from capmoe_eval.wrapper.layers import MoeLayer, expected_moe_layers, find_moe_layers, is_experts
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.plan import placeholder_ids
from capmoe_eval.wrapper.proof import prove_on_entry
from capmoe_eval.wrapper.ranks import ALONE

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
        if _is_compiled(module):
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


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch compiled a module, its call or its forward."""
    return (
        hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    )


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
            prove_on_entry(target, meter)
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
