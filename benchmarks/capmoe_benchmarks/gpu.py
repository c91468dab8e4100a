"""Benchmark `gpu`: run the list of what a GPU must show, and go on where it was cut off."""

import argparse
import gc
import hashlib
import json
import platform
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import capmoe_bench
import capmoe_eval
import torch
import transformers
from capmoe_bench import decision, rounds
from capmoe_bench.ep.benchmark import StudyTimer, plan
from capmoe_bench.ep.layer import LayerSetting, find_shape
from capmoe_bench.ep.links import emulated_link
from capmoe_bench.ep.skew import skewed_model
from capmoe_bench.ep.studies import find_studies
from capmoe_bench.timings import STUDIES, Spread, Target, targets
from capmoe_eval.errors import UsageError, check_choice, kind_and_place
from capmoe_eval.evaluation.provenance import revision
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.session import capacity_aware

import capmoe_benchmarks
from capmoe_benchmarks import checks, wrapper
from capmoe_benchmarks.options import RANKS

REHEARSAL = "rehearsal, no figure of this is about a GPU"
_SCALE = 32  # of a rehearsal
_REROUTE = create_method("token_reroute", 1.0, ep_size=RANKS)
_SIDES = {
    **wrapper.FORWARD,
    f"token_reroute, γ=1, {RANKS} ranks": (_REROUTE, "dropped pairs go to other experts", 0.95),
}
_PEAK = 4.0
_DECISION = ("olmoe", "qwen3_30b", "mixtral")  # 64, 128 and 8 experts
_TRAINED = "olmoe"

Measured = tuple[list[Target], dict[str, Any]]
"""The targets of an item, and what else was measured, JSON-ready."""
Results = dict[str, dict[str, Any]]
"""The state of each item, and if it is done, its targets and more."""


class _TimeUp(BaseException):
    """An item takes too long; no handler of errors may take this for one of its own."""


@dataclass(frozen=True)
class GpuSetting:
    """The device, and how much smaller than the list's all sizes are."""

    device: torch.device
    dtype: torch.dtype
    scale: int  # divides widths, prompts and numbers of layers; 1 on a GPU
    out: Path  # folder of the files

    @property
    def is_full(self) -> bool:
        """Whether all sizes are those of the list."""
        return self.scale == 1

    def less(self, size: int, least: int = 1) -> int:
        """Return a size divided by the scale."""
        return max(least, size // self.scale)

    def layer(self, name: str = "olmoe") -> LayerSetting:
        """Return a layer on one rank, with its widths divided."""
        return LayerSetting(find_shape(name).scaled(self.scale), 1, self.device, self.dtype)

    def sizes(self, batch: int, prompt: int) -> dict[str, Any]:
        """Return the sizes of OLMoE-1B-7B with skewed routers, beside its layers' widths."""
        return {
            **{"layers": self.less(16, 2), "vocabulary": self.less(50304, 16)},
            **{"head": self.less(128, 16), "peak": _PEAK},
            **{"batch": self.less(batch, RANKS), "prompt": self.less(prompt, 8)},
        }

    def rounds(self, measured: int, warmup: int) -> dict[str, int]:
        """Return the rounds of a comparison, and those before them: one of each in a rehearsal."""
        numbers = (measured, warmup) if self.is_full else (1, 1)
        return dict(zip(("rounds", "warmup"), numbers, strict=True))


def run(arguments: argparse.Namespace) -> None:
    """Run the items that are not done, each written when it ends, to ``gpu.json``."""
    device, dtype = rounds.device_and_dtype(arguments)
    for name in arguments.items or ():
        check_choice("--items", name, ITEMS)
    rehearsal = None if device.type == "cuda" else REHEARSAL
    scale = arguments.scale or (_SCALE if rehearsal else 1)
    if rehearsal and scale == 1:
        raise UsageError("scale=1: the full sizes need a GPU; leave it out for a rehearsal")
    path, setting = arguments.out / "gpu.json", GpuSetting(device, dtype, scale, arguments.out)
    machine = rounds.measured_on(device)["machine"]
    key = {"device": machine["name"], "torch": machine["torch"], "code": _sources()}
    key["scale"] = scale
    results = {} if arguments.fresh else _finished(path, key, rehearsal)
    asked = [name for name in ITEMS if name in (arguments.items or ITEMS)]
    todo = [name for name in asked if results.get(name, {}).get("state") != "done"]
    todo.sort(key=lambda name: name in results)  # what was given up once goes last
    for number, name in enumerate(todo):
        rounds.say(f"gpu: {name}, {number + 1} of {len(todo)}, at most {ITEMS[name][1]} s")
        results[name] = result = _measured(*ITEMS[name], setting, goals=not rehearsal)
        results = {name: results[name] for name in ITEMS if name in results}
        done = sum(result["state"] == "done" for result in results.values())
        share = Target.of(
            "items that are done", "Share of the list", [done / len(ITEMS)], unit="share"
        )
        reached = [target for name, of in results.items() for target in _targets(name, of)]
        more: dict[str, Any] = {"key": key, "software": _software(setting), "items": results}
        written = [share, *reached]
        rounds.write_evaluation(path, "gpu", device, written, rehearsal=rehearsal, **more)
        for target in _targets(name, result):
            print(target.line(), flush=True)
        if result["state"] != "done":
            rounds.say(f"gpu: {name} {result['state']}: {result['why']}")
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
    return {**result, "spent": spent, "date": rounds.measured_on(setting.device)["date"]}


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
        **{"driver": driver, "cuda": torch.version.cuda, "python": platform.python_version()},
        **{"transformers": transformers.__version__, "commit": revision()},
        "dtype": rounds.dtype_name(setting.dtype),
    }


