"""The part of a record that says in which engine and in which steps it was computed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from capmoe_eval.experiment.record_part import Count, Part, Positive


class EngineRun(Part):
    """The engine that computed a result, its settings by vLLM's names, and its steps."""

    engine: Literal["vllm"]
    max_num_seqs: Positive
    max_num_batched_tokens: Positive
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    enforce_eager: bool
    max_model_len: Positive
    block_size: Positive
    num_gpu_blocks: Positive | None
    steps: Positive
    preemptions: Count  # requests that had to begin again, since the cache was full
    # In the steps' order: rows of prompts, rows of generated tokens, and how many steps in a row
    # had as many.
    rows: list[Annotated[tuple[Count, Count, Positive], Field(strict=False)]]

    @model_validator(mode="after")
    def _of_all_steps(self) -> EngineRun:
        if sum(count for _, _, count in self.rows) != self.steps:
            raise ValueError(f"rows are not those of {self.steps} steps")
        return self
