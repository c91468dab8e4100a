"""The packages beside the suite, as it sees them: their entry points."""

from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

import pytest

from capmoe_eval.beside import BESIDE, NEEDS, check_installed
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.knobs import declared_knobs
from tests.project import ROOT, read_toml

TABLES = {
    project["name"]: project
    for path in (*ROOT.glob("packages/*/pyproject.toml"), ROOT / "benchmarks/pyproject.toml")
    if (project := read_toml(path)["project"])["name"] in BESIDE
}
PROJECTS = {name: project.get("entry-points", {}) for name, project in TABLES.items()}
INSTALLED = [name for name in PROJECTS if find_spec(name.replace("-", "_"))]
NAMED = {
    "capmoe_eval.architectures": "model_type={}",
    "capmoe_eval.backends": "backend={}",
    "capmoe_eval.benchmarks": "bench {}",
    "capmoe_eval.commands": "{}",
}
"""How the suite names what an entry point of a group brings."""


def brought(groups: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield the names of what entry points bring, as a user writes them."""
    for group, entries in groups.items():
        if group in NAMED:
            yield from map(NAMED[group].format, entries)
        elif group == "capmoe_eval.observers":
            for place in entries.values():
                yield from declared_knobs(resolve_name(place))


def test_the_suite_names_every_package_and_no_other() -> None:
    assert PROJECTS.keys() == BESIDE.keys()


def test_what_a_package_needs_is_installed_with_it() -> None:
    beside = {
        name: {word for word in project["dependencies"] if word in BESIDE}
        for name, project in TABLES.items()
    }
    assert beside == {name: {*NEEDS.get(name, ())} for name in BESIDE}
    folders = "./packages/capmoe-serve ./packages/capmoe-bench ./packages/capmoe-methods"
    with pytest.raises(
        UsageError, match=f"pip install {folders} ./packages/capmoe-report, or make"
    ):
        check_installed("advise")
    with pytest.raises(UsageError, match=r"pip install \./benchmarks \./packages/capmoe-bench, or"):
        check_installed("bench gpu")


# A module of figures names them when it is imported: its package tests it.
@pytest.mark.parametrize(
    "name", [name for name in INSTALLED if "capmoe_eval.figures" not in PROJECTS[name]]
)
def test_the_suite_names_all_that_a_package_brings(name: str) -> None:
    assert BESIDE[name] == {*brought(PROJECTS[name])}


@pytest.mark.parametrize("name", INSTALLED)
def test_every_entry_point_is_there(name: str) -> None:
    for group, entries in PROJECTS[name].items():
        installed = {entry.name: entry.value for entry in entry_points(group=group)}
        for entry, place in entries.items():
            assert installed[entry] == place, "make install"
            loaded: Any = resolve_name(place)
            if group == "capmoe_eval.commands":
                assert callable(resolve_name(loaded[-1]))
