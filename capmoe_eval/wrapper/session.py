"""Put a model under a capacity for the length of a ``with`` block: ``capacity_aware``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from capmoe_eval.errors import UsageError, shown
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.forward import hooked
from capmoe_eval.wrapper.layers import MoeLayer, expected_moe_layers, find_moe_layers
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.modality import ImageFinder
from capmoe_eval.wrapper.proof import prove_on_entry
from capmoe_eval.wrapper.ranks import ALONE
from capmoe_eval.wrapper.target import claimed, target_model


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
    tokens are real. After every forward the invariants of ``docs/methods.md`` are checked.
    ``generate`` works with any cache: the prompt is computed under the capacity, and with
    ``decode="constrained"`` the other forwards are, too; with ``decode="only"`` they alone are.

    Args:
        model: A loaded model with MoE layers (transformers ≥ 5), with or without a head, or a
            module around one, such as an adapter's: the capacity is the transformers model's.
        method: The name of a method, or a method, for example ``TokenDrop(gamma=1.0)``.
        gamma: Capacity factor γ, where the method is a name and has one.
        verify: Prove on entry, by a few small forwards, that γ=∞ gives the model's own logits, and
            that the experts kernel computes the kept pairs as the stock kernel does.
        calibrated: What a calibration measured of each MoE layer, where the method needs that: for
            ``sere`` the similarity [E, E] of its experts, for ``macs`` their modality [E], for
            ``placement="eplb"`` the experts of each rank [R, E/R], rising.
        **knobs: The other knobs of the method, where it is a name.

    Yields:
        The meter: per-layer loads, drops, peaks, padding waste, proofs.

    Raises:
        UsageError: For an invalid knob, a model whose routers cannot be identified, a model that
            is under a capacity already, and in the block for a forward beside another one.
        EnforcementError: If an invariant is broken.
    """
    arguments = [*(["gamma"] if gamma is not None else []), *knobs]
    if isinstance(method, Method):
        if arguments:
            knob, made_by = arguments[0], type(method).__name__
            raise UsageError(f"{knob}: is a knob of the method; set it there, {made_by}({knob}=…)")
        chosen = method.canonical()
    else:
        chosen = create_method(method, gamma, **knobs)
    with routed(model, chosen, verify=verify, calibrated=calibrated) as meter:
        yield meter


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
    """Return the meter of a model under a method that fits it.

    Raises:
        UsageError: If the method does not fit, or the model's routers cannot be identified.
    """
    layers = find_moe_layers(model)
    if layers[0].ranks is not ALONE:
        chosen.check_processes(layers[0].ranks.size)
    for layer in layers:
        chosen.check_layers(len(layers), layer.n_experts, layer.top_k)
    if chosen.needs_images and not ImageFinder(model).knows_images:
        raise UsageError(
            f"method={chosen.name}: model {type(model).__name__} has no images, which the method "
            "weighs; choose a model of images and text, or another method"
        )
    tensors = _checked(chosen, layers, calibrated)
    meter = Meter(layers, chosen, expected_moe_layers(model.config), tensors)
    layer_count = meter.proofs()["every_layer_hooked"]
    if not layer_count["passed"]:
        raise UsageError(
            f"model={type(model).__name__}: its configuration announces {layer_count['expected']} "
            f"MoE layers, {layer_count['hooked']} were found; {_why_another_number(model)}"
        )
    return meter


def _checked(
    method: Method, layers: Sequence[MoeLayer], calibrated: Sequence[Tensor] | None
) -> Sequence[Tensor] | None:
    """Return what the method needs of a calibration, one tensor for each layer; None for nothing.

    Raises:
        UsageError: If it is missing, or of other shapes or values.
    """
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


def _why_another_number(model: nn.Module) -> str:
    """Return why a model has another number of MoE layers than announced, as far as it is known."""
    for layer in model.modules():
        if "moe_mm_token_type_ids" in inspect.signature(layer.forward).parameters:  # ERNIE-4.5-VL
            return (
                "text and images have experts of their own, which never compete for one capacity, "
                "so that neither can be dropped before the other; this architecture is not "
                "supported"
            )
    return "this architecture is not supported"
