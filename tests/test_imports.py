"""What must stay light stays light, and what must not be imported is not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "lm_eval", "datasets", "pandas", "matplotlib")
# One process imports them in this order: what may import less comes first.
LIGHT = {
    "capmoe_eval": (*HEAVY, "numpy", "hydra", "omegaconf", "pydantic"),
    "capmoe_eval.experiment.timings": (*HEAVY, "numpy", "hydra", "omegaconf", "pydantic"),
    "capmoe_eval.report": (*HEAVY, "numpy", "hydra"),
    "capmoe_eval.tables": (*HEAVY, "numpy"),
    "capmoe_eval.__main__": HEAVY,
    "capmoe_eval.claims": HEAVY,
    "capmoe_eval.figures": HEAVY,
    "capmoe_eval.loads": HEAVY,
    "capmoe_eval.report.adaptive": HEAVY,
    "capmoe_eval.advise": HEAVY,
    "capmoe_eval.site": HEAVY,
    "capmoe_eval.replication": HEAVY,
    "capmoe_eval.experiment.record": HEAVY,
    "capmoe_eval.bench.__main__": HEAVY,
    "hydra_plugins.capmoe_launcher.launcher": HEAVY,
}


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """All that is imported after each of these modules."""
    code = (
        "import importlib, json, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        "    print(json.dumps(list(sys.modules)))\n"
    )
    words = [sys.executable, "-c", code, *LIGHT]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return dict(zip(LIGHT, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("module", LIGHT)
def test_it_starts_without_the_heavy_libraries(module: str, imported: dict[str, list[str]]) -> None:
    assert not set(LIGHT[module]) & set(imported[module])
