"""Run one model under several capacity factors, and print what each drops.

python examples/one_model.py [DIRECTORY_OR_NAME]      # default: the embedded OLMoE
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM

from capmoe_eval import TokenDrop, capacity_aware
from capmoe_eval.zoo.checkpoints import trained_model


def main(pretrained: str | None = None) -> None:
    """Print the drop rate, the effective γ and the peak of every capacity factor."""
    if pretrained is None:
        model = trained_model("olmoe")
    else:
        model = AutoModelForCausalLM.from_pretrained(pretrained)
    tokens = torch.randint(2, 400, (8, 64), generator=torch.Generator().manual_seed(0))
    print("gamma  effective  dropped  peak before -> after")
    for gamma in (0.5, 1.0, 1.5, 2.0):
        with torch.no_grad(), capacity_aware(model, TokenDrop(gamma=gamma, ep_size=8)) as meter:
            model(tokens)
        load = meter.summary()
        print(
            f"{gamma:5}  {load['effective_gamma']:9.2f}  {load['drop_rate']:7.1%}  "
            f"{load['mean_peak_before']:.2f} -> {load['mean_peak_after']:.2f}"
        )
        assert all(proof["passed"] is not False for proof in meter.proofs().values())


if __name__ == "__main__":
    main(*sys.argv[1:])
