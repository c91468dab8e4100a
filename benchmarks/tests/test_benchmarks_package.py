"""The package as the suite sees it: its entry points, and what the suite names of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from capmoe_eval.beside import BESIDE
from tests.project import read_toml

import capmoe_benchmarks
from capmoe_benchmarks.options import BENCHMARKS

FOLDER = Path(capmoe_benchmarks.__file__).parent


def test_the_suite_names_all_that_it_brings() -> None:
    assert BESIDE["capmoe-benchmarks"] == {f"bench {name}" for name in vars(BENCHMARKS)}


def test_every_benchmark_is_an_entry_point() -> None:
    declared = read_toml(FOLDER.parent / "pyproject.toml")["project"]["entry-points"]
    path = "capmoe_benchmarks.options:BENCHMARKS"
    assert declared == {"capmoe_eval.benchmarks": {n: f"{path}.{n}" for n in vars(BENCHMARKS)}}


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from capmoe_bench.benchmarks import benchmarks; names = benchmarks();"
        "print('gpu' in names, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"
