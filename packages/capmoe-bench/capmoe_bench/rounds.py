"""Measure computations in turn on a device; print and write their ratios beside their targets."""

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from capmoe_eval.errors import UsageError, check_choice, writing
from capmoe_eval.evaluation.provenance import described
from capmoe_eval.experiment.cell import DTYPES
from capmoe_eval.experiment.files import write_text
from capmoe_eval.experiment.processes import process_rank

from capmoe_bench.timings import EVALUATION_SCHEMA, Spread, Target

CPU = torch.device("cpu")
_Spent = TypeVar("_Spent")


def device_and_dtype(arguments: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """Return the device and the precision that were asked for, or those that suit this machine.

    Under torchrun a GPU is this process's own. What cannot be used here is a UsageError.
    """
    name = arguments.device
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
    dtype = arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    check_choice("dtype", dtype, DTYPES)
    return device, getattr(torch, dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a precision, as ``--dtype`` takes it."""
    return str(dtype).removeprefix("torch.")


def measured_on(device: torch.device) -> dict[str, Any]:
    """Return the date (ISO 8601, UTC) and the machine, as the fields of a file."""
    machine = {
        "device": device.type,
        "name": described(device)["name"],
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
    }
    now = datetime.datetime.now(datetime.UTC)
    return {"date": now.isoformat(timespec="seconds"), "machine": machine}


def say(text: str) -> None:
    """Say on standard error what runs now; of several processes the first speaks."""
    if not process_rank():
        print(text, file=sys.stderr, flush=True)


def wait(device: torch.device) -> None:
    """Wait until a device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that some work takes on a device, until it has finished."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


def alternate(
    sides: Mapping[str, Callable[[], _Spent]], *, rounds: int, warmup: int = 2, title: str = ""
) -> dict[str, list[_Spent]]:
    """Run every side once in each round, so that what disturbs the machine disturbs all.

    Each round begins with another side; those of ``warmup`` do not count. With a title, every round
    is announced. Returns what each side returned, such as the seconds it took, round by round.
    """
    spent: dict[str, list[_Spent]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(warmup + rounds):
        if title:
            say(f"{title}: round {number + 1} of {warmup + rounds}")
        first = number % len(names)
        for name in names[first:] + names[:first]:
            cost = sides[name]()
            if number >= warmup:
                spent[name].append(cost)
    return spent


def ratio(numerator: list[float], denominator: list[float]) -> Spread:
    """Return the ratio within each round, as median and quartiles."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])


def write_evaluation(
    path: Path, command: str, device: torch.device, targets: Sequence[Target], **more: Any
) -> None:
    """Write the file of a benchmark: targets, and further fields as they are."""
    content = {"schema": EVALUATION_SCHEMA, "command": command, **measured_on(device), **more}
    content["targets"] = [target.fields() for target in targets]
    write_file(path, content, sort_keys=True)


def write_file(path: Path, content: Mapping[str, Any], *, sort_keys: bool = False) -> None:
    """Write the file of a benchmark whole; an UnwritableError if that fails."""
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys)
    with writing("--out", path.parent):
        write_text(path, text + "\n")


def finish(
    arguments: argparse.Namespace,
    device: torch.device,
    targets: Sequence[Target],
    options: Sequence[str] = (),
    **more: Any,
) -> None:
    """Print a line for each target and write ``<command>.json``, with options and further fields.

    A target that is missed is a finding, not an error: the file says so.
    """
    path = arguments.out / f"{arguments.command}.json"
    more |= {name: getattr(arguments, name) for name in options}
    write_evaluation(path, arguments.command, device, targets, **more)
    width = max((len(target.name) for target in targets), default=0)
    print(*(target.line(width) for target in targets), f"written: {path}", sep="\n")
