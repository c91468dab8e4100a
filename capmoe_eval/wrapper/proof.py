"""Prove on entry that γ=∞ is the stock model and that the kernels agree."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from capmoe_eval.errors import EnforcementError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.hook import hooked
from capmoe_eval.wrapper.kernel import KERNEL_TOLERANCE, experts_call, kept_pairs_kernel
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.plan import placeholder_ids
from capmoe_eval.wrapper.ranks import ALONE

# Shape suffixes: B sequences, S positions (of a batch) or slots (of a token), T tokens, H hidden
# size, P kept pairs.


def prove_on_entry(model: nn.Module, meter: Meter) -> None:
    """Prove ``kernel_agrees`` and ``stock_at_infinity``, and note them in the meter.

    Raises:
        EnforcementError: If one of them does not hold.
    """
    layers = meter.layers
    with _evaluating(model), torch.no_grad():
        tokens_BS = _probe_tokens(model, 2 * meter.ranks.size)
        meter.kernel_agrees = _compare_kernels(model, layers, tokens_BS)
        meter.stock_at_infinity = _prove_stock_at_infinity(model, layers, meter, tokens_BS)


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


def _prove_stock_at_infinity(
    model: nn.Module, layers: Sequence[MoeLayer], under: Meter, tokens_BS: Tensor
) -> dict[str, Any]:
    """Compare the model's logits with those under the method where no bound is reached."""

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
    deviation = max(_deviation(ours_TH, stock_TH) for ours_TH, stock_TH in pairs)
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


def _deviation(output_TH: Tensor, expected_TH: Tensor) -> float:
    """Return the largest difference over the largest expected output; infinity for NaN."""
    most = expected_TH.abs().amax().clamp_min(torch.finfo(expected_TH.dtype).tiny)
    off = (output_TH - expected_TH).abs().amax() / most
    return float(off.double().nan_to_num(nan=torch.inf))
