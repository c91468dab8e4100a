"""Write vLLM's configuration of EPLB, which plans by what the server itself counts.

Source: vllm-project/vllm, ``vllm/config/parallel.py``, commit 00193b8, ``EPLBConfig``; the options
``--enable-eplb --eplb-config JSON`` need ``--enable-expert-parallel``. No file gives vLLM a
placement to start with.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class EplbConfig(BaseModel):
    """The fields of the configuration that do not differ between versions; defaults are vLLM's."""

    model_config = ConfigDict(strict=True, extra="forbid")

    num_redundant_experts: Annotated[int, Field(ge=0)] = 0
    window_size: Annotated[int, Field(gt=0)] = 1000
    step_interval: Annotated[int, Field(gt=0)] = 3000
    log_balancedness: bool = False
    policy: Literal["default"] = "default"


def eplb_config(redundant: int) -> str:
    """Return the configuration for so many redundant experts of a layer, and what is its default.

    Fields at their default are left out.
    """
    return EplbConfig(num_redundant_experts=redundant).model_dump_json(exclude_unset=True) + "\n"


def usage(file: str) -> str:
    """Return how the server takes the file."""
    return f'vllm serve … --enable-expert-parallel --enable-eplb --eplb-config "$(cat {file})"'
