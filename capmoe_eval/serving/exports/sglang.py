"""Write SGLang's ``--init-expert-location``: the counts that its own EPLB places experts by.

Source: sgl-project/sglang, ``python/sglang/srt/eplb/expert_location.py``, commit 01fec5c,
``compute_initial_expert_location_metadata``: a path that ends in ``.json`` holds an object with
``logical_count`` [layers, experts] (or with steps before them), a row for every layer of the model,
dense ones too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from capmoe_eval.serving.trace import Array

Counts = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class ExpertLocation(BaseModel):
    """The object of the file; SGLang passes on no other field."""

    model_config = ConfigDict(strict=True, extra="forbid")

    logical_count: Annotated[list[Counts], Field(min_length=1)]

    @model_validator(mode="after")
    def _has_one_number_of_experts(self) -> ExpertLocation:
        if len({len(row) for row in self.logical_count}) > 1:
            raise ValueError("logical_count: rows of different lengths")
        return self


def expert_location(load_LE: Array, layers: Sequence[int]) -> str:
    """Return the file for loads of MoE layers.

    Args:
        load_LE: Pairs of each expert in each MoE layer.
        layers: The numbers of these layers in the model; rows between them, which dense layers
            have, are filled with ones.
    """
    count_LE = np.ones((max(layers) + 1, load_LE.shape[1]), dtype=np.int64)
    count_LE[list(layers)] = load_LE
    return ExpertLocation(logical_count=count_LE.tolist()).model_dump_json() + "\n"


def usage(file: str, ranks: int, redundant: int, *, by_program: bool) -> str:
    """Return how the server takes the file; ``by_program`` splits tokens by LPLB.

    LPLB is pull request 24515, which takes few models, on GPUs of compute capability 9.0 and more.
    """
    return (
        f"python -m sglang.launch_server … --ep-size {ranks} --ep-num-redundant-experts "
        f"{redundant} --init-expert-location {file}"
        + (" --ep-dispatch-algorithm lp" if by_program else "")
    )
