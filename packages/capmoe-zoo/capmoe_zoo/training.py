"""Take the steps of a training, with checkpoints from which a killed one continues."""

import functools
import time
from collections.abc import Callable
from pathlib import Path

import torch
from capmoe_eval.experiment.files import whole_file
from torch import Tensor, nn

say = functools.partial(print, flush=True)


def take_steps(
    trained: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[int], Tensor],
    steps: int,
    *,
    rate_at: Callable[[int], float],
    checkpoint: Path,
    every: int = 200,
    say: Callable[[str], None] = say,
) -> list[float]:
    """Train in place, with gradients of norm 1 at most.

    Args:
        trained: What is saved: all that the training changes but the optimizer.
        optimizer: Of its parameters; a group may have a ``share`` of the learning rate.
        loss_of: Returns the loss of a step, by the step's number alone.
        steps: Number of all steps.
        rate_at: Returns the learning rate of a step.
        checkpoint: File of the state; it is read if it exists, and written whole every ``every``
            steps and at the end.
        every: Steps between checkpoints and between progress lines.
        say: Takes progress lines.

    Returns:
        The loss of every step, those before a resumption included.
    """
    losses: list[float] = []
    if checkpoint.is_file():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        trained.load_state_dict(state["trained"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]
        say(f"resumed at step {len(losses)}")
    started, first = time.perf_counter(), len(losses)
    for done in range(first + 1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(done - 1) * group.get("share", 1.0)
        loss = loss_of(done - 1)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if done % every == 0 or done == steps:
            recent = losses[-every:]
            seconds = (time.perf_counter() - started) / (done - first)
            mean = sum(recent) / len(recent)
            say(f"step {done}/{steps}  loss {mean:.4f}  {seconds:.2f} s a step")
            with whole_file(checkpoint) as file:
                state = {"trained": trained.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"losses": losses}, file)
    return losses
