"""Write TensorRT-LLM's ``moe_load_balancer.yaml``: the expert in every slot.

Source: NVIDIA/TensorRT-LLM, ``examples/wide_ep/ep_load_balancer/README.md``, commit 2a595f8, and
``MoeLoadBalancerConfig`` in ``tensorrt_llm/llmapi/llm_args.py``, which refuses other fields and
wants ``num_slots`` to be a multiple of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from capmoe_eval.serving.placement.layout import Placement

Index = Annotated[int, Field(ge=0)]


class MoeLoadBalancer(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    num_slots: Annotated[int, Field(ge=1)]
    initial_global_assignments: dict[Index, list[Index]]  # of each MoE layer, rank after rank
    layer_updates_per_iter: Index = 0  # 0: the placement stays

    @model_validator(mode="after")
    def _fills_all_slots(self) -> MoeLoadBalancer:
        for layer, experts in self.initial_global_assignments.items():
            if len(experts) != self.num_slots:
                raise ValueError(
                    f"initial_global_assignments[{layer}] has {len(experts)} experts for "
                    f"num_slots={self.num_slots}"
                )
            if len(set(experts)) != max(experts) + 1:
                raise ValueError(f"initial_global_assignments[{layer}] lacks an expert")
        return self


def load_balancer(placement: Placement, layers: Sequence[int]) -> str:
    """Return the file for a placement; ``layers`` are the numbers of its layers in the model."""
    rows = zip(layers, placement.expert_LP.tolist(), strict=True)
    content = MoeLoadBalancer(
        num_slots=placement.expert_LP.shape[1], initial_global_assignments=dict(rows)
    )
    return yaml.safe_dump(
        content.model_dump(), default_flow_style=None, sort_keys=False, width=2**31
    )


def usage(file: str, ranks: int) -> str:
    """Return how the server takes the file."""
    options = f"moe_config: {{backend: WideEP, load_balancer: {file}}}"
    return f"{options} in the LLM API's options, and --ep {ranks}"
