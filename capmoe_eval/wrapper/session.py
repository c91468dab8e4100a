"""Put a model under a capacity for the length of a ``with`` block: ``capacity_aware``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from capmoe_eval.errors import UsageError, choice, shown
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.knobs import KNOBS
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.forward import ACTIVE, hooked
from capmoe_eval.wrapper.layers import MoeLayer, expected_moe_layers, find_moe_layers
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.modality import ImageFinder
from capmoe_eval.wrapper.proof import prove_on_entry
from capmoe_eval.wrapper.ranks import ALONE


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
    tokens are real. After every forward the promises of ``docs/methods.md`` are checked.
    ``generate`` works with any cache: the prompt is computed under the capacity, and with
    ``decode="constrained"`` the other forwards are, too; with ``decode="only"`` they alone are.

    Args:
        model: A loaded model with MoE layers (transformers ≥ 5), with or without a head.
        method: A name of :data:`capmoe_eval.routing.METHODS`, or a ready :class:`Method`.
        gamma: Capacity factor γ; not needed by ``baseline``, ``expert_drop``, ``oea``,
            ``xshare`` and ``sere``, nor where ``layer_gammas`` has one for each MoE layer.
        verify: Prove on entry, by a few small forwards, that γ=∞ gives the model's own logits, and
            that the experts kernel computes the kept pairs as the stock kernel does.
        calibrated: What a calibration measured of each MoE layer, where the method needs that: for
            ``sere`` the similarity [E, E] of its experts, for ``placement="eplb"`` the experts of
            each rank [R, E/R], rising.
        **knobs: The other fields of :class:`Method`: ep_size, scope, candidates, m, protect_topk,
            max_k, rounds, granularity, placement, rounding, count_padding, decode, renormalize,
            modality, seed, k0, expert_budget, min_similarity, delta, rho, modality_threshold,
            reroute, layer_gammas.

    Yields:
        The meter: per-layer loads, drops, peaks, padding waste, proofs.

    Raises:
        UsageError: For an invalid knob, a model whose routers cannot be identified, or a model that
            is under a capacity already.
        EnforcementError: If a promise is broken.
    """
    for knob in knobs:
        choice(*sorted(KNOBS))("knob", knob)
    chosen = method if isinstance(method, Method) else Method(method, gamma, **knobs)
    if any(hasattr(module, ACTIVE) for module in model.modules()):
        raise UsageError(
            "capacity_aware: the model is already under a capacity; leave the outer block first"
        )
    layers = find_moe_layers(model)
    _check_factors(chosen, len(layers))
    if chosen.name == "sere":
        _check_similarities(layers, calibrated)
    for layer in layers:
        experts_per_rank(layer.n_experts, chosen.ep_size)
        if chosen.bounds_activation and chosen.k0 > layer.top_k:
            raise UsageError(
                f"k0={chosen.k0}: a token of this model has {layer.top_k} experts; choose at most "
                f"k0={layer.top_k}, at which OEA and SERE change nothing"
            )
    ranks = layers[0].ranks
    if chosen.weighs_tokens:
        _check_weighing(model, chosen, layers, calibrated)
    if chosen.is_placed:
        _check_placed(chosen, layers, calibrated)
    if ranks is not ALONE and chosen.uses_ranks and chosen.ep_size != ranks.size:
        raise UsageError(
            f"ep_size={chosen.ep_size}: the model's experts are spread over {ranks.size} "
            f"processes, each of which is a rank; set ep_size={ranks.size}"
        )
    meter = Meter(layers, chosen, expected_moe_layers(model.config), calibrated)
    layer_count = meter.proofs()["every_layer_hooked"]
    if not layer_count["passed"]:
        raise UsageError(
            f"model={type(model).__name__}: its configuration announces {layer_count['expected']} "
            f"MoE layers, {layer_count['hooked']} were found; {_why_another_number(model)}"
        )
    if verify:
        prove_on_entry(model, meter)
    with hooked(model, meter):
        yield meter


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


def _check_weighing(
    model: nn.Module,
    method: Method,
    layers: list[MoeLayer],
    calibrated: Sequence[Tensor] | None,
) -> None:
    """Refuse a model whose tokens a method cannot weigh, or experts of unknown modalities."""
    if layers[0].ranks is not ALONE:
        raise UsageError(
            f"method={method.name}: weighs the tokens of a batch in one process; run it without "
            "parallel=ep, on emulated ranks (ep_size)"
        )
    if not ImageFinder(model).knows_images:
        raise UsageError(
            f"method={method.name}: model {type(model).__name__} has no images, whose tokens it "
            "weighs; choose a model of images and text, or method=score"
        )
    if method.calibration is None:
        return
    if calibrated is None:
        raise UsageError(
            f"method={method.name}: needs the modality of every expert, which a calibration finds, "
            "as python -m capmoe_eval does; give calibrated=…, or set rho=0"
        )
    found = [tuple(bias_E.shape) for bias_E in calibrated]
    if found != [(layer.n_experts,) for layer in layers]:
        raise UsageError(
            f"calibrated: has shapes {shown(found)}; give the modality of each of the "
            f"{layers[0].n_experts} experts (1, -1 or 0) for each of {len(layers)} MoE layers"
        )


def _check_placed(
    method: Method, layers: Sequence[MoeLayer], calibrated: Sequence[Tensor] | None
) -> None:
    """Refuse experts that do not lie as the method places them, or an unknown placement."""
    said = f"placement={method.placement}"
    if layers[0].ranks is not ALONE:
        raise UsageError(
            f"{said}: under parallel=ep every process has a block of experts; leave one of the two "
            "out"
        )
    if calibrated is None:
        raise UsageError(
            f"{said}: needs the experts of each rank, which a calibration finds, as python -m "
            "capmoe_eval does; here pass them as calibrated=[…], a tensor [R, E/R] for each layer"
        )
    found = [tuple(placed_RN.shape) for placed_RN in calibrated]
    ranks = method.ep_size
    if found != [(ranks, layer.n_experts // ranks) for layer in layers]:
        raise UsageError(
            f"calibrated: has shapes {shown(found)}; give the experts of each of {ranks} ranks for "
            f"each of {len(layers)} MoE layers"
        )
    for layer, placed_RN in zip(layers, calibrated, strict=True):
        each_once = sorted(placed_RN.flatten().tolist()) == list(range(layer.n_experts))
        if not each_once or placed_RN.tolist() != placed_RN.sort(dim=1).values.tolist():
            raise UsageError(
                f"calibrated: {layer.name} must have each of its {layer.n_experts} experts on one "
                "rank, in rising order"
            )


def _check_similarities(layers: Sequence[MoeLayer], calibrated: Sequence[Tensor] | None) -> None:
    """Refuse SERE without the similarity of the experts of every layer."""
    if calibrated is None:
        raise UsageError(
            "method=sere: needs the similarity of the experts of each MoE layer, which python -m "
            "capmoe_eval method=sere measures; here pass them as calibrated=[…], a tensor for each"
        )
    found = [tuple(similarity_EE.shape) for similarity_EE in calibrated]
    wanted = [(layer.n_experts, layer.n_experts) for layer in layers]
    if found != wanted:
        raise UsageError(
            f"calibrated: similarities of shapes {found}, the model's MoE layers need {wanted}"
        )
    if not all(bool(((part >= 0) & (part <= 1)).all()) for part in calibrated):
        raise UsageError("calibrated: a similarity lies from 0 to 1; others are in it, or NaN")


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
