"""Train a tiny model on the mini-world: plain AdamW on the model's own loss.

``capmoe-eval train <name>`` runs it. Checkpoints are written at intervals, whole or
not at all; a killed training continues from the last one and ends with the same weights.

A dense model is upcycled into a Mixture-of-Experts model in one of two ways. As in Mixtral, every
expert is a copy of the dense MLP. As in Qwen1.5-MoE, the shared expert is a part of the MLP, and
each other part goes to several routed experts. Noise makes the copies different.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from capmoe_eval.experiment.files import whole_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from capmoe_zoo.embedded.batch import NumberedBatches
from capmoe_zoo.embedded.loss import Middle, batch_loss

# Sorts tokens by expert; on a CPU it trains 1.2 times as fast as the loop over experts.
TRAINING_KERNEL = "grouped_mm"


@dataclass(frozen=True)
class Schedule:
    """The steps and learning rates of a training."""

    steps: int
    rate: float = 3e-3  # the highest, after ``warmup`` steps
    warmup: int = 100  # steps of linear rise; a cosine then falls to a fiftieth of ``rate``
    decay: float = 0.05  # AdamW's weight decay of matrices
    clip: float = 1.0  # largest norm of the gradient
    aux: float = 0.0  # coefficient of the auxiliary loss that balances the routers
    middle: int | None = None  # the layer after which states have labels, too; 0: before the first
    classes: int = 0  # number of the classes among these labels
    restart: int = 0  # the step at which the rate rises and falls a second time; 0 for never

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step."""
        start, end = (0, self.restart) if step < self.restart else (self.restart, self.steps)
        step, steps = step - start, end - start
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, steps - self.warmup)
        return self.rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def train(
    model: PreTrainedModel,
    batches: NumberedBatches,
    schedule: Schedule,
    *,
    checkpoint: Path | None = None,
    every: int = 200,
    first: int = 0,
    say: Callable[[str], None] = print,
) -> list[float]:
    """Train a model in place.

    Args:
        model: A causal language model in float32.
        batches: The training data.
        schedule: Steps and learning rates.
        checkpoint: File of the state; it is read if it exists, and written every ``every`` steps
            and at the end. None for no checkpoint.
        every: Steps between checkpoints and between progress lines.
        first: Number of the first batch; an upcycled model begins after those of its dense model.
        say: Takes progress lines.

    Returns:
        The loss of every step, those before a resumption included.
    """
    middle = None
    if schedule.middle is not None:
        middle = Middle(model, schedule.middle, schedule.classes)
    trained = nn.ModuleDict({"model": model} | ({"middle": middle} if middle else {}))
    optimizer = _optimizer(trained, schedule)
    losses: list[float] = []
    if checkpoint is not None and checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True)
        trained.load_state_dict(state["trained"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]
        say(f"resumed at step {len(losses)}")
    _kernel(model, TRAINING_KERNEL)
    model.train()
    started, counted = time.perf_counter(), 0
    for step in range(len(losses), schedule.steps):
        batch = batches[first + step].on(model.device)
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate_at(step)
        loss = batch_loss(model, batch, schedule.aux, middle)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained.parameters(), schedule.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        counted += batch.input_ids_BS.numel()
        done = step + 1
        if done % every == 0 or done == schedule.steps:
            seconds = time.perf_counter() - started
            recent = losses[-every:]
            say(
                f"step {done}/{schedule.steps}  loss {sum(recent) / len(recent):.4f}  "
                f"{counted / seconds:.0f} tokens/s"
            )
            if checkpoint is not None:
                with whole_file(checkpoint) as file:
                    state = {"trained": trained.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state | {"losses": losses}, file)
    _kernel(model, "eager")
    model.eval()
    return losses


def _optimizer(model: nn.Module, schedule: Schedule) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups: Iterable[dict[str, Any]] = (
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": schedule.decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    )
    return torch.optim.AdamW(groups, lr=schedule.rate, betas=(0.9, 0.95), fused=True)


def _kernel(model: PreTrainedModel, name: str) -> None:
    """Set the experts' kernel of a model; do nothing for a dense one."""
    if any(hasattr(module, "num_experts") for module in model.modules()):
        # The decoder: a class with a tower takes none.
        model.get_decoder().set_experts_implementation(name)


# Shape suffixes: E experts, I width of an expert, D width of the dense MLP, H hidden size.


def upcycle(dense: PreTrainedModel, sparse: PreTrainedModel, *, noise: float, seed: int) -> None:
    """Copy a dense model into a Mixture-of-Experts model, in place.

    Attention, norms and embeddings are copied where both models have them. Routers and parameters
    that the dense model lacks (Qwen's biases and the gate of the shared expert) stay unchanged.

    Args:
        dense: A model whose layers have ``mlp.gate_proj``, ``mlp.up_proj`` and ``mlp.down_proj``.
        sparse: A model with as many layers of the same hidden size; the widths of its shared expert
            (if any) and of one or more whole experts add up to the dense width.
        noise: Standard deviation of the noise relative to that of the experts' weights.
        seed: Seed of the noise.

    Raises:
        ValueError: If the widths do not fit.
    """
    source, target = dense.state_dict(), sparse.state_dict()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in target.items():
            if name in source and source[name].shape == weight.shape:
                weight.copy_(source[name])
        for layer in range(dense.config.num_hidden_layers):
            mlp = f"model.layers.{layer}.mlp"
            gate_DH, up_DH, down_HD = (
                source[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up", "down")
            )
            shared = target.get(f"{mlp}.shared_expert.gate_proj.weight")
            cut = 0 if shared is None else len(shared)
            if shared is not None:
                prefix = f"{mlp}.shared_expert"
                target[f"{prefix}.gate_proj.weight"].copy_(gate_DH[:cut])
                target[f"{prefix}.up_proj.weight"].copy_(up_DH[:cut])
                # Doubled, because an untrained sigmoid gate is about one half.
                target[f"{prefix}.down_proj.weight"].copy_(2 * down_HD[:, :cut])
            gate_up_EIH = target[f"{mlp}.experts.gate_up_proj"]
            down_EHI = target[f"{mlp}.experts.down_proj"]
            n_experts, width = down_EHI.shape[0], down_EHI.shape[2]
            parts, rest = divmod(len(gate_DH) - cut, width)
            if rest or parts < 1:
                raise ValueError(f"dense width {len(gate_DH)} is not {cut} and parts of {width}")
            for expert in range(n_experts):
                start = cut + expert % parts * width
                rows = slice(start, start + width)
                gate_up_IH = torch.cat([gate_DH[rows], up_DH[rows]])
                gate_up_EIH[expert].copy_(_noisy(gate_up_IH, noise, generator))
                down_EHI[expert].copy_(_noisy(down_HD[:, rows], noise, generator))


def _noisy(weight: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    return weight + noise * weight.std() * torch.randn(weight.shape, generator=generator)
