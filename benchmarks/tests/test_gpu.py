"""The list of what a GPU must show, rehearsed: it runs, goes on, and can find something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import bench_runs
import pytest
import torch
from capmoe_bench.timings import Spread, Target, read_evaluation, read_study, targets
from capmoe_eval.routing.decision import Assignment
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.session import capacity_aware
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.satellites import NEEDS_METHODS
from tests.wrapper.models import make

from capmoe_benchmarks import checks, gpu
from capmoe_benchmarks.checks import STOCK, host_waits
from capmoe_benchmarks.gpu import GpuSetting

FEW = ("decision", "waits", "study-breakdown", "training")
INSTALLED = ("torch", "transformers", "safetensors", "numpy", "pydantic")
"""The packages that docs/how-to/gpu.md tells a person to install."""
_RUN = """
import sys
sys.modules.update(dict.fromkeys({absent}, None))  # as if they were not installed
from capmoe_benchmarks.options import BENCHMARKS
from capmoe_bench.benchmarks import main
from capmoe_bench.benchmarks import benchmarks
for words in {commands}:
    try:
        main([*words, "--out", "bench"], benchmarks() | vars(BENCHMARKS))
    except SystemExit as done:
        assert not done.code, words
"""


def bench(out: Path, *words: str) -> tuple[int, dict[str, Any]]:
    return bench_runs.bench(out, "gpu", *words)


def absent_modules() -> list[str]:
    """The modules of all packages but INSTALLED, what they require, and this repository's."""
    names, needed = list(INSTALLED), set()
    while names:
        if (name := canonicalize_name(names.pop())) in needed:
            continue
        needed.add(name)
        with suppress(PackageNotFoundError):  # such as NVIDIA's, which torch for a CPU lacks
            lines = map(Requirement, requires(name) or [])
            names += [r.name for r in lines if not r.marker or r.marker.evaluate({"extra": ""})]
    return [
        module
        for module, packages in packages_distributions().items()
        if needed.isdisjoint(map(canonicalize_name, packages)) and not module.startswith("capmoe")
    ]


@pytest.mark.nightly
def test_it_runs_where_torch_transformers_and_pydantic_are_alone(tmp_path: Path) -> None:
    """From the start of the command to a file that is read."""
    absent = absent_modules()
    assert {"hydra", "lm_eval", "datasets", "pandas", "scipy", "PIL"} <= {*absent}
    commands = [["gpu", "--items", *FEW], bench_runs.QUICK]
    script = _RUN.format(absent=absent, commands=commands)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    done = run([sys.executable, "-c", script], env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    content = read_evaluation(tmp_path / "bench" / "gpu.json")
    assert content["rehearsal"] == gpu.REHEARSAL
    assert gpu.REHEARSAL in done.stdout
    states = {name: item["state"] for name, item in content["items"].items()}
    assert states == dict.fromkeys(FEW, "done")
    assert all(target.target is None for target in targets(content))  # none is met or missed
    # A study's file, too, is read in the full environment.
    (path,) = (tmp_path / "bench").glob("ep-*.json")
    assert len(read_study(path))


def counted(ran: list[str], name: str, wait: float = 0.0) -> Any:
    def measure(_setting: GpuSetting) -> tuple[list[Target], dict[str, Any]]:
        ran.append(name)
        time.sleep(wait)
        return [Target(name, "what", Spread.of([1.0]), 2.0)], {}

    return measure


def test_a_cut_run_loses_one_item_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    killed = True

    def cut(_setting: GpuSetting) -> Any:
        ran.append("cut")
        if killed:
            raise KeyboardInterrupt  # as SIGTERM does
        return counted([], "cut")(_setting)

    def broken(_setting: GpuSetting) -> Any:
        ran.append("broken")
        raise RuntimeError("CUDA out of memory")

    items = {
        "first": (counted(ran, "first"), 9),
        "slow": (counted(ran, "slow", 3.0), 1),
        "broken": (broken, 9),
        "cut": (cut, 9),
        "last": (counted(ran, "last"), 9),
    }
    monkeypatch.setattr(gpu, "ITEMS", items)
    status, content = bench(tmp_path)
    assert status == 130
    assert ran == ["first", "slow", "broken", "cut"]
    states = {name: item["state"] for name, item in content["items"].items()}
    assert states == {"first": "done", "slow": "skipped", "broken": "failed"}
    assert "longer than 1 s" in content["items"]["slow"]["why"]
    assert "CUDA out of memory" in content["items"]["broken"]["why"]
    ran.clear()
    killed = False
    items["slow"] = counted(ran, "slow"), 9
    status, content = bench(tmp_path)
    assert status == 0
    assert ran == ["cut", "last", "slow", "broken"]  # what was given up goes last
    assert set(content["items"]) == set(items)
    # Another torch, another code: nothing of before is true.
    ran.clear()
    content["key"]["torch"] = "1.0"
    (tmp_path / "gpu.json").write_text(json.dumps(content))
    bench(tmp_path, "--items", "last")
    assert ran == ["last"]
    _, content = bench(tmp_path, "--items", "first")
    assert list(content["items"]) == ["first", "last"]


def test_a_rehearsal_replaces_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "ITEMS", {"first": (counted([], "first"), 9)})
    _, content = bench(tmp_path)
    (tmp_path / "gpu.json").write_text(json.dumps(content | {"rehearsal": None}))
    assert bench(tmp_path)[0] == 2
    assert "from a GPU" in capsys.readouterr().err
    (tmp_path / "gpu.json").write_text("{")
    assert bench_runs.status("gpu", "--out", str(tmp_path)) == 2
    assert bench(tmp_path, "--fresh")[0] == 0
    assert bench(tmp_path, "--items", "frist")[0] == 2
    assert "did you mean 'first'" in capsys.readouterr().err


