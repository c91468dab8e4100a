"""The items of the list, in the order of their worth; each is short, and stands for itself."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from capmoe_bench import decision
from capmoe_bench.ep.benchmark import plan, time_study
from capmoe_bench.ep.layer import LayerSetting, find_shape
from capmoe_bench.ep.links import emulated_link
from capmoe_bench.ep.skew import skewed_model
from capmoe_bench.ep.studies import find_studies
from capmoe_bench.rounds import timed, write_file
from capmoe_bench.timings import STUDIES, Spread, Target
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.session import capacity_aware

from capmoe_benchmarks import wrapper
from capmoe_benchmarks.gpu import checks
from capmoe_benchmarks.gpu.checks import STOCK, host_waits
from capmoe_benchmarks.options import RANKS

Measured = tuple[list[Target], dict[str, Any]]
"""The targets of an item, and what else was measured, JSON-ready."""

_SIDES = {
    **wrapper.FORWARD,
    f"token_reroute, γ=1, {RANKS} ranks": (
        create_method("token_reroute", 1.0, ep_size=RANKS),
        "dropped pairs go to other experts",
        0.95,
    ),
}
_PEAK = 4.0
_DECISION = ("olmoe", "qwen3_30b", "mixtral")  # 64, 128 and 8 experts
_TRAINED = "olmoe"


@dataclass(frozen=True)
class GpuSetting:
    """The device, and how much smaller than the list's all sizes are."""

    device: torch.device
    dtype: torch.dtype
    scale: int  # divides widths, prompts and numbers of layers; 1 on a GPU
    out: Path  # folder of the files

    def less(self, size: int, least: int = 1) -> int:
        """Return a size divided by the scale."""
        return max(least, size // self.scale)

    def layer(self, name: str = "olmoe") -> LayerSetting:
        """Return a layer on one rank, with its widths divided."""
        shape = find_shape(name).scaled(self.scale)
        return LayerSetting(shape, 1, self.device, self.dtype)

    def sizes(self, batch: int, prompt: int) -> dict[str, Any]:
        """Return the sizes of OLMoE-1B-7B with skewed routers, beside its layers' widths."""
        return {
            **{"layers": self.less(16, 2), "vocabulary": self.less(50304, 16)},
            **{"head": self.less(128, 16), "peak": _PEAK},
            **{"batch": self.less(batch, RANKS), "prompt": self.less(prompt, 8)},
        }

    @property
    def rounds(self) -> dict[str, int]:
        """Rounds and warm-up rounds of a comparison."""
        return {"rounds": 7, "warmup": 2} if self.scale == 1 else {"rounds": 1, "warmup": 1}


def _decisions(dtype: torch.dtype, setting: GpuSetting) -> Measured:
    return checks.measure(setting.device, dtype)


def _forward(batch: int, prompt: int, setting: GpuSetting) -> Measured:
    arguments = argparse.Namespace(**setting.sizes(batch, prompt), **setting.rounds)
    targets, more = wrapper.measure_forward(arguments, setting.layer(), sides=_SIDES)
    return targets, {**more, **vars(arguments)}


def _decision(setting: GpuSetting) -> Measured:
    arguments = argparse.Namespace(
        tokens=RANKS * setting.less(16384 // RANKS),
        ranks=RANKS,
        layer_tokens=None,
        layer_rounds=3,
        rounds=setting.rounds["rounds"],
    )
    layers = [setting.layer(name) for name in _DECISION]
    targets, more = decision.measure(arguments, layers)
    return targets, {**more, **vars(arguments)}


@torch.no_grad()
def _waits(setting: GpuSetting) -> Measured:
    """Count the waits of a padded batch, on a model of a few layers."""
    layers = 4
    model, tokens_BS, _ = skewed_model(
        setting.layer(), layers=layers, batch=RANKS, prompt=setting.less(512, 8), peak=_PEAK
    )
    mask_BS = torch.ones_like(tokens_BS)
    mask_BS[1::2, -3:] = 0

    def run() -> None:
        model(input_ids=tokens_BS, attention_mask=mask_BS, use_cache=False)

    run()
    stock = host_waits(run, setting.device).total()
    targets, lines = [], {}
    for name, (method, _, _) in _SIDES.items():
        with capacity_aware(model, method, verify=False) as meter:
            meter.examine_nothing()  # as most forwards of a long run
            run()  # what is made once is not counted
            waits = host_waits(run, setting.device)
        lines[name] = dict(sorted(waits.items()))
        targets.append(
            Target.of(
                f"waits: {name}",
                f"Times that a forward of {layers} MoE layers makes the host wait for its device, "
                f"beside the stock model's {stock}",
                [float(waits.total() - waits[STOCK])],
                at_most=1.0,
                unit="waits",
            )
        )
    return targets, {"stock": stock, "lines": lines, "layers": layers}


def _study(name: str, setting: GpuSetting) -> Measured:
    """Time a study on emulated ranks, and write its file beside, as ``bench ep`` does."""
    full = setting.scale == 1
    divisor = 32 if full else 16 * setting.scale**2
    (study,) = find_studies(name, scale=setting.scale, batch_divisor=divisor)
    arguments = argparse.Namespace(
        repeats=5 if full else 1,
        warmup=1 if full else 0,
        validate=False,
        **dict.fromkeys(("machine", "bandwidth", "latency")),
    )
    link = emulated_link(arguments, setting.device)
    jobs = plan(study, Path("results/zoo"), setting.device, setting.dtype)
    file = time_study(study, jobs, link, arguments)
    more: dict[str, Any] = {"place": study.place, "note": file["note"], "link": str(link)}
    if full:  # a rehearsal's would stand among the figures
        path = setting.out / f"ep-{name}-emulated-gpu.json"
        write_file(path, file)
        more["file"] = path.name
    return _speedups(file), more


def _speedups(file: Mapping[str, Any]) -> list[Target]:
    """Return the speedup of each run's last point under the least γ; and its rise with the batch.

    All others are in the study's own file.
    """
    targets = []
    for run in file["runs"]:
        name = f"{file['study']}: {run['model']}, {run['ranks']} ranks"
        last = run["points"][-1]["timings"][-1]
        what = (
            f"EMULATED speedup of one layer over dropless, {run['ranks']} ranks, {last['method']}"
        )
        targets.append(Target.of(name, what, Spread(**last["speedup"])))
        if file["study"] == "workload":
            by_size = sorted(run["points"], key=lambda point: point["tokens_per_rank"])
            fewest, *_, most = (of["timings"][-1]["speedup"]["median"] for of in by_size)
            what = "The same of the batch with most tokens over that with fewest (Table 10: a rise)"
            targets.append(Target.of(f"{name}, rise", what, [most / fewest], at_least=1.0))
    return targets


def _training(setting: GpuSetting) -> Measured:
    """Time some steps of a recipe, without those in which everything is made."""
    from capmoe_zoo.embedded.train import build, recipe

    first, last = (20, 300) if setting.scale == 1 else (1, 2)
    seconds = []
    for steps in (first, last):
        with tempfile.TemporaryDirectory() as work:
            chosen = recipe(_TRAINED, steps=steps)
            train = partial(build, _TRAINED, chosen, Path(work), say=lambda _line: None)
            seconds.append(timed(partial(train, device=setting.device), setting.device))
    each = (seconds[1] - seconds[0]) / (last - first)
    steps = recipe(_TRAINED).steps
    target = Target.of(
        f"training of {_TRAINED}",
        f"EXTRAPOLATED minutes of the recipe's {steps} steps, from steps {first} to {last}",
        [each * steps / 60],
        unit="min",
    )
    return [target], {"seconds": seconds, "steps": [first, last], "seconds_per_step": each}


def _generate(setting: GpuSetting) -> Measured:
    rounds = {"rounds": 3, "warmup": 1} if setting.scale == 1 else setting.rounds
    sizes = setting.sizes(16, 512)
    arguments = argparse.Namespace(**sizes, new=setting.less(64, 2), **rounds)
    model, tokens_BS, _ = skewed_model(setting.layer(), **sizes)
    targets, more = wrapper.measure_generate(arguments, {"olmoe": (model, tokens_BS)})
    made = arguments.batch * arguments.new
    rates = {
        side: made / Spread.of(spent).median for side, spent in more["seconds"]["olmoe"].items()
    }
    return targets, {**more, **vars(arguments), "tokens_per_second": rates}


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
