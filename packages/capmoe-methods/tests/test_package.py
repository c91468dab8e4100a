"""The package as the suite sees it: its entry points, its imports, what the suite names of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from capmoe_eval.routing.beside import BESIDE
from capmoe_eval.routing.factor import factor_forms
from capmoe_eval.routing.registry import ENTRY_POINTS, METHODS, knobs, method_names, placements
from tests.project import read_toml

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
    }


def test_every_folder_is_an_entry_point() -> None:
    declared = read_toml(FOLDER.parent / "pyproject.toml")["project"]["entry-points"]
    folders = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    assert declared == {ENTRY_POINTS: {name: f"capmoe_methods.{name}" for name in folders}}


def test_to_register_its_methods_imports_no_torch() -> None:
    code = (
        "import sys; from capmoe_eval.routing.registry import method_names; names = method_names()"
        "; print('oea' in names, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"
