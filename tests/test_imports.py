"""What must stay light stays light, and what must not be imported is not."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec

from tests.project import run

HEAVY = ("torch", "transformers", "lm_eval", "datasets", "pandas", "matplotlib")
# The modules of packages that commands import before they know what is asked.
OF_PACKAGES = {
    "capmoe_bench": ("commands", "benchmarks"),
    "capmoe_benchmarks": ("options",),
    "capmoe_methods": (
        *("adaptive_gamma", "eplb_placement", "laser", "macs", "oea", "sere", "xshare"),
    ),
    "capmoe_report": ("commands", "claims", "export", "replicate", "report"),
    "capmoe_serve": (
        *("commands", "bench", "backend", "recording", "loads", "advise"),
        *("readers.formats", "server.plugin"),
    ),
    "capmoe_zoo": ("commands", "worlds"),
}
# One process imports them in this order: what may import less comes first.
LIGHT = {
    "capmoe_eval": (*HEAVY, "numpy", "hydra", "omegaconf", "pydantic"),
    "capmoe_eval.report": (*HEAVY, "numpy", "hydra"),
    # What the commands import first, so that Ctrl-C and a missing package find them prepared.
    "capmoe_eval.__main__": (*HEAVY, "numpy", "hydra", "omegaconf", "pydantic", "yaml"),
    "capmoe_bench.timings": (*HEAVY, "numpy", "hydra", "omegaconf"),
    "capmoe_eval.report.tables.command": (*HEAVY, "numpy"),
    "capmoe_eval.evaluation.run_command": HEAVY,
    "capmoe_eval.evaluation.run": HEAVY,
    "capmoe_eval.evaluation.forecast": HEAVY,
    "capmoe_eval.report.figures.command": HEAVY,
    "capmoe_eval.experiment.record": HEAVY,
    "hydra_plugins.capmoe_sweeper": HEAVY,
    **{
        f"{package}.{module}": (*HEAVY, "vllm")
        for package, modules in OF_PACKAGES.items()
        if find_spec(package)
        for module in modules
    },
}


def test_what_is_light_starts_without_the_heavy_libraries() -> None:
    code = (
        "import importlib, json, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        "    print(json.dumps([module, list(sys.modules)]))\n"
    )
    done = run(sys.executable, "-c", code, *LIGHT)
    assert not done.returncode, done.stderr
    imported = {module: {*names} for module, names in map(json.loads, done.stdout.splitlines())}
    heavy = {module: {*names} & imported[module] for module, names in LIGHT.items()}
    assert {module: names for module, names in heavy.items() if names} == {}
