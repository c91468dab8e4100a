"""Where a benchmark runs: device, precision, and the line that says what it is doing."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from capmoe_eval.checks import choice
from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.experiment.arguments import PATH
from capmoe_eval.experiment.configuration import options
from capmoe_eval.experiment.processes import process_rank
from capmoe_eval.experiment.schema import DTYPES
from capmoe_eval.experiment.timings.names import FOLDER

if TYPE_CHECKING:
    import torch

    from capmoe_eval.experiment.timings.file import Machine


def add_where(parser: argparse.ArgumentParser) -> None:
    """Declare the options that every benchmark on a device has."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--dtype", default=None, help=f"{', '.join(DTYPES)} (CPU: the first)")
    add_out(parser)


def add_out(parser: argparse.ArgumentParser) -> None:
    """Declare where the result goes."""
    parser.add_argument("--out", type=PATH, default=FOLDER, help="directory of the JSON file")


def check_names(model: str, tasks: Sequence[str]) -> None:
    """Refuse a model or a task that the configuration does not have.

    Raises:
        UsageError: With the closest one.
    """
    choice(*options("model"))("--model", model)
    for task in tasks:
        choice(*options("tasks"))("--tasks", task)


def device_of(name: str) -> torch.device:
    """Return the device of that name; under torchrun this process's own.

    Raises:
        UsageError: If it cannot be used here.
    """
    import torch

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
    import torch

    chosen = name or ("bfloat16" if device.type == "cuda" else "float32")
    if chosen not in DTYPES:
        raise bad_choice("dtype", chosen, DTYPES)
    dtype: torch.dtype = getattr(torch, chosen)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return what :func:`dtype_of` takes."""
    return str(dtype).removeprefix("torch.")


def machine(device: torch.device) -> Machine:
    """Return what the numbers were measured on."""
    import torch

    from capmoe_eval.experiment.timings.file import Machine

    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.processor()
    return Machine(
        device=device.type,
        name=name or platform.machine(),
        torch=str(torch.__version__),
        threads=torch.get_num_threads(),
    )


def now() -> str:
    """Return the time, ISO 8601, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def say(text: str) -> None:
    """Say on standard error what runs now; of several processes the first speaks."""
    if not process_rank():
        print(text, file=sys.stderr, flush=True)
