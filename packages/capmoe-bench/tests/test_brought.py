"""What other packages declare as benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest
from capmoe_eval import beside
from capmoe_eval.errors import UsageError

from capmoe_bench.benchmarks import benchmarks, main

_MODULE = """
from capmoe_bench.benchmarks import Benchmark

SPEED = Benchmark("my_speed", "How fast it is.", "In words.", {"--size": {"type": "COUNT"}})

def run(options):
    print("measured:", options.size)
"""


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
    assert "speed" in benchmarks()
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
