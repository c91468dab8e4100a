"""Benchmark `gpu`: run the list of what a GPU must show, and go on where it was cut off."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import capmoe_bench
import capmoe_eval
import torch
import transformers
from capmoe_bench.rounds import (
    device_and_dtype,
    dtype_name,
    measured_on,
    say,
    write_evaluation,
)
from capmoe_bench.timings import Target, targets
from capmoe_eval.errors import UsageError, check_choice, kind_and_place
from capmoe_eval.evaluation.provenance import revision

import capmoe_benchmarks
from capmoe_benchmarks.gpu.items import ITEMS, GpuSetting, Measured

REHEARSAL = "rehearsal, no figure of this is about a GPU"
_SCALE = 32  # of a rehearsal

Results = dict[str, dict[str, Any]]
"""The state of each item, and if it is done, its targets and more."""


class _TimeUp(BaseException):
    """An item takes too long; no handler of errors may take this for one of its own."""


def run(arguments: argparse.Namespace) -> None:
    """Run the items that are not done, each written when it ends, to ``gpu.json``."""
    device, dtype = device_and_dtype(arguments)
    for name in arguments.items or ():
        check_choice("--items", name, ITEMS)
    rehearsal = None if device.type == "cuda" else REHEARSAL
    scale = arguments.scale or (_SCALE if rehearsal else 1)
    if rehearsal and scale == 1:
        raise UsageError("scale=1: the full sizes need a GPU; leave it out for a rehearsal")
    path, setting = arguments.out / "gpu.json", GpuSetting(device, dtype, scale, arguments.out)
    machine = measured_on(device)["machine"]
    key = {"device": machine["name"], "torch": machine["torch"], "code": _sources()}
    key["scale"] = scale
    results = {} if arguments.fresh else _finished(path, key, rehearsal)
    asked = [name for name in ITEMS if name in (arguments.items or ITEMS)]
    # What was given up once goes last.
    todo = sorted(
        (name for name in asked if results.get(name, {}).get("state") != "done"),
        key=lambda name: name in results,
    )
    for number, name in enumerate(todo):
        say(f"gpu: {name}, {number + 1} of {len(todo)}, at most {ITEMS[name][1]} s")
        results[name] = result = _measured(*ITEMS[name], setting, goals=not rehearsal)
        results = {name: results[name] for name in ITEMS if name in results}
        done = sum(result["state"] == "done" for result in results.values())
        reached = [target for name, of in results.items() for target in _targets(name, of)]
        share = Target.of(
            "items that are done", "Share of the list", [done / len(ITEMS)], unit="share"
        )
        more: dict[str, Any] = {"key": key, "software": _software(setting), "items": results}
        write_evaluation(path, "gpu", device, [share, *reached], rehearsal=rehearsal, **more)
        for target in _targets(name, result):
            print(target.line(), flush=True)
        if result["state"] != "done":
            say(f"gpu: {name} {result['state']}: {result['why']}")
    done = sum(result["state"] == "done" for result in results.values())
    print(f"{done} of {len(ITEMS)} items are done; written: {path}")
    if rehearsal:
        print(rehearsal)


def _finished(path: Path, key: Mapping[str, Any], rehearsal: str | None) -> Results:
    """Return the items of a file that are still true: of this device, torch and code."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
        written, results, was_rehearsal = content["key"], content["items"], content["rehearsal"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: not a whole file ({error}); remove it, or say --fresh"
        ) from error
    if rehearsal and not was_rehearsal:
        raise UsageError(
            f"out={path.parent}: its gpu.json is from a GPU, and a rehearsal would replace it; "
            "choose another --out"
        )
    return dict(results) if written == key else {}


def _targets(name: str, result: Mapping[str, Any]) -> list[Target]:
    """Return the targets of an item, with its name."""
    reached = targets({"targets": [], **result})
    return [replace(target, name=f"{name}: {target.name}") for target in reached]


def _measured(
    measure: Callable[[GpuSetting], Measured], limit: int, setting: GpuSetting, *, goals: bool
) -> dict[str, Any]:
    """Return an item's result: ``done``, ``skipped``, or ``failed``; its targets with their goals.

    A rehearsal has none: nothing is met or missed there.
    """
    began = time.perf_counter()
    try:
        with _limit(limit):
            reached, more = measure(setting)
        if not goals:
            reached = [replace(target, target=None) for target in reached]
        result = {"state": "done", "targets": [target.fields() for target in reached], **more}
    except _TimeUp:
        result = {"state": "skipped", "why": f"it took longer than {limit} s"}
    except ModuleNotFoundError as error:
        result = {"state": "skipped", "why": f"{error.name} is not installed here"}
    except Exception as error:  # of one item: the others may still show something
        result = {"state": "failed", "why": kind_and_place(error)}
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    spent = round(time.perf_counter() - began, 1)
    return {**result, "spent": spent, "date": measured_on(setting.device)["date"]}


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Give a block up after so many seconds."""

    def stop(_number: int, _frame: object) -> None:
        raise _TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _sources() -> str:
    """Return a name of the code as it is, of the suite and of the benchmarks."""
    digest = hashlib.sha256()
    for package in (capmoe_eval, capmoe_bench, capmoe_benchmarks):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return f"sources {digest.hexdigest()[:12]}"


def _software(setting: GpuSetting) -> dict[str, Any]:
    """Return what the numbers may depend on besides the device: driver, CUDA and versions."""
    driver = None
    if setting.device.type == "cuda":
        query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader || echo unknown"
        driver = subprocess.getoutput(query).splitlines()[-1]
    return {
        "driver": driver,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "dtype": dtype_name(setting.dtype),
        "commit": revision(),
    }
