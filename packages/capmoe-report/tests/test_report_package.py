"""The package as the suite sees it: its entry points, and what they import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from capmoe_eval.__main__ import subcommands
from capmoe_eval.beside import BESIDE
from tests.project import read_toml
from tests.test_imports import HEAVY

import capmoe_report

DECLARED = read_toml(Path(capmoe_report.__file__).parents[1] / "pyproject.toml")["project"][
    "entry-points"
]["capmoe_eval.commands"]


def test_the_suite_names_all_that_it_brings() -> None:
    assert BESIDE["capmoe-report"] == {*DECLARED}
    assert DECLARED.keys() < subcommands().keys()


@pytest.mark.parametrize("module", ["commands", "claims", "replicate", "report"])
def test_it_starts_without_the_heavy_libraries(module: str) -> None:
    code = f"import sys, capmoe_report.{module}; print({{*{HEAVY}}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
