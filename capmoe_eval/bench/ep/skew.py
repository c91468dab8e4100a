"""Router logits with a wanted imbalance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.assign import expert_load

# Shape suffixes: T tokens, E experts.

_STRONGEST = 64.0  # beside noise of variance 1, all tokens choose the same experts
_STEPS = 40  # halvings of the strength
_ROUNDS = 200  # corrections of a traced load
_SAMPLE = 4096  # tokens that are enough to find it


def peak_load(logits_TE: Tensor, top_k: int) -> float:
    """Return the highest load of an expert over the mean load N̄ = T·K/E (paper Figure 2)."""
    load_E = expert_load(logits_TE.topk(top_k, dim=1).indices, logits_TE.shape[1])
    return float(load_E.max()) / float(load_E.double().mean())


def check_peak(peak: float, n_experts: int, top_k: int) -> None:
    """Refuse a highest load over the mean load that no routing can have.

    Raises:
        UsageError: Naming the peak and what is possible.
    """
    highest = n_experts / top_k
    if not 1 <= peak <= highest:
        raise UsageError(
            f"peak={peak:g}: with {n_experts} experts and {top_k} per token the fullest expert has "
            f"1 to {highest:g} times the mean load"
        )


def popularity(n_experts: int) -> Tensor:
    """Return the experts' popularities [E]: quantiles of a normal distribution, lowest first."""
    quantile_E: Tensor = torch.special.ndtri((torch.arange(n_experts) + 0.5) / n_experts)
    return quantile_E


def strength(peak: float, peak_at: Callable[[float], float]) -> float:
    """Return the least strength of popularities at which ``peak_at`` is the peak, by bisection."""
    low, high = 0.0, _STRONGEST
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if peak_at(middle) < peak:
            low = middle
        else:
            high = middle
    return high


def skewed_logits(
    n_tokens: int,
    n_experts: int,
    top_k: int,
    peak: float,
    *,
    seed: int = 0,
    together: bool = False,
) -> Tensor:
    """Return router logits [T, E] under which the fullest expert has ``peak`` times the mean load.

    A token's logits are noise plus the experts' popularities, as strong as the peak needs.

    Args:
        n_tokens: Tokens T.
        n_experts: Experts E.
        top_k: Experts K per token.
        peak: The wanted highest normalised load; 2 to 7 is what the paper saw in OLMoE.
        seed: Seed of the noise and of which experts are popular.
        together: Whether experts stand in the order of their popularity, so that one rank gets the
            popular ones; otherwise they are shuffled.

    Raises:
        UsageError: If no routing can have that peak.
    """
    check_peak(peak, n_experts, top_k)
    generator = torch.Generator().manual_seed(seed)
    popular_E = popularity(n_experts).flip(0)
    if not together:
        popular_E = popular_E[torch.randperm(n_experts, generator=generator)]
    noise_TE = torch.randn(n_tokens, n_experts, generator=generator)
    sample_TE = noise_TE[:_SAMPLE]
    factor = strength(peak, lambda factor: peak_load(sample_TE + factor * popular_E, top_k))
    return noise_TE + factor * popular_E


def traced_logits(n_tokens: int, load_E: Tensor, top_k: int, *, seed: int = 0) -> Tensor:
    """Return router logits [T, E] under which the experts have the loads of a recorded layer.

    A token's logits are noise plus a constant for each expert; the constants are corrected until
    the shares of the loads are those of the record.

    Args:
        n_tokens: Tokens T.
        load_E: The recorded load of every expert (``load_before`` of a record's layer).
        top_k: Experts K per token.
        seed: Seed of the noise.

    Raises:
        UsageError: If an expert has more load than there are tokens.
    """
    share_E = load_E.double() / load_E.sum() * top_k  # of the tokens that choose the expert
    if float(share_E.max()) > 1:
        raise UsageError(f"load: no top-{top_k} routing can give an expert {share_E.max():.2f} T")
    generator = torch.Generator().manual_seed(seed)
    noise_TE = torch.randn(n_tokens, len(load_E), generator=generator)
    sample_TE = noise_TE[:_SAMPLE]
    floor = 0.5 / len(sample_TE)
    wanted_E = share_E.clamp_min(floor).log()
    constant_E = torch.zeros(len(load_E))
    for number in range(_ROUNDS):
        chosen_TK = (sample_TE + constant_E).topk(top_k, dim=1).indices
        now_E = expert_load(chosen_TK, len(load_E)).double() / len(sample_TE)
        step = 0.5 / (1 + number / 40)
        constant_E += (step * (wanted_E - now_E.clamp_min(floor).log())).float()
    return noise_TE + constant_E
