"""Tutorials and examples run as they stand: their blocks or cells, in their order."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from capmoe_eval import load_frame
from capmoe_eval.zoo.tiny import tiny_model, tiny_tokenizer
from pages import DOCS, ROOT
from tests.nightly import nightly_but
from tests.records import planned

TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(path: Path, *kinds: str) -> list[tuple[str, str]]:
    """Return the code blocks of some kinds, in their order."""
    texts = _BLOCK.findall(path.read_text(encoding="utf-8"))
    return [(kind, text) for kind, text in texts if kind in kinds]


def execute(script: str, folder: Path) -> str:
    """Run a script of bash with this environment's tools; return what it prints."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": tools, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    command, pipe = ["bash", "-c", script], subprocess.PIPE
    done = subprocess.run(command, cwd=folder, env=environment, stdout=pipe, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory that is like a checkout for who reads it, and takes what is written."""
    (tmp_path / "capmoe_eval").symlink_to(ROOT / "capmoe_eval")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "zoo").symlink_to(ROOT / "results" / "zoo")
    return tmp_path


@pytest.mark.nightly
def test_a_task_of_ones_own_runs_under_a_capacity(folder: Path) -> None:
    page = DOCS / "how-to" / "evaluate.md"
    text = dict(blocks(page, "yaml", "json", "sh", "python"))
    (folder / "my_tasks").mkdir()
    (folder / "my_tasks" / "my_animals.yaml").write_text(text["yaml"], encoding="utf-8")
    (folder / "my_tasks" / "animals.jsonl").write_text(20 * text["json"], encoding="utf-8")
    tokenizer = tiny_tokenizer()
    tiny_model("olmoe", vocab_size=len(tokenizer)).save_pretrained(folder / "mine")
    tokenizer.save_pretrained(folder / "mine")
    script = text["sh"].replace("/models/mine", str(folder / "mine"))
    printed = execute(f"set -eu\n{script}", folder)
    (record,) = (folder / "results" / "mine" / "mine" / "my_animals").glob("*.json")
    part = json.loads(record.read_text(encoding="utf-8"))["capmoe"]
    assert part["n"] == 20
    assert part["proofs"]["bound_holds"]["passed"]
    assert f"{record.stem}.json" in printed


RUNNABLE = [path for path in TUTORIALS if path.name != "own_method.md"]
"""``tests/routing/test_own_method.py`` runs the other."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", nightly_but(("own_model", "server_log"), [path.stem for path in RUNNABLE])
)
def test_a_tutorial_runs(name: str, folder: Path) -> None:
    steps = blocks(DOCS / "tutorials" / f"{name}.md", "sh", "python")
    assert len(steps) >= 3
    script = ["set -euo pipefail"]
    for number, (kind, text) in enumerate(steps):
        if kind == "python":
            (folder / f"step{number}.py").write_text(text, encoding="utf-8")
        script.append(f"python step{number}.py" if kind == "python" else text)
    execute("\n".join(script), folder)


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(script: Path, folder: Path) -> None:
    printed = execute(f"python {script}", folder)
    assert len(re.findall(r"\d\.\d", printed)) >= 4, printed


def test_methods_are_compared_on_whole_tasks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compare = runpy.run_path(str(ROOT / "examples" / "compare_methods.py"))["main"]
    whole = load_frame(str(ROOT / "results" / "zoo"))
    limited = whole.assign(limit=4, value=0.0)
    printed = set()
    for cells in (whole, pd.concat([whole, limited], ignore_index=True)):
        monkeypatch.setitem(compare.__globals__, "load_frame", lambda _, cells=cells: cells)
        compare()
        printed.add(capsys.readouterr().out)
    assert len(printed) == 1
    monkeypatch.setitem(compare.__globals__, "load_frame", lambda _: limited)
    with pytest.raises(SystemExit, match="no task has all of these cells without a limit"):
        compare()


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_is_kept_without_outputs(notebook: Path, folder: Path) -> None:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 4
    assert not any(cell.get("outputs") for cell in cells)
    script = folder / "cells.py"
    script.write_text("\n\n".join(code) + "\nassert len(front) >= 2\n", encoding="utf-8")
    execute("python cells.py", folder)
    assert (folder / "front.png").stat().st_size > 10_000


def commands(text: str) -> list[list[str]]:
    """Return the keys of each ``capmoe-eval run`` and ``sweep``, and of its module, in a script."""
    asked = r"""(?:capmoe-eval (?:run|sweep)|-m capmoe_eval) ([^"\n]*)"""
    keys = re.findall(asked, text.replace("\\\n", " "))
    return [[word for word in shlex.split(line, comments=True) if "=" in word] for line in keys]


def test_the_commands_of_a_cluster_are_ones_that_plan() -> None:
    """What needs GPUs, SLURM or the hub is composed and planned, not run."""
    page = (DOCS / "how-to" / "clusters.md").read_text(encoding="utf-8")
    asked = commands("\n".join(line for line in page.splitlines() if line.startswith("    ")))
    assert len(asked) >= 9
    for words in asked:
        keys = [word for word in words if not word.startswith(("hydra", "grid."))]
        assert planned(*keys, "plan=true"), words
