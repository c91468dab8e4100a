"""Finding the MoE layers of a model and understanding their routers, or refusing by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from capmoe_eval.errors import UsageError
from capmoe_eval.reroute.gates import GateRecipe, find_recipe
from capmoe_eval.reroute.ranks import ALONE, Ranks, ranks_of

_PROBE_ROWS = 64


@dataclass(frozen=True)
class MoeLayer:
    """One MoE layer: a router, the experts it feeds, and how its gate works.

    Attributes:
        name: The layer's module path in the model.
        router: Returns (logits [T, E], weights [T, K], indices [T, K]).
        experts: Called with (hidden [T, H], indices, weights).
        recipe: How the router makes scores and weights.
        n_experts: Routed experts E.
        top_k: Experts K per token.
        ranks: The processes that share its experts.
    """

    name: str
    router: nn.Module
    experts: nn.Module
    recipe: GateRecipe
    n_experts: int
    top_k: int
    ranks: Ranks = ALONE


def find_moe_layers(model: nn.Module) -> list[MoeLayer]:
    """Return every MoE layer of a transformers model, in the model's order.

    The experts are the modules that transformers dispatches through its ``ExpertsInterface``; the
    router is the sibling that returns (logits, weights, indices).

    Raises:
        UsageError: If the model has no such layer, or has one whose router is not understood.
    """
    model_name = type(model).__name__
    layers = [
        _understand(model_name, name, parent, experts)
        for name, parent in model.named_modules()
        for experts in parent.children()
        if _is_experts(experts)
    ]
    if not layers:
        raise UsageError(
            f"model={model_name}: no Mixture-of-Experts layer found (no module uses transformers' "
            "experts interface); choose an MoE model of transformers 5"
        )
    return layers


def _is_experts(module: nn.Module) -> bool:
    # Set by transformers' `use_experts_implementation` on every class it decorates.
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts")


def _understand(model_name: str, name: str, parent: nn.Module, experts: nn.Module) -> MoeLayer:
    ranks = ranks_of(experts)
    if experts._is_expert_parallel and ranks is ALONE:
        raise UsageError(
            f"model={model_name}: its experts are spread over processes by another implementation; "
            'load it with ep_implementation="capmoe", which drops before it sends'
        )
    n_experts = int(experts.num_experts) * ranks.size  # type: ignore[arg-type]
    reasons = []
    for child_name, child in parent.named_children():
        if child is experts or type(child) is nn.Linear:
            continue  # a shared expert's gate, not a router
        try:
            logits_TE, weight_TK, topk_TK = _probe(child, experts)
        except Exception as error:
            reasons.append(f"{child_name} ({type(child).__name__}): {_first_line(error)}")
            continue
        if logits_TE.shape[-1] != n_experts:
            reasons.append(f"{child_name}: {logits_TE.shape[-1]} logits for {n_experts} experts")
            continue
        recipe = find_recipe(child, logits_TE, weight_TK, topk_TK)
        if recipe is None:
            reasons.append(
                f"{child_name} ({type(child).__name__}): its weights are neither softmax nor "
                "sigmoid scores of its logits, normalised or not"
            )
            continue
        return MoeLayer(name, child, experts, recipe, n_experts, topk_TK.shape[-1], ranks)
    raise UsageError(
        f"model={model_name}: the router of {name} is not understood: "
        f"{'; '.join(reasons) or 'no module beside the experts'}"
    )


def _probe(router: nn.Module, experts: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a would-be router makes of random hidden states.

    Raises:
        TypeError: If it is no router: what it returns is not (logits, weights, indices).
    """
    config: Any = experts.config
    width = int(config.get_text_config().hidden_size)
    like = next(iter(router.parameters()), None)
    if like is None:
        raise TypeError("it has no parameters")
    hidden_TH = torch.randn(_PROBE_ROWS, width, generator=torch.Generator().manual_seed(0))
    device = like.device if like.device.type != "meta" else torch.device("cpu")
    with torch.no_grad():
        hidden_TH = hidden_TH.to(device=device, dtype=like.dtype)
        # Parameters that FSDP keeps in parts are put together for this one call.
        whole = {
            name: parameter.full_tensor()
            for name, parameter in router.named_parameters()
            if hasattr(parameter, "full_tensor")
        }
        output = (
            torch.func.functional_call(router, whole, (hidden_TH,)) if whole else router(hidden_TH)
        )
    if not isinstance(output, tuple) or len(output) != 3:
        raise TypeError("it does not return (logits, weights, indices)")
    logits_TE, weight_TK, topk_TK = output
    if topk_TK.dtype.is_floating_point or weight_TK.shape != topk_TK.shape or topk_TK.ndim != 2:
        raise TypeError("it does not return (logits [T, E], weights [T, K], indices [T, K])")
    return logits_TE, weight_TK, topk_TK.long()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__


def expected_moe_layers(config: Any) -> int | None:
    """Return how many MoE layers a configuration announces, or None if it does not say.

    Counted from the configuration alone, independently of the modules that were found: the layers
    that are neither in ``mlp_only_layers``, nor before ``first_k_dense_replace``, nor skipped by
    ``decoder_sparse_step``, nor outside ERNIE's ``moe_layer_*``, nor dense in ``mlp_layer_types``.
    """
    text = config.get_text_config()
    layers: int | None = getattr(text, "num_hidden_layers", None)
    if layers is None:
        return None
    types: list[str] | None = getattr(text, "mlp_layer_types", None)
    if types is not None:
        return types.count("sparse")
    first = getattr(text, "first_k_dense_replace", None) or 0
    first = max(first, getattr(text, "moe_layer_start_index", None) or 0)
    end: int | None = getattr(text, "moe_layer_end_index", None)
    last = layers - 1 if end is None or end < 0 else end
    step = getattr(text, "decoder_sparse_step", None) or 1
    step = getattr(text, "moe_layer_interval", None) or step
    only_dense = set(getattr(text, "mlp_only_layers", None) or ())
    moe_layers = [
        layer
        for layer in range(layers)
        if first <= layer <= last and layer not in only_dense and (layer + 1) % step == 0
    ]
    return len(moe_layers)
