"""Find the MoE layers of a model and identify their routers, or refuse it."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from capmoe_eval.errors import UsageError, first_line
from capmoe_eval.wrapper.gates import (
    ExpertTensor,
    Gate,
    GateRecipe,
    RouterOutput,
    fitting_gates,
    is_grouped,
    whole,
)
from capmoe_eval.wrapper.ranks import ALONE, EXPERTS_RANKS, Ranks

_PROBE_ROWS = 64
_PROBE_SPREAD = 3.0  # of the largest logits: scores are neither alike nor 0 and 1
_HOST: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults
_DEQUANTISE = (
    "if its weights are quantised, load them dequantised, for example with "
    "quantization_config=FineGrainedFP8Config(dequantize=True) or Mxfp4Config(dequantize=True)"
)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is a layer's experts, dispatched through ``ExpertsInterface``."""
    return hasattr(module, "num_experts") and _registry(type(module)) is not None


def _registry(kind: Any) -> ExpertsInterface | None:
    """Return the registry of kernels that dispatches a class's forward; None if none does.

    transformers' ``use_experts_implementation`` keeps it in the closure of the forward.
    """
    if not inspect.isfunction(kind.forward):
        return None
    held = inspect.getclosurevars(kind.forward).nonlocals.values()
    return next((part for part in held if isinstance(part, ExpertsInterface)), None)


@dataclass(frozen=True)
class MoeLayer:
    """One MoE layer: its router, its experts, and the gate that describes the router."""

    name: str  # module path of the layer in the model
    router: nn.Module  # returns (logits [T, E], weights [T, K], indices [T, K])
    experts: nn.Module  # called with (hidden [T, H], indices, weights)
    gate: Gate
    n_experts: int  # routed experts E
    top_k: int  # experts K per token
    ranks: Ranks = ALONE  # the processes that share its experts


def find_moe_layers(model: nn.Module) -> list[MoeLayer]:
    """Return every MoE layer of a transformers model, in the model's order.

    The experts are the modules that transformers dispatches through its ``ExpertsInterface``; the
    router is the sibling that returns (logits, weights, indices).

    Raises:
        UsageError: If the model has no MoE layer, or one whose router no recipe reproduces.
    """
    model_name = type(model).__name__
    readings = [
        _read_layer(model_name, name, parent, experts)
        for name, parent in model.named_modules()
        for experts in parent.children()
        if is_experts(experts)
    ]
    if not readings:
        config: Any = getattr(model, "config", None)
        quantised = getattr(config, "quantization_config", None) is not None
        raise UsageError(
            f"model={model_name}: no Mixture-of-Experts layer found (no module uses transformers' "
            "experts interface); "
            f"{_DEQUANTISE if quantised else 'choose an MoE model of transformers 5'}"
        )
    return _settled(readings)


_Reading: TypeAlias = tuple[MoeLayer, list[tuple[Gate, float]]]
"""A layer with the first of the gates that its router may have, and all of them."""


def _settled(readings: list[_Reading]) -> list[MoeLayer]:
    """Return the layers, those of one kind with the recipe that fits all of them best."""

    def kind(layer: MoeLayer) -> tuple[object, ...]:
        return type(layer.router), layer.n_experts, layer.top_k, layer.gate.recipe.fixed

    worst: dict[tuple[object, ...], dict[GateRecipe, float]] = {}
    for layer, fitting in readings:
        deviations = {gate.recipe: off for gate, off in reversed(fitting)}
        shared = worst.setdefault(kind(layer), deviations)
        worst[kind(layer)] = {
            recipe: max(off, deviations[recipe])
            for recipe, off in shared.items()
            if recipe in deviations
        }
    layers = []
    for layer, fitting in readings:
        off_by = worst[kind(layer)] or {gate.recipe: off for gate, off in fitting}
        gates = [gate for gate, _ in fitting if gate.recipe in off_by]
        gate = min(gates, key=lambda gate: off_by[gate.recipe])
        layers.append(dataclasses.replace(layer, gate=gate))
    return layers


