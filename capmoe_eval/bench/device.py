"""Device and precision of a benchmark, and the line that says what runs now."""

from __future__ import annotations

import os
import platform
import sys

import torch

from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.experiment.processes import process_rank
from capmoe_eval.experiment.schema import DTYPES
from capmoe_eval.experiment.timings.schema import Machine

CPU = torch.device("cpu")


def device_of(name: str) -> torch.device:
    """Return the device of that name; under torchrun this process's own.

    Raises:
        UsageError: If it cannot be used here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device={name}: not usable here; choose auto, cpu or cuda") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def dtype_of(name: str | None, device: torch.device) -> torch.dtype:
    """Return the precision of that name; without one, what the device is used with.

    Raises:
        UsageError: If there is none of that name.
    """
    chosen = name or ("bfloat16" if device.type == "cuda" else "float32")
    if chosen not in DTYPES:
        raise bad_choice("dtype", chosen, DTYPES)
    dtype: torch.dtype = getattr(torch, chosen)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that :func:`dtype_of` takes."""
    return str(dtype).removeprefix("torch.")


def machine(device: torch.device) -> Machine:
    """Return the machine that the numbers are measured on."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.processor()
    return Machine(
        device=device.type,
        name=name or platform.machine(),
        torch=str(torch.__version__),
        threads=torch.get_num_threads(),
    )


def say(text: str) -> None:
    """Say on standard error what runs now; of several processes the first speaks."""
    if not process_rank():
        print(text, file=sys.stderr, flush=True)
