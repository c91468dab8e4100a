"""The package as the suite sees it: its entry points, which import no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

from capmoe_eval.beside import BESIDE
from capmoe_eval.wrapper.checkpoint import ENTRY_POINTS
from capmoe_eval.zoo.sets import GENERATORS
from tests.project import read_toml

import capmoe_zoo
from capmoe_zoo.molmoe import MolmoeConfig, register

FOLDER = Path(capmoe_zoo.__file__).parent


def test_the_suite_names_the_subcommands_and_the_model_and_the_generator_is_there() -> None:
    declared = read_toml(FOLDER.parent / "pyproject.toml")["project"]["entry-points"]
    commands, models = declared["capmoe_eval.commands"], declared[ENTRY_POINTS]
    assert BESIDE["capmoe-zoo"] == {*commands, *(f"model_type={name}" for name in models)}
    assert models == {MolmoeConfig.model_type: f"{register.__module__}:{register.__name__}"}
    for place in commands.values():
        assert callable(resolve_name(resolve_name(place).function))
    assert callable(resolve_name(declared[GENERATORS]["miniworld"]))


def test_to_list_the_subcommand_and_to_generate_import_no_torch() -> None:
    code = (
        "import sys; from capmoe_zoo.commands import TRAIN; from capmoe_zoo.worlds import documents"
        "; print('olmoe' in TRAIN.names(), len(documents('dev', 8)), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True 13 False\n"