def _read_layer(model_name: str, name: str, parent: nn.Module, experts: nn.Module) -> _Reading:
    if _registry(type(experts)) is not ALL_EXPERTS_FUNCTIONS:  # another registry of kernels (FP8)
        raise UsageError(
            f"model={model_name}: the experts of {name} ({type(experts).__name__}) have kernels of "
            f"their own, which know of no dropped pairs; {_DEQUANTISE}"
        )
    ranks: Ranks = getattr(experts, EXPERTS_RANKS, ALONE)
    if getattr(experts, "_is_expert_parallel", False) and ranks is ALONE:
        raise UsageError(
            f"model={model_name}: its experts are spread over processes by another implementation; "
            'load it with ep_implementation="capmoe", which drops before it sends'
        )
    # Expert parallelism replaces the forward of the experts, too.
    for module in (parent, experts) if ranks is ALONE else (parent,):
        if (kernel := _replacement(module)) is not None:
            raise UsageError(
                f"model={model_name}: {kernel} replaces the forward of {name} "
                f"({type(module).__name__}), and calls no router or experts that a capacity could "
                "bound; load the model without use_kernels and kernel_config"
            )
    n_experts = int(experts.num_experts) * ranks.size  # type: ignore[arg-type]
    if getattr(parent, "base_layer", None) is experts:  # as peft's adapters name what they wrap
        raise UsageError(
            f"model={model_name}: {type(parent).__name__} adapts the experts of "
            f"{name.removesuffix('.base_layer')}, and computes dropped pairs, too; merge it first, "
            "for example by model = model.merge_and_unload()"
        )
    _check_alignment(model_name, experts)
    reasons = []
    for child_name, child in parent.named_children():
        if child is experts or type(child) is nn.Linear:
            continue  # a shared expert's gate, not a router
        try:
            gates, top_k = _read_router(child, parent, experts, n_experts)
        except Exception as error:  # any module may be tried as a router
            reasons.append(f"{child_name} ({type(child).__name__}): {first_line(error)}")
        else:
            layer = MoeLayer(name, child, experts, gates[0][0], n_experts, top_k, ranks)
            return layer, gates
    raise UsageError(
        f"model={model_name}: the router of {name} is not understood: "
        f"{'; '.join(reasons) or 'no module beside the experts'}"
    )


def _replacement(module: nn.Module) -> str | None:
    """Return the name of what stands in for a module's own forward, as kernels of the hub do.

    transformers' ``use_kernels=True`` gives the module a method of another class, such as
    ``MegaBlocksMoeMLP.forward``. accelerate wraps the module's own, and keeps it.
    """
    held = vars(module)
    forward = held.get("_old_forward", held.get("forward"))
    if forward is None or getattr(forward, "__func__", None) is type(module).forward:
        return None
    return str(getattr(forward, "__qualname__", forward))


def _check_alignment(model_name: str, experts: Any) -> None:
    """Refuse experts whose width the grouped_mm kernel cannot compute."""
    if experts.config._experts_implementation != "grouped_mm":
        return
    multiple = 16  # bytes, asked by torch
    for weight in experts.parameters():
        width, size = weight.shape[-1], weight.element_size()
        if weight.ndim != 3 or not width * size % multiple or weight.is_meta:
            continue
        row_TH = weight.new_zeros(1, experts.config.get_text_config().hidden_size)
        slot_TS = torch.zeros_like(row_TH[:, :1], dtype=torch.long)
        try:
            with torch.no_grad():
                experts(row_TH, slot_TS, torch.zeros_like(row_TH[:, :1]))
        except RuntimeError as error:
            fields = vars(experts.config).items()
            field = next((f for f, value in fields if value == width and "moe" in f), "experts")
            raise UsageError(
                f"model={model_name}: {field}={width}: the kernel grouped_mm needs a multiple of "
                f"{multiple // size} in {weight.dtype} ({first_line(error)}); load the model with "
                'experts_implementation="eager"'
            ) from error


