"""``docs/tutorials/own_method.md``: its code runs, by an entry point and on the command line."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from capmoe_eval.evaluation import provenance
from capmoe_eval.evaluation.provenance import method_source
from capmoe_eval.routing import registry
from capmoe_eval.routing.registry import ENTRY_POINTS, create_method

PAGE = (Path(__file__).parents[2] / "docs/tutorials/own_method.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
METHOD, USE, DEFINITION = PYTHON
FRAME = """
from capmoe_eval import load_frame
frame = load_frame("results/local-tiny")
print(frame[["task", "method", "gamma", "order_weight"]])
"""

CHECKED = """
import json, torch
from my_methods import ScoreAndOrder
from capmoe_eval import capacity_aware
from capmoe_eval.routing.method import Method
from tests.wrapper.models import batch, make
model, tokens = make("olmoe"), batch(n_sequences=4, n_positions=6)

def run(*method, **knobs):
    with capacity_aware(model, *method, gamma=0.5, **knobs) as meter, torch.no_grad():
        logits = model(tokens).logits
    proofs = meter.report()["proofs"].items()
    return logits, {name: [proof["passed"], proof.get("why")] for name, proof in proofs}

parts = [run("score_and_order", order_weight=weight)[0] for weight in (0.0, 0.3, 1.0)]
assert torch.equal(parts[0], run("score")[0]) and torch.equal(parts[2], run("order")[0])
assert not torch.equal(parts[1], parts[0]) and not torch.equal(parts[1], parts[2])
checked = run("score_and_order", order_weight=0.3)[1]
ScoreAndOrder.kept_pairs = Method.kept_pairs  # as without a definition
print(json.dumps({"checked": checked, "open": run("score_and_order", order_weight=0.4)[1]}))
"""


def install(folder: Path, *parts: str) -> None:
    """Write the module of the page, and the files of a package that has its entry point."""
    (folder / "my_methods.py").write_text("\n".join(parts), encoding="utf-8")
    declared = re.search(r'\[project\.entry-points\."(.*)"\]\n(\w+) = "(\w+)"', PAGE)
    assert declared is not None
    group, name, module = declared.groups()
    assert group == ENTRY_POINTS
    info = folder / "my_methods-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-methods\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}\n")


def run(folder: Path, *words: str, status: int = 0) -> str:
    """Return what a command prints; its error where it is to fail."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{root}"}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


ANOTHER = """
from dataclasses import dataclass
from typing import ClassVar
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import register

@register
@dataclass(frozen=True, kw_only=True)
class Even(Method):
    name: ClassVar[str] = "even"
    title: ClassVar[str] = "Even"
    source: ClassVar[str] = "a test"
"""
LIST = """
import sys
from capmoe_eval.experiment.application import run_program
from capmoe_eval.routing.registry import method_names
run_program(lambda: print(method_names()[-1], 'torch' in sys.modules))
"""


def test_an_entry_point_registers_a_users_method(tmp_path: Path) -> None:
    install(tmp_path, ANOTHER)
    assert run(tmp_path, "-c", LIST) == "even False\n"


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (ANOTHER.replace('"even"', '"score"'), "Even: TokenDrop has the name 'score' already"),
        ("raise RuntimeError('two\\nlines')", "two"),
    ],
)
def test_an_entry_point_that_fails_is_one_line(tmp_path: Path, module: str, reason: str) -> None:
    install(tmp_path, module)
    (line,) = run(tmp_path, "-c", LIST, status=2).splitlines()
    assert f"my_methods cannot be loaded ({reason}); mend that package, or uninstall it" in line


@pytest.mark.slow
def test_the_method_is_what_the_page_says_and_is_checked(tmp_path: Path) -> None:
    """Token Drop at one end, Order at the other; compared with its definition if it has one."""
    install(tmp_path, METHOD, DEFINITION)
    proofs = json.loads(run(tmp_path, "-c", CHECKED))
    of_definition = {"pairs_as_defined", "weights_as_defined"}
    assert not [name for name, (passed, _) in proofs["checked"].items() if passed is False]
    for name, (passed, why) in proofs["open"].items():
        if name in of_definition:
            assert passed is None
            assert "no definition" in why
            assert proofs["checked"][name][0] is True
        else:
            assert passed == proofs["checked"][name][0]
    assert proofs["open"]["bound_holds"][0]
    assert proofs["open"]["stock_at_infinity"][0]


