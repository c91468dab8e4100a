"""The examples run as they stand, the notebook's cells in their order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pages import ROOT

FOLDER = ROOT / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory that is like a checkout for who reads it, and takes what is written."""
    (tmp_path / "capmoe_eval").symlink_to(ROOT / "capmoe_eval")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "zoo").symlink_to(ROOT / "results" / "zoo")
    return tmp_path


def run(script: Path, place: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_runs(script: Path, place: Path) -> None:
    assert len(run(script, place).splitlines()) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_is_kept_without_outputs(notebook: Path, place: Path) -> None:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 4
    assert not any(cell.get("outputs") for cell in cells)
    script = place / "cells.py"
    script.write_text("\n\n".join(code) + "\nassert len(front) >= 2\n", encoding="utf-8")
    run(script, place)
    assert (place / "front.png").stat().st_size > 10_000
