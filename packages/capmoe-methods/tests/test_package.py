"""The package as the suite sees it: its entry points, its imports, what the suite names of it."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from capmoe_eval.beside import BESIDE
from capmoe_eval.experiment.composition import options
from capmoe_eval.report.figures.catalogue import figures
from capmoe_eval.routing.capacity import factor_forms
from capmoe_eval.routing.registry import METHODS, knobs, method_names, placements

import capmoe_methods

FOLDER = Path(capmoe_methods.__file__).parent


def test_the_suite_names_all_that_it_brings() -> None:
    """Knobs that the suite has without it as well are none of its own."""
    names = [name for name in method_names() if METHODS[name].__module__.startswith("capmoe_m")]
    forms = [form for form in factor_forms() if form.__module__.startswith("capmoe_m")]
    others = [METHODS[name] for name in method_names() if name not in names]
    of_suite = {field for kind in others for field in kind.__dataclass_fields__}
    of_forms = {knob for form in factor_forms() if form not in forms for knob in form.knobs}
    assert BESIDE["capmoe-methods"] == {
        *(f"method={name}" for name in names),
        *(f"gamma={form.keyword}" for form in forms),
        *(f"placement={name}" for name, kind in placements().items() if kind is not None),
        *(knobs().keys() - of_suite - of_forms),
        *(f"experiment={path.stem}" for path in FOLDER.glob("conf/experiment/*.yaml")),
        *(
            f"figure {spec.name}"
            for spec in figures().values()
            if spec.package.startswith("capmoe_m")
        ),
    }


def test_its_experiments_are_those_of_the_suite() -> None:
    """Hydra cannot list those of a package without ``__init__.py`` on Python 3.12.1."""
    assert find_spec("capmoe_methods.conf").has_location  # type: ignore[union-attr]
    assert {path.stem for path in FOLDER.glob("conf/experiment/*.yaml")} < {*options("experiment")}


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("conf/experiment/*")))
def test_the_repository_has_the_records_of_its_experiments(name: str) -> None:
    words = [sys.executable, "-m", "capmoe_eval", f"experiment={name}", "plan=true"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("Missing cells: 0 of "), done.stdout + done.stderr


@pytest.mark.parametrize(
    "words", [["run", "experiment=comparators"], ["figure", "comparators_ranks"]]
)
def test_without_it_the_suite_says_what_to_install(words: list[str], tmp_path: Path) -> None:
    """An environment is stood in for by a path that has all packages but this one."""
    code = (
        "import sys; from importlib import metadata; from importlib.util import find_spec;"
        "sys.path = [p for p in sys.path if 'capmoe-methods' not in p];"
        "entries = metadata.entry_points;"
        "metadata.entry_points = lambda **of: entries(**of).select(module='none');"
        f"sys.argv[1:] = {words}; from capmoe_eval.__main__ import program; program()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    name = "=".join(words).removeprefix("run=").replace("figure=", "figure ")
    assert done.stderr.startswith(f"error: {name}: capmoe-methods is not installed; in a checkout")
    assert done.returncode == 2