def _read_router(
    router: nn.Module, parent: nn.Module, experts: nn.Module, n_experts: int
) -> tuple[list[tuple[Gate, float]], int]:
    """Return the fitting gates and the top-k of a router; raise if no recipe reproduces it."""
    stand_ins = _expert_tensors(router, parent, n_experts)
    probe = _probe(router, experts, stand_ins)
    logits_TE, _, topk_TK = probe
    if logits_TE.shape[-1] != n_experts:
        raise TypeError(f"{logits_TE.shape[-1]} logits for {n_experts} experts")
    probes = [probe, *probes_elsewhere(router, experts, stand_ins, probe)]
    gates = fitting_gates(router, stand_ins, probes)
    if not gates and _asks_for_tokens(router):
        elsewhere = _probe(router, experts, stand_ins, seed=1)
        if torch.equal(topk_TK, elsewhere[2]):
            gates = fitting_gates(router, stand_ins, [probe], fixed=True)
    if not gates:
        unread = " (part of it is offloaded: a bias there cannot be read)"
        raise TypeError(
            "its weights are neither softmax nor sigmoid scores of its logits, normalised or not"
            f"{unread if any(part.is_meta for part in router.parameters()) else ''}"
        )
    return gates, topk_TK.shape[-1]


def probes_elsewhere(
    router: nn.Module,
    experts: nn.Module,
    stand_ins: Mapping[ExpertTensor, Tensor],
    probe: RouterOutput,
) -> list[RouterOutput]:
    """Return a router's output with another top-k, where its own top-k leaves the recipe open."""
    n_experts, top_k = probe[0].shape[-1], probe[2].shape[-1]
    other = top_k if top_k < n_experts else max(1, n_experts // 2)
    if is_grouped(router) and top_k < n_experts:
        other = max(other, n_experts * int(router.topk_group) // int(router.num_group))  # type: ignore[arg-type]
    if other in (top_k, n_experts):
        return []
    for name in [name for name, value in vars(router).items() if value == top_k]:
        setting = getattr(router, name)
        try:
            setattr(router, name, other)
            elsewhere = _probe(router, experts, stand_ins)
        except Exception:  # another number of the router's
            continue
        finally:
            setattr(router, name, setting)
        if elsewhere[2].shape[-1] == other:
            return [elsewhere]
    return []


def _expert_tensors(
    router: nn.Module, parent: nn.Module, n_experts: int
) -> dict[ExpertTensor, Tensor]:
    """Return the tensors with one number per expert, each with the numbers [E] to probe it with."""
    tensors = [*router.named_parameters(), *router.named_buffers()]
    asked = inspect.signature(router.forward).parameters.keys()
    held = [*parent.named_parameters(recurse=False), *parent.named_buffers(recurse=False)]
    places = [(ExpertTensor(router, name), tensor) for name, tensor in tensors]
    places += [(ExpertTensor(parent, name), tensor) for name, tensor in held if name in asked]
    offloaded = any(tensor.is_meta for _, tensor in tensors)
    generator = torch.Generator().manual_seed(1)
    return {
        place: place.value_E
        if offloaded
        else torch.rand(n_experts, generator=generator, **_HOST).to(tensor.device)
        for place, tensor in places
        if tensor.is_floating_point()
        and tensor.numel() == tensor.shape[-1] == n_experts
        and not tensor.is_meta
    }


def _probe(
    router: nn.Module,
    experts: nn.Module,
    stand_ins: Mapping[ExpertTensor, Tensor],
    *,
    seed: int = 0,
) -> RouterOutput:
    """Return the logits, weights and indices of what may be a router, for random hidden states."""
    like = next(iter(router.parameters()), None)
    if like is None:
        raise TypeError("it has no parameters")
    offloaded = like.is_meta
    # In float32 whatever the model's precision, so that rounding does not hide a wrong recipe.
    # Parameters that FSDP shards are gathered for this one call.
    tensors = () if offloaded else (*router.named_parameters(), *router.named_buffers())
    state = {
        name: whole(tensor).float() if tensor.is_floating_point() else tensor
        for name, tensor in tensors
    }
    lent = {}
    for place, value_E in stand_ins.items():
        if place.owner is not router:
            lent[place.name] = value_E
        elif not offloaded:
            state[place.name] = value_E.view(state[place.name].shape)
    config: Any = experts.config
    text = config.get_text_config()
    if _asks_for_tokens(router):
        lent["input_ids"] = torch.arange(_PROBE_ROWS, device=like.device) % int(text.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    hidden_TH = torch.randn(_PROBE_ROWS, int(text.hidden_size), generator=generator, **_HOST)
    # From nearly uniform scores to peaked ones.
    hidden_TH *= torch.logspace(-2, 0, _PROBE_ROWS, **_HOST)[:, None]
    hidden_TH = hidden_TH.to(like.dtype) if offloaded else hidden_TH.to(like.device)

    def run(hidden_TH: Tensor) -> Any:
        try:
            return functional_call(router, state, (hidden_TH,), lent)
        except (IndexError, ValueError):  # it needs a batch of sequences (AFMoE)
            return functional_call(router, state, (hidden_TH[None],), lent)

    with torch.no_grad():
        output = run(hidden_TH)
        spread = _spread(output)
        # Whatever the scale of its weights, else a bias hides the scores or is hidden.
        if spread > 0:
            output = run(hidden_TH * (_PROBE_SPREAD / spread))
    if not isinstance(output, tuple) or len(output) != 3:
        raise TypeError("it does not return (logits, weights, indices)")
    logits_TE, weight_TK, topk_TK = output
    if topk_TK.dtype.is_floating_point or weight_TK.shape != topk_TK.shape or topk_TK.ndim != 2:
        raise TypeError("it does not return (logits [T, E], weights [T, K], indices [T, K])")
    return logits_TE, weight_TK, topk_TK.long()


def _spread(output: Any) -> float:
    """Return the standard deviation of a router's largest logits; 0 if it returns none."""
    logits_TE = output[0] if isinstance(output, tuple) else None
    if not isinstance(logits_TE, Tensor) or not bool((logits_TE < 0).any()):
        return 0.0
    spread = float(logits_TE[-_PROBE_ROWS // 4 :].float().std())
    return spread if math.isfinite(spread) else 0.0


def _asks_for_tokens(router: nn.Module) -> bool:
    return "input_ids" in inspect.signature(router.forward).parameters


def announced_layers(config: Any) -> tuple[int, int, int] | None:
    """Return a configuration's numbers of MoE layers, experts E and top-k K; None if one is absent.

    They come from the configuration alone, as those of :func:`expected_moe_layers`.
    """
    text = config.get_text_config()
    numbers = [getattr(text, field, None) for field in _EXPERT_COUNTS]
    experts = next((number for number in numbers if number is not None), None)
    counts = expected_moe_layers(config), experts, getattr(text, "num_experts_per_tok", None)
    return counts if all(type(count) is int for count in counts) else None  # type: ignore[return-value]


def expected_moe_layers(config: Any) -> int | None:
    """Return the number of MoE layers that a configuration announces, or None if it does not say.

    The number comes from the configuration alone, independently of the modules that were found. A
    configuration that names no dense layer announces all of its layers.
    """
    text = config.get_text_config()
    if getattr(text, "enable_moe_block", True) is False:  # Gemma 4
        return 0
    if any(getattr(text, field, None) == 0 for field in _EXPERT_COUNTS):
        return 0
    for field in ("mlp_layer_types", "layers_block_type"):
        kinds: list[str] = getattr(text, field, None) or []
        if not _MLP_KINDS.isdisjoint(kinds):  # Jamba's kinds are those of its attention
            return sum(kind in _MOE_KINDS for kind in kinds)
    layers: int | None = getattr(text, "num_hidden_layers", None)
    return None if layers is None else sum(_is_moe(text, layer) for layer in range(layers))


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MOE_KINDS = {"sparse", "moe", "hash_moe"}
_MLP_KINDS = _MOE_KINDS | {"dense", "mlp"}


def _is_moe(text: Any, layer: int) -> bool:
    """Return whether a layer is MoE: whether no field of the configuration makes it dense."""

    def value_of(field: str, default: int) -> int:
        value: int | None = getattr(text, field, None)
        return default if value is None else value

    first = max(
        value_of(field, 0)
        for field in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    )
    last = value_of("moe_layer_end_index", -1)
    step = value_of("moe_layer_interval", value_of("decoder_sparse_step", 1))
    period = value_of("expert_layer_period", 1)  # Jamba
    return (
        first <= layer
        and (last < 0 or layer <= last)
        and (layer + 1) % step == 0
        and layer % period == value_of("expert_layer_offset", 0)
        and layer not in (getattr(text, "mlp_only_layers", None) or ())
    )
