"""Put a model under a capacity for the length of a ``with`` block: ``capacity_aware``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from capmoe_eval.errors import UsageError, choice, shown
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.knobs import KNOBS
from capmoe_eval.routing.method import Method
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
        method: A name of :data:`capmoe_eval.routing.METHODS`, or a ready :class:`Method`.
        gamma: Capacity factor γ; not needed by ``baseline``, ``expert_drop``, ``oea``,
            ``xshare`` and ``sere``, nor where ``layer_gammas`` has one for each MoE layer.
        verify: Prove on entry, by a few small forwards, that γ=∞ gives the model's own logits, and
            that the experts kernel computes the kept pairs as the stock kernel does.
        calibrated: What a calibration measured of each MoE layer, where the method needs that: for
            ``sere`` the similarity [E, E] of its experts, for ``macs`` their modality [E], for
            ``placement="eplb"`` the experts of each rank [R, E/R], rising.
        **knobs: The other fields of :class:`Method`.

    Yields:
        The meter: per-layer loads, drops, peaks, padding waste, proofs.

    Raises:
        UsageError: For an invalid knob, a model whose routers cannot be identified, a model that
            is under a capacity already, and in the block for a forward beside another one.
        EnforcementError: If an invariant is broken.
    """
    for knob in knobs:
        choice(*sorted(KNOBS))("knob", knob)
    given = [*(["gamma"] if gamma is not None else []), *knobs]
    if isinstance(method, Method) and given:
        raise UsageError(f"{given[0]}: is a field of the Method that was given; set it there")
    chosen = method if isinstance(method, Method) else Method(method, gamma, **knobs)
    target = target_model(model)
    with claimed(target):
        meter = _new_meter(target, chosen, calibrated)
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
    _check_factors(chosen, len(layers))
    for layer in layers:
        experts_per_rank(layer.n_experts, chosen.ep_size)
        if chosen.bounds_activation and chosen.k0 > layer.top_k:
            raise UsageError(
                f"k0={chosen.k0}: a token of this model has {layer.top_k} experts; choose at most "
                f"k0={layer.top_k}, at which OEA and SERE change nothing"
            )
    if chosen.weighs_tokens and not ImageFinder(model).knows_images:
        raise UsageError(
            f"method={chosen.name}: model {type(model).__name__} has no images, whose tokens it "
            "weighs; choose a model of images and text, or method=score"
        )
    known = _checked(chosen, layers, calibrated)
    meter = Meter(layers, chosen, expected_moe_layers(model.config), known)
    layer_count = meter.proofs()["every_layer_hooked"]
    if not layer_count["passed"]:
        raise UsageError(
            f"model={type(model).__name__}: its configuration announces {layer_count['expected']} "
            f"MoE layers, {layer_count['hooked']} were found; {_why_another_number(model)}"
        )
    return meter


def _check_factors(method: Method, n_layers: int) -> None:
    """Refuse a method whose layers have no γ yet, or another number of them than the model has."""
    if method.budget is not None:
        raise UsageError(
            "gamma=adaptive: a calibration chooses the γ of each layer, as python -m capmoe_eval "
            f"gamma=adaptive budget={method.budget:g} does; here name them with layer_gammas=…"
        )
    factors = method.layer_gammas
    if factors is not None and len(factors) != n_layers:
        raise UsageError(
            f"layer_gammas: {len(factors)} capacity factors for {n_layers} MoE layers; give one "
            "for each layer"
        )


class _Known(NamedTuple):
    """The rule of a kind of calibration: what it says of each MoE layer."""

    what: str
    shape: Callable[[Method, MoeLayer], tuple[int, ...]]
    rule: str  # of its values, which follows "must have"
    holds: Callable[[Tensor], bool]
    instead: str  # what needs no calibration


def _is_placement(placed_RN: Tensor) -> bool:
    each_once = placed_RN.flatten().sort().values.tolist() == list(range(placed_RN.numel()))
    rises = bool((placed_RN == placed_RN.sort(dim=1).values).all())
    return each_once and rises and not placed_RN.is_floating_point()


_KNOWN = {
    "expert_modalities": _Known(
        "the modality of every expert",
        lambda _method, layer: (layer.n_experts,),
        "1 for a visual expert, -1 for one of text and 0 for others",
        lambda bias_E: bool(((bias_E == 1) | (bias_E == -1) | (bias_E == 0)).all()),
        "set rho=0",
    ),
    "expert_loads": _Known(
        "the experts of each rank",
        lambda method, layer: (method.ep_size, layer.n_experts // method.ep_size),
        "each of its experts on one rank, in rising order",
        _is_placement,
        "leave placement out",
    ),
    "expert_similarity": _Known(
        "the similarity of the experts",
        lambda _method, layer: (layer.n_experts, layer.n_experts),
        "similarities from 0 to 1",
        lambda similarity_EE: bool(((similarity_EE >= 0) & (similarity_EE <= 1)).all()),
        "choose another method",
    ),
}
"""By :attr:`Method.calibration`; of factor_curves no more is known once the layers have factors."""


def _checked(
    method: Method, layers: Sequence[MoeLayer], calibrated: Sequence[Tensor] | None
) -> Sequence[Tensor] | None:
    """Return what the method needs of a calibration, one tensor for each layer; None for nothing.

    Raises:
        UsageError: If it is missing, or of other shapes or values.
    """
    kind = _KNOWN.get(method.calibration or "")
    if kind is None:  # without a calibration no expert is of a modality
        return [torch.zeros(of.n_experts) for of in layers] if method.weighs_tokens else None
    if calibrated is None:
        asked = f"placement={method.placement}" if method.is_placed else f"method={method.name}"
        raise UsageError(
            f"{asked}: needs {kind.what}, which a calibration finds, as python -m capmoe_eval "
            f"does; here pass calibrated=[…], a tensor for each MoE layer, or {kind.instead}"
        )
    shapes = [tuple(known.shape) for known in calibrated]
    wanted = [kind.shape(method, layer) for layer in layers]
    if shapes != wanted:
        raise UsageError(
            f"calibrated: has shapes {shown(shapes)}; give {kind.what} for each of {len(layers)} "
            f"MoE layers, {shown(wanted)}"
        )
    for layer, known in zip(layers, calibrated, strict=True):
        if not kind.holds(known):
            raise UsageError(f"calibrated: {layer.name} must have {kind.rule}")
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