@pytest.mark.nightly
def test_the_commands_of_the_page_run_it_and_show_it(tmp_path: Path) -> None:
    install(tmp_path, METHOD, DEFINITION)
    command = re.search(r"^capmoe-eval (run method=score_and_order .*)$", PAGE, re.MULTILINE)
    assert command is not None
    printed = run(tmp_path, "-m", "capmoe_eval", *command[1].split())
    assert "score_and_order-g1-ep8-order_weight0.3" in printed
    assert "1 computed, 0 finished before, 0 failed" in printed
    row = run(tmp_path, "-c", FRAME).splitlines()[-1].split()
    assert row[1:5] == ["obqa", "score_and_order", "1.0", "0.3"]
    command = re.search(r"^capmoe-eval (table table2 .*)'(grid.*)'$", PAGE, re.MULTILINE)
    assert command is not None
    words = [*command[1].split(), command[2], "model=tiny_olmoe", "limit=4"]
    table = run(tmp_path, "-m", "capmoe_eval", *words, "gamma=1.0", "order_weight=0.3")
    assert re.search(r"\| Score and order γ=1 † \| \d", table)


@pytest.mark.nightly
def test_a_record_is_of_the_code_of_its_method(tmp_path: Path) -> None:
    words = ["-m", "capmoe_eval", "sweep", "method=score,score_and_order", "gamma=1.0"]
    words += ["model=tiny_olmoe", "tasks=obqa", "limit=2", "results_dir=results"]
    install(tmp_path, METHOD)
    assert "2 computed" in run(tmp_path, *words)
    assert "2 finished before" in run(tmp_path, *words)
    install(tmp_path, METHOD.replace("1 - torch.arange", "2 - torch.arange"))
    (line,) = run(tmp_path, *words, status=2).splitlines()
    (path,) = tmp_path.glob("results/*/*/score_and_order-*.json")
    assert line.startswith(f"error: results/{path.relative_to(tmp_path / 'results')}: ")
    assert "by other code of method score_and_order" in line
    assert "overwrite=true" in line
    assert "2 computed" in run(tmp_path, *words, "overwrite=true")
    assert "2 finished before" in run(tmp_path, *words)
    (builtin,) = tmp_path.glob("results/*/*/score-g*.json")
    assert "method_source" not in builtin.read_text(encoding="utf-8")


def test_the_code_of_a_method_is_its_module_or_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "METHODS", dict(registry.METHODS))
    sources = set()
    for name, helper in (("alone", ""), ("packed.method", "A = 1"), ("packet.method", "A = 2")):
        file = tmp_path / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(METHOD, encoding="utf-8")
        if helper:
            (file.parent / "helper.py").write_text(helper, encoding="utf-8")
        registry.METHODS.pop("score_and_order", None)
        method = importlib.import_module(name).ScoreAndOrder(gamma=1.0)
        sources.add(method_source(method))
        registry.knobs.cache_clear()
    assert len(sources - {None}) == 3
    for name in registry.method_names():
        if name != "score_and_order":
            of_suite = registry.METHODS[name].__module__.startswith("capmoe_eval.")
            assert (method_source(create_method(name, 1.0)) is None) == of_suite


@pytest.mark.parametrize(
    "imported", ["import torch, my_helper", "from my_helper import x; import torch"]
)
def test_the_code_of_a_method_has_the_modules_beside_it_that_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "METHODS", dict(registry.METHODS))
    monkeypatch.delitem(sys.modules, "with_a_helper", raising=False)
    text = METHOD.replace("import torch", imported)
    (tmp_path / "with_a_helper.py").write_text(text, encoding="utf-8")
    method = importlib.import_module("with_a_helper").ScoreAndOrder(gamma=1.0)
    registry.knobs.cache_clear()
    sources = []
    files = ("my_helper", "import deeper"), ("deeper", "A = 1"), ("deeper", "A = 2"), ("other", "")
    for name, content in files:
        (tmp_path / f"{name}.py").write_text(content, encoding="utf-8")
        provenance._hash_modules.cache_clear()
        sources.append(method_source(method))
    assert len(set(sources)) == 3  # "other" is not imported
    assert sources[-1] == sources[-2]


def test_a_knob_with_the_name_of_a_key_is_refused(tmp_path: Path) -> None:
    install(tmp_path, METHOD.replace("order_weight:", "threads:"))
    words = ("-m", "capmoe_eval", "run", "method=score_and_order", "model=tiny_olmoe", "plan=true")
    (line,) = run(tmp_path, *words, status=2).splitlines()
    assert line == (
        "error: threads: this knob of method score_and_order has the name of a key of "
        "conf/config.yaml; give the knob another name"
    )