def test_a_device_that_decides_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second decision is the device's: there the first kept pair is lost."""
    calls, decided = 0, checks.decided

    def unlike(*args: Any, **kwargs: Any) -> Assignment:
        nonlocal calls
        calls += 1
        made = decided(*args, **kwargs)
        if calls % 3 == 1:  # the CPU's, before those from the same scores and the same logits
            return made
        keep_TS = made.keep_TS.clone()
        keep_TS.view(-1)[keep_TS.view(-1).nonzero()[0]] = False
        return replace(made, keep_TS=keep_TS)

    compare = partial(checks.measure, torch.device("cpu"), torch.bfloat16, families=("qwen3_moe",))
    assert [target.met for target in compare()[0]] == [True] * 4
    monkeypatch.setattr(checks, "decided", unlike)
    reached, more = compare()
    assert [target.met for target in reached] == [False, False, True, True]
    n_decisions = 3 * len(checks._METHODS)  # layers
    assert [target.ratio.median for target in reached][:2] == [n_decisions, n_decisions]
    assert len(more["faults"]) == 2 * n_decisions


IN_LAYER = {
    "baseline": {},
    # Its rounds end early on a CPU alone.
    "token_reroute": {"wrapper/hook.py": 1, "routing/methods/token_reroute.py": 3},
}
METHODS = [*IN_LAYER, "score", "random", "expert_drop", "expanded_drop"]
METHODS += [pytest.param(name, marks=NEEDS_METHODS) for name in ("oea", "xshare")]


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_waits_once_for_its_device(method: str) -> None:
    """Whatever the number of layers, a forward waits for its mask and for its checks once."""
    model = make("olmoe")
    tokens_BS = torch.arange(96).view(4, 24)
    mask_BS = torch.ones_like(tokens_BS)
    mask_BS[1::2, 17:] = 0

    @torch.no_grad()
    def forward() -> None:
        model(input_ids=tokens_BS, attention_mask=mask_BS, use_cache=False)

    under = create_method(method, 1.0, ep_size=2)
    with capacity_aware(model, under, verify=False) as meter:
        meter.examine_nothing()  # a forward that is compared with the definition waits more often
        forward()
        waits = host_waits(forward, torch.device("cpu"))
    n_layers = len(meter.layers)
    assert n_layers > 1
    del waits[STOCK]
    places = Counter(line.partition(":")[0] for line in waits.elements())
    # The groups' two are of a mask that the plan has brought to the host.
    expected = {"wrapper/plan.py": 1, "wrapper/meter.py": 1, "routing/decision.py": 2}
    for place, times in IN_LAYER.get(method, {"wrapper/hook.py": 1}).items():
        expected[place] = n_layers * times
    assert places == expected


def test_waits_are_counted() -> None:
    values = torch.arange(6.0)

    def work() -> None:
        bool(values.any()), values.tolist(), float(values[1]), values.nonzero()  # 4
        values[values > 2] = 0  # a size that depends on values
        torch.tensor([1], device=values.device)  # copied, and waited for
        values[torch.tensor([1, 2])].sum()  # none

    assert host_waits(work, values.device).total() == 6
