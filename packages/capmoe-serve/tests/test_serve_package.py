"""The package as the suite sees it: its entry points, and what they import."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name

import pytest
from capmoe_bench.benchmarks import benchmarks
from capmoe_eval.__main__ import subcommands
from capmoe_eval.beside import BESIDE
from capmoe_eval.experiment.observation import observer_options
from tests.project import read_toml

import capmoe_serve

DECLARED = read_toml(Path(capmoe_serve.__file__).parents[1] / "pyproject.toml")["project"][
    "entry-points"
]
HEAVY = ("torch", "transformers", "lm_eval", "datasets", "pandas", "matplotlib", "vllm")


def test_the_suite_names_all_that_it_brings() -> None:
    brought = {
        *DECLARED["capmoe_eval.commands"],
        *(f"backend={name}" for name in DECLARED["capmoe_eval.backends"]),
        *(f"bench {name}" for name in DECLARED["capmoe_eval.benchmarks"]),
        *observer_options(),
    }
    assert BESIDE["capmoe-serve"] == brought
    assert DECLARED["capmoe_eval.commands"].keys() < subcommands().keys()
    assert DECLARED["capmoe_eval.benchmarks"].keys() < benchmarks().keys()


@pytest.mark.parametrize("group", DECLARED)
def test_every_entry_point_is_there(group: str) -> None:
    names = {entry.name: entry.value for entry in entry_points(group=group)}
    for name, value in DECLARED[group].items():
        assert names[name] == value
        assert resolve_name(value)


@pytest.mark.parametrize(
    "module",
    [
        "commands",
        "bench",
        "backend",
        "recording",
        "loads",
        "advise",
        "readers.formats",
        "server.plugin",
    ],
)
def test_it_starts_without_the_heavy_libraries(module: str) -> None:
    code = f"import sys, capmoe_serve.{module}; print({{*{HEAVY}}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
