"""What must stay light stays light, and what must not be imported is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "lm_eval", "datasets", "pandas", "matplotlib")


@pytest.mark.parametrize(
    "module",
    [
        "capmoe_eval",
        "capmoe_eval.__main__",
        "capmoe_eval.experiment.timings",
        "capmoe_eval.tables",
        "capmoe_eval.claims",
        "capmoe_eval.figures",
        "capmoe_eval.loads",
        "capmoe_eval.report.adaptive",
        "capmoe_eval.advise",
        "capmoe_eval.site",
        "capmoe_eval.replication",
        "capmoe_eval.experiment.record",
        "capmoe_eval.bench.__main__",
        "hydra_plugins.capmoe_launcher.launcher",
    ],
)
def test_it_starts_without_the_heavy_libraries(module: str) -> None:
    code = f"import {module}, sys; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
