"""A release says which version it is, how to cite it, and what it carries; its habits hold."""

from __future__ import annotations

import importlib.metadata
import json
import re
from fnmatch import fnmatchcase
from importlib.metadata import EntryPoint
from pathlib import PurePosixPath
from types import SimpleNamespace

import pytest
import yaml
from lm_eval.api.registry import get_model

from capmoe_eval import __version__
from capmoe_eval.evaluation import provenance
from tests.conftest import Shell
from tests.project import PROJECT, ROOT, run

CHECKOUT = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout of git")


@CHECKOUT
def test_the_version_is_said_with_its_commit(shell: Shell) -> None:
    commit, (status, line, _) = run("git", "rev-parse", "HEAD").stdout.strip(), shell("--version")
    assert status == 0
    assert re.fullmatch(
        rf"capmoe_eval {re.escape(__version__)} \(commit {commit}(-dirty)?\)\n", line
    )


@pytest.mark.parametrize(
    ("noted", "commit"),
    [
        ({"url": "https://example.org/x", "vcs_info": {"vcs": "git", "commit_id": "abc"}}, "abc"),
        ({"url": "file:///x", "dir_info": {}}, None),
        (None, None),
    ],
)
def test_an_installed_one_knows_the_commit_that_pip_noted(
    monkeypatch: pytest.MonkeyPatch, noted: object, commit: str | None
) -> None:
    def no_git(*_: object, **__: object) -> None:
        raise OSError

    content = None if noted is None else json.dumps(noted)
    there = SimpleNamespace(read_text=lambda _: content)
    monkeypatch.setattr(provenance.subprocess, "run", no_git)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: there)
    monkeypatch.setattr(provenance, "revision", provenance.revision.__wrapped__)
    assert provenance.revision() == commit
    said = provenance.version_line()
    assert said == f"capmoe_eval {__version__}" + (f" (commit {commit})" if commit else "")


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["version"], cited["license"]) == (__version__, "Apache-2.0")


def test_every_entry_point_leads_to_what_it_names() -> None:
    """lm-eval takes a model by the module and name of the class that registers under that name."""
    for name, value in PROJECT["project"]["scripts"].items():
        assert callable(EntryPoint(name, value, "console_scripts").load())
    models = PROJECT["project"]["entry-points"]["lm_eval.models"]
    assert set(models) == {"capmoe", "capmoe-multimodal"}
    for name, value in models.items():
        model = EntryPoint(name, value, "lm_eval.models").load()
        assert value == f"{model.__module__}:{model.__name__}"
        assert get_model(name) is model


BILL = (ROOT / "docs/reference/bill_of_materials.md").read_text(encoding="utf-8")
PARTS = re.findall(r"(?m)^\| .+ \| `(.+)` \| (.+) \| .+ \|$", BILL)
PACKAGED = ("capmoe_eval", "hydra_plugins", "conf", "packages/capmoe-serve/capmoe_serve")
BY_HAND = {
    *("", ".py", ".yaml", ".html", ".css", ".js", ".j2", ".md", ".tex", ".mplstyle", ".typed"),
    ".xml",
}


@CHECKOUT
def test_the_bill_lists_what_is_not_written_by_hand() -> None:
    paths = run("git", "ls-files", "--", *PACKAGED).stdout.split()
    parts = {path: [p for p, _ in PARTS if fnmatchcase(path, p)] for path in paths}
    assert [p for p in paths if not parts[p] and PurePosixPath(p).suffix not in BY_HAND] == []
    assert {pattern for pattern, _ in PARTS} == {p for of_path in parts.values() for p in of_path}


def test_the_licences_of_the_wheel_are_those_of_its_parts() -> None:
    named = {licence for _, licence in PARTS} - {"NOASSERTION"}
    assert set(PROJECT["project"]["license"].split(" AND ")) == named
    assert "docs/reference/bill_of_materials.md" in PROJECT["project"]["license-files"]
