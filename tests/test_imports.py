"""What must stay light stays light, and what must not be imported is not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable

HEAVY = ("torch", "transformers", "lm_eval", "datasets", "pandas", "matplotlib")
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
}


def imported_after(modules: Iterable[str]) -> dict[str, set[str]]:
    """Return all that one process has imported after each of these modules."""
    code = (
        "import importlib, json, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        "    print(json.dumps([module, list(sys.modules)]))\n"
    )
    words = [sys.executable, "-c", code, *modules]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return {module: {*names} for module, names in map(json.loads, done.stdout.splitlines())}


def test_what_is_light_starts_without_the_heavy_libraries() -> None:
    imported = imported_after(LIGHT)
    heavy = {module: {*names} & imported[module] for module, names in LIGHT.items()}
    assert {module: names for module, names in heavy.items() if names} == {}
