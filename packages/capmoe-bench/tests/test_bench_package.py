"""The package as the suite sees it: its entry point, and what others declare for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
from capmoe_eval import beside
from capmoe_eval.beside import BESIDE
from capmoe_eval.errors import UsageError
from tests.project import read_toml

import capmoe_bench
from capmoe_bench.benchmarks import main
from capmoe_bench.commands import BENCH

DECLARED = read_toml(Path(capmoe_bench.__file__).parents[1] / "pyproject.toml")["project"][
    "entry-points"
]
_MODULE = """
from capmoe_bench.benchmarks import Benchmark

SPEED = Benchmark("my_speed", "How fast it is.", "In words.", {"--size": {"type": "COUNT"}})

def run(options):
    print("measured:", options.size)
"""


def test_the_suite_names_the_subcommand_and_it_is_there() -> None:
    commands = DECLARED["capmoe_eval.commands"]
    assert BESIDE["capmoe-bench"] == set(commands)
    for value in commands.values():
        assert callable(resolve_name(resolve_name(value).function))


def test_help_and_names_import_no_torch() -> None:
    code = (
        "import sys; from capmoe_bench.commands import BENCH; light = set(sys.modules);"
        "print('pydantic' in light, 'ep' in BENCH.names(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False True False\n"


def test_another_package_brings_a_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_speed.py").write_text(_MODULE)
    info = tmp_path / "my_speed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-speed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[capmoe_eval.benchmarks]\nspeed = my_speed:SPEED\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "speed" in BENCH.names()
    with pytest.raises(SystemExit) as ended:
        main(["speed", "--size", "7"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "measured: 7\n"


def test_what_an_absent_package_brings_says_which_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beside, "BESIDE", {"my-package": {"bench speed"}})
    with pytest.raises(UsageError, match=r"^bench speed: my-package is not installed; pip install"):
        main(["speed"])
