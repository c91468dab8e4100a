"""Forecast the paper's tables on GPUs: counted tokens, published sizes, and stated assumptions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from capmoe_eval.bench.rounds import say
from capmoe_eval.evaluation.loading import weightless
from capmoe_eval.evaluation.preparation import with_documents
from capmoe_eval.evaluation.workload import CellWork, WorkCounter, sequences
from capmoe_eval.experiment.cell import ModelId
from capmoe_eval.experiment.configuration import CellPlan, plans
from capmoe_eval.experiment.selection import composed
from capmoe_eval.wrapper.layers import is_experts

from capmoe_benchmarks.rehearsal.checkpoint import Checkpoint

TABLES: Final = ("table1", "table2", "table3", "table6")


@dataclass(frozen=True)
class GpuAssumptions:
    """A GPU, and what share of it an evaluation reaches: the assumptions of the forecast."""

    name: str = "H100 SXM"
    flops: float = 989e12  # a second, dense bfloat16, as its data sheet has it
    bandwidth: float = 3.35e12  # bytes a second
    memory: float = 80e9  # bytes
    # Shares that are reached, and the time that the host takes to start a layer's kernels.
    compute_share: float = 0.25
    bandwidth_share: float = 0.5
    layer_seconds: float = 1e-3


H100: Final = GpuAssumptions()


@dataclass(frozen=True)
class Sizes:
    """The sizes of a whole model that the time of a forward depends on."""

    weights: int  # bytes
    active: int  # parameters that a token is multiplied with
    layers: int
    width: int  # of all queries and of all values of a token, together

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Sizes:
        """Return the sizes of a model with all its layers."""
        model = weightless(checkpoint.model)
        text = model.config.get_text_config()
        total = sum(weight.numel() for weight in model.parameters())
        idle = model.get_input_embeddings().weight.numel()
        for module in filter(is_experts, model.modules()):
            experts = sum(weight.numel() for weight in module.parameters())
            idle += experts - experts * text.num_experts_per_tok // module.num_experts
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        values = getattr(text, "v_head_dim", None) or head
        keys = getattr(text, "qk_head_dim", None) or head
        width = text.num_attention_heads * (keys + values)
        return cls(2 * total, total - idle, text.num_hidden_layers, width)

    def seconds(self, work: CellWork, batch: int, machine: GpuAssumptions) -> float:
        """Return the seconds of a cell on one GPU.

        A batch takes the time of its multiplications, of reading the weights, or of starting its
        kernels, whichever is longest; so does each step of generating.
        """
        batches = math.ceil(work.requests / batch)
        # Causal attention multiplies each token with half of the longest sequence, twice.
        flops = 2 * self.active + self.layers * self.width * work.longest
        reading = self.weights / (machine.bandwidth * machine.bandwidth_share)
        step = max(reading, self.layers * machine.layer_seconds)
        prompts = work.tokens * flops / (machine.flops * machine.compute_share)
        return max(prompts, batches * step) + work.new_tokens / batch * step


def grid_costs(scratch: Path, tokenizer: str | None, words: Sequence[str]) -> list[dict[str, Any]]:
    """Return what each model of each table would cost, JSON-ready.

    The tokens of all models are counted with one tokenizer.

    Args:
        scratch: A directory for configurations.
        tokenizer: The tokenizer, as of :class:`Checkpoint`.
        words: Where the documents are, as for ``capmoe-eval run``.
    """
    sources = [word for word in words if word.startswith("data.")]
    rows = []
    checkpoints: dict[str, Checkpoint] = {}
    for table in TABLES:
        cells = plans(composed([f"experiment={table}", "profile=paper", *sources]))
        for name in dict.fromkeys(plan.cell.model.name for plan in cells):
            say(f"rehearsal: counting {table}, {name}")
            if name not in checkpoints:
                checkpoints[name] = Checkpoint(name, scratch / f"whole-{name}", tokenizer)
            of_model = [plan for plan in cells if plan.cell.model.name == name]
            counted = next(iter(checkpoints.values())).model
            rows.append({"table": table, **_of_model(of_model, checkpoints[name], counted)})
    return rows


def _of_model(
    planned: Sequence[CellPlan], checkpoint: Checkpoint, counted: ModelId
) -> dict[str, Any]:
    """Return the cost of the cells of one model; tokens are those of the model ``counted``."""
    planned = with_documents([_of(plan, counted) for plan in planned])
    counter, sizes = WorkCounter(planned), Sizes.of(checkpoint)
    seconds, batch, tokens, new = [], 0, 0, 0
    for plan in planned:
        work = counter.work(plan)
        seconds.append(sizes.seconds(work, sequences(plan), H100))
        batch = max(batch, counter.batch(_of(plan, checkpoint.model), work))
        tokens, new = tokens + work.tokens, new + work.new_tokens
    gpus = math.ceil((sizes.weights + batch) / H100.memory)
    return {
        "model": checkpoint.model.name,
        "cells": len(planned),
        "tokens": tokens,
        "new_tokens": new,
        "active": sizes.active,
        "weights": sizes.weights,
        "batch": batch,
        "gpus": gpus,  # that the model is spread over; they work in turn
        "gpu_hours": gpus * sum(seconds) / 3600,
        "longest_cell_hours": max(seconds) / 3600,
    }


def _of(plan: CellPlan, model: ModelId) -> CellPlan:
    return dataclasses.replace(plan, cell=dataclasses.replace(plan.cell, model=model))
