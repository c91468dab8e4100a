"""The package as the suite sees it: its entry points, which import no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

from capmoe_eval.beside import BESIDE
from capmoe_eval.zoo.sets import GENERATORS
from tests.project import read_toml

import capmoe_zoo

FOLDER = Path(capmoe_zoo.__file__).parent


def test_the_suite_names_the_subcommands_and_the_generator_is_there() -> None:
    declared = read_toml(FOLDER.parent / "pyproject.toml")["project"]["entry-points"]
    commands = declared["capmoe_eval.commands"]
    assert BESIDE["capmoe-zoo"] == set(commands)
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