# The items of the list; each is short, and stands for itself.


def _decisions(dtype: torch.dtype, setting: GpuSetting) -> Measured:
    return checks.measure(setting.device, dtype)


def _forward(batch: int, prompt: int, setting: GpuSetting) -> Measured:
    arguments = argparse.Namespace(**setting.sizes(batch, prompt), **setting.rounds(7, 2))
    reached, more = wrapper.measure_forward(arguments, setting.layer(), sides=_SIDES)
    return reached, {**more, **vars(arguments)}


def _decision(setting: GpuSetting) -> Measured:
    tokens, measured = RANKS * setting.less(16384 // RANKS), setting.rounds(7, 2)["rounds"]
    sizes = {"tokens": tokens, "ranks": RANKS, "layer_tokens": None, "layer_rounds": 3}
    arguments = argparse.Namespace(**sizes, rounds=measured)
    reached, more = decision.measure(arguments, [setting.layer(name) for name in _DECISION])
    return reached, {**more, **vars(arguments)}


@torch.no_grad()
def _waits(setting: GpuSetting) -> Measured:
    """Count the waits of a padded batch, on a model of a few layers."""
    layers, prompt = 4, setting.less(512, 8)
    model, tokens_BS, _ = skewed_model(
        setting.layer(), layers=layers, batch=RANKS, prompt=prompt, peak=_PEAK
    )
    mask_BS = torch.ones_like(tokens_BS)
    mask_BS[1::2, -3:] = 0
    forward = partial(model, input_ids=tokens_BS, attention_mask=mask_BS, use_cache=False)
    forward()
    stock = checks.host_waits(forward, setting.device).total()
    what = (
        f"Times that a forward of {layers} MoE layers makes the host wait for its device, beside "
        f"the stock model's {stock}"
    )
    reached, lines = [], {}
    for name, (method, _, _) in _SIDES.items():
        with capacity_aware(model, method, verify=False) as meter:
            meter.examine_nothing()  # as most forwards of a long run
            forward()  # what is made once is not counted
            waits = checks.host_waits(forward, setting.device)
        lines[name] = dict(sorted(waits.items()))
        ours = float(waits.total() - waits[checks.STOCK])
        reached.append(Target.of(f"waits: {name}", what, [ours], at_most=1.0, unit="waits"))
    return reached, {"stock": stock, "lines": lines, "layers": layers}


def _study(name: str, setting: GpuSetting) -> Measured:
    """Time a study on emulated ranks, and write its file beside, as ``bench ep`` does."""
    divisor = 32 if setting.is_full else 16 * setting.scale**2
    (study,) = find_studies(name, scale=setting.scale, batch_divisor=divisor)
    repeats, warmup = (5, 1) if setting.is_full else (1, 0)
    unstated = dict.fromkeys(("machine", "bandwidth", "latency"))
    arguments = argparse.Namespace(repeats=repeats, warmup=warmup, validate=False, **unstated)
    link = emulated_link(arguments, setting.device)
    jobs = plan(study, Path("results/zoo"), setting.device, setting.dtype)
    file = StudyTimer(study, arguments).file(jobs, link)
    more: dict[str, Any] = {"place": study.place, "note": file["note"], "link": str(link)}
    if setting.is_full:  # a rehearsal's would stand among the figures
        path = setting.out / f"ep-{name}-emulated-gpu.json"
        rounds.write_file(path, file)
        more["file"] = path.name
    return _speedups(file), more


def _speedups(file: Mapping[str, Any]) -> list[Target]:
    """Return the speedup of each run's last point under the least γ; and its rise with the batch.

    All others are in the study's own file.
    """
    reached = []
    for run in file["runs"]:
        name = f"{file['study']}: {run['model']}, {run['ranks']} ranks"
        last, layer = run["points"][-1]["timings"][-1], f"one layer over dropless, {run['ranks']}"
        what = f"EMULATED speedup of {layer} ranks, {last['method']}"
        reached.append(Target.of(name, what, Spread(**last["speedup"])))
        if file["study"] == "workload":
            by_size = sorted(run["points"], key=lambda point: point["tokens_per_rank"])
            fewest, *_, most = (of["timings"][-1]["speedup"]["median"] for of in by_size)
            what = "The same of the batch with most tokens over that with fewest (Table 10: a rise)"
            reached.append(Target.of(f"{name}, rise", what, [most / fewest], at_least=1.0))
    return reached


def _training(setting: GpuSetting) -> Measured:
    """Time some steps of a recipe, without those in which everything is made."""
    from capmoe_zoo.embedded.train import build, recipe

    first, last = (20, 300) if setting.is_full else (1, 2)
    seconds = []
    for steps in (first, last):
        with tempfile.TemporaryDirectory() as work, redirect_stdout(None):
            chosen = recipe(_TRAINED, steps=steps)
            train = partial(build, _TRAINED, chosen, Path(work))
            seconds.append(rounds.timed(partial(train, device=setting.device), setting.device))
    each = (seconds[1] - seconds[0]) / (last - first)
    steps = recipe(_TRAINED).steps
    what = f"EXTRAPOLATED minutes of the recipe's {steps} steps, from steps {first} to {last}"
    target = Target.of(f"training of {_TRAINED}", what, [each * steps / 60], unit="min")
    return [target], {"seconds": seconds, "steps": [first, last], "seconds_per_step": each}


def _generate(setting: GpuSetting) -> Measured:
    sizes = setting.sizes(16, 512)
    arguments = argparse.Namespace(**sizes, new=setting.less(64, 2), **setting.rounds(3, 1))
    model, tokens_BS, _ = skewed_model(setting.layer(), **sizes)
    reached, more = wrapper.measure_generate(arguments, {"olmoe": (model, tokens_BS)})
    made, spent = arguments.batch * arguments.new, more["seconds"]["olmoe"]
    rates = {side: made / Spread.of(seconds).median for side, seconds in spent.items()}
    return reached, {**more, **vars(arguments), "tokens_per_second": rates}


ITEMS: Final[Mapping[str, tuple[Callable[[GpuSetting], Measured], int]]] = {
    "decisions-float32": (partial(_decisions, torch.float32), 60),
    "decisions-bfloat16": (partial(_decisions, torch.bfloat16), 60),
    "forward-16x512": (partial(_forward, 16, 512), 120),
    "forward-64x128": (partial(_forward, 64, 128), 120),
    "decision": (_decision, 60),
    "waits": (_waits, 30),
    **{f"study-{name}": (partial(_study, name), 120) for name in STUDIES},
    "training": (_training, 90),
    "generate": (_generate, 90),
}
"""What each item measures and the seconds after which the item is given up, in the order of their
worth. All limits together are less than 25 minutes."""
