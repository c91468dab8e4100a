"""``.ci/run`` and ``.ci/nightly``: each test is in one of the two."""

import itertools
import shlex
from pathlib import Path

import pytest

from tests.project import PROJECT, ROOT, run

FOLDER = ROOT / ".ci"
pytestmark = pytest.mark.skipif(not (FOLDER / "run").exists(), reason="no checkout of git")

MARKERS = [line.partition(":")[0] for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"]]


def expression(target: str) -> str:
    """Return the markers of the tests that a target of make runs, as pytest takes them."""
    lines = run("make", "--dry-run", target).stdout.splitlines()
    (line,) = (line for line in lines if "pytest" in line)
    words = shlex.split(line, comments=True)
    return words[words.index("-m", words.index("pytest")) + 1]


def test_each_test_is_in_one_of_the_two() -> None:
    for script, target in (("run", "test-ci"), ("nightly", "test-nightly")):
        assert f"make {target}\n" in (FOLDER / script).read_text("utf-8")
    code = [expression(target) for target in ("test-ci", "test-nightly", "test")]
    for values in itertools.product([False, True], repeat=len(MARKERS)):
        markers = dict(zip(MARKERS, values, strict=True))
        in_ci, in_nightly, in_test = (bool(eval(each, {}, dict(markers))) for each in code)
        assert in_ci != in_nightly, markers
        assert in_ci >= in_test, markers


def test_tests_of_a_part_run_again_when_what_they_depend_on_has_changed(tmp_path: Path) -> None:
    """A fresh clone whose part passed is skipped, and not after a change of what it imports."""
    steps = (FOLDER / "steps.sh").read_text("utf-8")
    functions = steps[steps.index("declare -A inputs") :]
    script = f"""set -euo pipefail
git init --quiet . && git config user.name a && git config user.email a@b
mkdir -p packages/capmoe-methods capmoe_eval .ci && touch packages/capmoe-methods/a capmoe_eval/b
cache=$PWD/../cache; mkdir -p "$cache"; step() {{ shift; "$@"; }}; make() {{ echo "made $1"; }}
commit() {{ git add . && git commit --quiet -m "$1"; }}
{functions}
commit first; changed methods; changed methods
echo new > capmoe_eval/b; commit second; changed methods
echo new > elsewhere; commit third; changed methods
"""
    folder = tmp_path / "clone"
    folder.mkdir()
    done = run("bash", "-c", script, cwd=folder)
    skipped = "== make test-methods: passed with this content before"
    assert done.stdout.splitlines() == ["made test-methods", skipped, "made test-methods", skipped]
