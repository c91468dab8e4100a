"""The folder of each extension can be removed; what remains works, and says what it lacks."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import capmoe_eval.extensions
from capmoe_eval.experiment.files import write_bytes
from capmoe_eval.experiment.packs import record_bytes
from capmoe_eval.experiment.results import record_paths
from capmoe_eval.routing.registry import create_method, knobs, method_names, placements
from tests.nightly import nightly_but

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "capmoe_eval"
NAMES = [part.name for part in pkgutil.iter_modules(capmoe_eval.extensions.__path__) if part.ispkg]
# Names of records of an extension that is no method.
RECORDS = {"adaptive_gamma": "*-adaptive*", "eplb_placement": "*-eplb-*"}
TASK = "obqa"

REMAINS = """
import json, sys, warnings
from capmoe_eval import load_frame
from capmoe_eval.routing.registry import create_method, knobs, method_names, placements
missing = json.loads(sys.argv[1])
seen = {"methods": method_names(), "knobs": list(knobs()), "placements": list(placements())}
seen["torch"] = "torch" in sys.modules
seen["refused"] = []
for settings in missing:
    try:
        create_method(**settings)
    except ValueError as error:
        seen["refused"].append(str(error))
with warnings.catch_warnings(record=True) as warned:
    seen["records"] = len(load_frame("results/zoo"))
seen["warnings"] = [str(each.message) for each in warned]
print(json.dumps(seen))
"""


def test_nothing_imports_an_extension_but_itself() -> None:
    """A package of an extension is imported by its name, from the folder alone."""
    imports = 0
    for path in PACKAGE.rglob("*.py"):
        package = path.relative_to(PACKAGE).parts[:2]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                words = module.split(".")
                if words[:2] == ["capmoe_eval", "extensions"] and words[2:3] in [
                    [n] for n in NAMES
                ]:
                    assert package == ("extensions", words[2]), f"{path} imports {module}"
                    imports += 1
    assert imports > len(NAMES)


def without(name: str | None, root: Path) -> None:
    """Make a copy of the checkout by links, without an extension; without any for None."""
    package = root / "capmoe_eval"
    (package / "extensions").mkdir(parents=True)
    for folder, into in ((PACKAGE, package), (PACKAGE / "extensions", package / "extensions")):
        for path in folder.iterdir():
            gone = path.name == name or (name is None and path.name in NAMES)
            if path.name not in ("extensions", "__pycache__") and not (into != package and gone):
                (into / path.name).symlink_to(path)
    for folder_name in ("conf", "hydra_plugins"):
        (root / folder_name).symlink_to(ROOT / folder_name)


def copy_records(pattern: str, root: Path) -> int:
    """Copy some committed records, and return their number."""
    paths = record_paths(ROOT / "results" / "zoo", task=TASK)
    records = [path for path in paths if path.match(f"{pattern}.json")][:5]
    for record in records:
        write_bytes(root / record.relative_to(ROOT), record_bytes(record))
    return len(records)


def run(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="reads committed records")
@pytest.mark.parametrize("name", nightly_but(("eplb_placement", "sere"), NAMES))
def test_what_remains_lacks_it_alone(name: str, tmp_path: Path) -> None:
    without(name, tmp_path)
    others = copy_records("baseline-*", tmp_path)
    left_out = copy_records(RECORDS.get(name, f"{name}-*"), tmp_path)
    missing: list[dict[str, Any]] = [{"name": name, "gamma": 1.0}]
    if name == "adaptive_gamma":
        missing = [{"name": "score", "gamma": "adaptive"}]
    if name == "eplb_placement":
        missing = [{"name": "score", "gamma": 1.0, "placement": "eplb"}]
    done = run(tmp_path, "-c", REMAINS, json.dumps(missing))
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    gone = {*method_names()} - {*seen["methods"]}
    assert gone == ({name} & {*method_names()})
    assert {*seen["methods"]} <= {*method_names()}
    unknown = {*knobs()} - {*seen["knobs"]}
    assert {*placements()} - {*seen["placements"]} == ({"eplb"} if "eplb" in name else set())
    assert gone or unknown or "eplb" in name, "nothing of the extension was removed"
    assert len(seen["refused"]) == 1
    assert "\n" not in seen["refused"][0]
    assert not seen["torch"]
    assert seen["records"] == others > 0
    if left_out:
        assert len(seen["warnings"]) == 1
        assert f"({left_out})" in seen["warnings"][0]
    # Of the command line: what is left is in the help, and a knob that is not is refused.
    word = sorted(unknown)[0] if unknown else None
    if word is not None:
        refused = run(tmp_path, "-m", "capmoe_eval", "method=score", f"{word}=1")
        assert refused.returncode == 2, refused.stderr
        assert refused.stderr.count("\n") == 1, refused.stderr
        assert refused.stderr.startswith(f"error: key={word}: ")


@pytest.mark.slow
def test_a_cell_runs_without_any_extension(tmp_path: Path) -> None:
    without(None, tmp_path)
    usage = run(tmp_path, "-m", "capmoe_eval", "run", "--help")
    assert usage.returncode == 0
    assert "token_reroute" in usage.stdout
    assert not [name for name in NAMES if re.search(rf"\b{name}\b", usage.stdout)]
    words = ("gamma=1.0", "method=score", "model=tiny_olmoe", f"tasks={TASK}", "limit=2")
    done = run(tmp_path, "-m", "capmoe_eval", *words)
    assert done.returncode == 0, done.stderr
    assert "1 computed, 0 finished before, 0 failed" in done.stdout
    table = run(tmp_path, "-m", "capmoe_eval", "table", "table1", "profile=tiny")
    assert table.returncode == 0, table.stderr
    assert "Score" in table.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but(("eplb_placement", "sere"), NAMES))
def test_a_cell_runs_without_each(name: str, tmp_path: Path) -> None:
    without(name, tmp_path)
    others = [
        other
        for other in method_names()
        if other != name and create_method(other, 1.0).modality_setting is None  # no images here
    ]
    words = ("gamma=1.0", f"method={','.join(others)}", "model=tiny_olmoe", f"tasks={TASK}")
    done = run(tmp_path, "-m", "capmoe_eval", "-m", *words, "limit=2", "ep_size=1")
    assert done.returncode == 0, done.stderr
