"""Find how a vLLM router computes weights from logits, by its outputs."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from capmoe_eval.errors import UsageError, first_line
from capmoe_eval.wrapper.gates import ExpertTensor, Gate, fitting_gates
from torch import Tensor

# Shape suffixes: T rows, E routed experts, K = top-k.

_PROBE_ROWS = 64
_BIAS = "e_score_correction_bias"


def read_gate(name: str, router: Any) -> Gate:
    """Return the gate that reproduces a vLLM router.

    The router is called with random logits, and with a random correction bias where it has one.

    Args:
        name: The layer, for errors.
        router: A ``BaseRouter`` of vLLM.

    Raises:
        UsageError: If no recipe reproduces its weights and its choice.
    """
    bias = getattr(router, _BIAS, None)
    is_grouped = bool(getattr(router, "use_grouped_topk", bool(getattr(router, "topk_group", 0))))
    # What `Gate` reads of a router, by the names that transformers' routers have.
    parameters: Any = SimpleNamespace(
        num_group=router.num_expert_group if is_grouped else 1,
        topk_group=router.topk_group if is_grouped else 1,
        routed_scaling_factor=float(getattr(router, "routed_scaling_factor", 1.0)),
    )
    stand_ins: dict[ExpertTensor, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    n_experts = int(router.global_num_experts)
    if bias is not None:
        random_E = torch.rand(n_experts, generator=generator).to(bias.device, bias.dtype)
        stand_ins[ExpertTensor(router, _BIAS)] = random_E.float()
    spread_T1 = torch.logspace(-2, 0.5, _PROBE_ROWS)[:, None]
    logits_TE = torch.randn(_PROBE_ROWS, n_experts, generator=generator) * spread_T1
    if bias is not None:
        logits_TE = logits_TE.to(bias.device)
    try:
        if bias is not None:
            setattr(router, _BIAS, random_E)
        weight_TK, topk_TK = router._compute_routing(logits_TE, logits_TE, None)
    except Exception as error:  # any router may be met
        raise UsageError(
            f"{name}: its router {type(router).__name__} {first_line(error)}"
        ) from error
    finally:
        if bias is not None:
            setattr(router, _BIAS, bias)
    gates = fitting_gates(parameters, stand_ins, [(logits_TE, weight_TK, topk_TK.long())])
    if not gates:
        raise UsageError(
            f"{name}: no known gate computes the weights of its router {type(router).__name__} "
            "(custom routing functions and tables of tokens are not supported); serve this model "
            "without CAPMOE_METHOD"
        )
    return min(gates, key=lambda fit: fit[1])[0]  # the first of those that fit alike


def rounds_to_logits(router: Any) -> bool:
    """Return whether a router computes its weights in the precision of its logits.

    The weights are then of float32 and have the values of a lower precision. That is so for a
    softmax without groups on a CPU.
    """
    bias = getattr(router, _BIAS, None)
    device = None if bias is None else bias.device
    generator = torch.Generator().manual_seed(0)
    logits_TE = torch.randn(_PROBE_ROWS, int(router.global_num_experts), generator=generator)
    logits_TE = logits_TE.to(device, torch.bfloat16)
    weight_TK, _ = router._compute_routing(logits_TE, logits_TE, None)
    return bool((weight_TK == weight_TK.bfloat16()).all())


def slack(logits_TE: Tensor) -> Tensor:
    """Return the relative error of weights that are computed in the precision of the logits [].

    vLLM takes ``exp(logit - log Z)``, and torch's log Z is ``max + log Σ exp(logit - max)``, where
    each step is rounded. With logits of at most m: the differences are at most 2m, two roundings
    are relative to 1 (exponential, sum), the logarithm is at most log E, log Z at most m + log E,
    the last difference at most m more, and its exponential is rounded once.
    """
    half = torch.finfo(logits_TE.dtype).eps / 2
    most, log_experts = logits_TE.abs().amax().float(), math.log(logits_TE.shape[1])
    of_log_z = 2 * most + 2 + log_experts + (most + log_experts)
    exponent = half * (of_log_z + (2 * most + log_experts) + 1)
    return exponent.expm1()
