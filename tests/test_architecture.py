"""Methods are told apart by their classes, and the page of the architecture names what is there."""

import ast
import json
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from capmoe_eval.routing.registry import method_names
from tests.project import run

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
MODULES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for package in ("capmoe_eval", "hydra_plugins")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def test_every_function_it_names_is_in_the_module_beside_it() -> None:
    named = re.findall(r"`([\w/]+\.py)`: `(\w+)`", PAGE)
    assert len(named) >= 5
    for path, name in named:
        module = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(?:def |class )?{name}\b", module, flags=re.MULTILINE), (path, name)


def compared(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield what is compared: each side, and each element of a tuple, a list or a set."""
    for node in ast.walk(tree):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            sides = node.args if node.func.attr in ("startswith", "endswith") else []
        for side in sides:
            yield from side.elts if isinstance(side, (ast.Tuple, ast.List, ast.Set)) else [side]


def test_no_module_compares_the_name_of_a_method() -> None:
    """What differs between methods, their classes say."""
    places = [
        f"{path}:{side.lineno}: {side.value}"
        for path, tree in MODULES.items()
        for side in compared(tree)
        if isinstance(side, ast.Constant) and side.value in method_names()
    ]
    assert places == []


# What must stay light stays light, and what must not be imported is not.


HEAVY = ("torch", "transformers", "lm_eval", "datasets", "pandas", "matplotlib")
# The modules of packages that commands import before they know what is asked.
OF_PACKAGES = {
    "capmoe_bench": ("commands", "benchmarks"),
    "capmoe_benchmarks": ("options",),
    "capmoe_methods": (
        *("adaptive_gamma", "eplb_placement", "laser", "macs", "oea", "sere", "xshare"),
    ),
    "capmoe_report": ("commands", "claims", "export", "replicate", "report"),
    "capmoe_serve": (
        *("commands", "bench", "backend", "recording", "loads", "advise"),
        *("readers.formats", "server.plugin"),
    ),
    "capmoe_zoo": ("commands", "worlds"),
}
# One process imports them in this order: what may import less comes first.
LIGHT = {
    "capmoe_eval": (*HEAVY, "numpy", "hydra", "omegaconf", "pydantic"),
    "capmoe_eval.report": (*HEAVY, "numpy", "hydra"),
    # What the commands import first, so that Ctrl-C and a missing package find them prepared.
    "capmoe_eval.__main__": (*HEAVY, "numpy", "hydra", "omegaconf", "pydantic", "yaml"),
    "capmoe_bench.timings": (*HEAVY, "numpy", "hydra", "omegaconf"),
    "capmoe_eval.report.tables.command": (*HEAVY, "numpy"),
    "capmoe_eval.evaluation.run_command": HEAVY,
    "capmoe_eval.evaluation.run": HEAVY,
    "capmoe_eval.evaluation.forecast": HEAVY,
    "capmoe_eval.report.figures.command": HEAVY,
    "capmoe_eval.experiment.record": HEAVY,
    "hydra_plugins.capmoe_sweeper": HEAVY,
    **{
        f"{package}.{module}": (*HEAVY, "vllm")
        for package, modules in OF_PACKAGES.items()
        if find_spec(package)
        for module in modules
    },
}


def test_what_is_light_starts_without_the_heavy_libraries() -> None:
    code = (
        "import importlib, json, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        "    print(json.dumps([module, list(sys.modules)]))\n"
    )
    done = run(sys.executable, "-c", code, *LIGHT)
    assert not done.returncode, done.stderr
    imported = {module: {*names} for module, names in map(json.loads, done.stdout.splitlines())}
    heavy = {module: {*names} & imported[module] for module, names in LIGHT.items()}
    assert {module: names for module, names in heavy.items() if names} == {}


def test_the_cache_of_the_tests_goes_with_them(tmp_path: Path) -> None:
    """It has up to 300 MB, and filled a disk."""
    fork = (
        "import os, sys, tests.conftest as c; os.fork() or sys.exit(); os.wait(); os.stat(c._CACHE)"
    )
    done = run(sys.executable, "-c", fork, TMPDIR=str(tmp_path), PYTEST_XDIST_WORKER="")
    assert (done.returncode, [*tmp_path.iterdir()]) == (0, []), done.stderr
