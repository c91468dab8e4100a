"""Write Megatron-LM's arguments of a capacity.

Source: NVIDIA/Megatron-LM, ``megatron/core/transformer/moe/README.md``, commit 022bcb5:
``--moe-token-drop-policy`` is ``probs`` (the lowest probabilities are dropped: `score`) or
``position`` (the tokens at the end of the batch: `order`). A capacity needs the dispatcher
``alltoall``. The capacity is of one rank's tokens: ``num_tokens_per_rank * topk * capacity_factor /
num_experts``.
"""

from __future__ import annotations

import shlex
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from capmoe_eval.serving.settings import Setting

POLICIES = {"score": "probs", "order": "position"}
"""Megatron's names of the methods that it has."""


class Arguments(BaseModel):
    """The arguments, by their names without dashes before them."""

    model_config = ConfigDict(extra="forbid", alias_generator=lambda name: name.replace("_", "-"))

    moe_expert_capacity_factor: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    moe_token_drop_policy: Literal["probs", "position"]
    moe_pad_expert_input_to_capacity: bool = False  # a flag: it is there or not
    moe_token_dispatcher_type: Literal["alltoall"] = "alltoall"

    def line(self) -> str:
        """Return the arguments as words of a command line."""
        words = []
        for name, value in self.model_dump(by_alias=True).items():
            if value is not False:
                words += [f"--{name}", *([] if value is True else [f"{value}"])]
        return shlex.join(words)


def read_arguments(line: str) -> Arguments:
    """Return the arguments of a line.

    Raises:
        pydantic.ValidationError: If one is none of Megatron-LM's, or has another value.
    """
    found: dict[str, object] = {}
    name = ""
    for word in shlex.split(line):
        if word.startswith("--"):
            name = word[2:]
            found[name] = True
        else:
            found[name] = word
    return Arguments.model_validate(found)


def capacity_arguments(setting: Setting) -> str | None:
    """Return the arguments of a setting, or None if Megatron-LM has no such capacity."""
    policy = POLICIES.get(setting.method)
    of_experts = setting.kind == "capacity" and setting.granularity == "expert"
    # It takes one γ for all layers, of experts in blocks.
    is_plain = setting.layer_gammas is None and setting.placement is None and not setting.knobs
    if policy is None or not of_experts or not is_plain:
        return None
    factor = {"moe-expert-capacity-factor": setting.gamma, "moe-token-drop-policy": policy}
    return Arguments.model_validate(factor).line() + "\n"
