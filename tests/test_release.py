"""A release says which version it is, how to cite it, and what it carries; its habits hold."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
import yaml
from lm_eval.api.registry import get_model

from capmoe_eval import __version__
from capmoe_eval.evaluation import provenance
from capmoe_eval.evaluation.run_command import main
from pages.bill_of_materials import DOCUMENT, PARTS, packaged, part_of, text, unlisted
from tests.project import PROJECT, ROOT

CHECKOUT = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout of git")


@CHECKOUT
def test_the_version_is_said_with_its_commit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    said = capsys.readouterr().out
    assert re.fullmatch(
        rf"capmoe_eval {re.escape(__version__)} \(commit {commit}(-dirty)?\)\n", said
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
    def run(*_: object, **__: object) -> None:
        raise OSError

    content = None if noted is None else json.dumps(noted)
    there = SimpleNamespace(read_text=lambda _: content)
    monkeypatch.setattr(provenance.subprocess, "run", run)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: there)
    monkeypatch.setattr(provenance, "revision", provenance.revision.__wrapped__)
    assert provenance.revision() == commit
    said = provenance.version_line()
    assert said == f"capmoe_eval {__version__}" + (f" (commit {commit})" if commit else "")


def test_the_command_is_installed_under_its_own_name() -> None:
    assert PROJECT["project"]["scripts"] == {"capmoe-eval": "capmoe_eval.__main__:program"}


def test_the_citation_is_of_this_version_and_has_the_paper() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()  # required by 1.2.0
    assert (cited["version"], cited["license"]) == (__version__, "Apache-2.0")
    assert cited["authors"] == [{"name": "The capmoe_eval authors"}]
    paper = cited["references"][0]
    assert paper["url"] == "https://arxiv.org/abs/2503.05066"
    for reference in cited["references"]:
        assert {"type", "title", "authors"} <= reference.keys()
        assert all(
            {"family-names", "given-names"} == author.keys() for author in reference["authors"]
        )


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


@CHECKOUT
def test_the_bill_lists_what_is_not_written_by_hand() -> None:
    assert unlisted() == [], "list them in pages/bill_of_materials.py"
    for part in PARTS:
        assert any(part_of(path) is part for path in packaged()), f"{part.title}: has no files"


@CHECKOUT
def test_the_bill_is_that_of_the_files() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == text(), (
        "write it: python -m pages.bill_of_materials"
    )


def test_the_licences_of_the_wheel_are_those_of_its_parts() -> None:
    named = {part.licence for part in PARTS} - {"NOASSERTION"}
    assert set(PROJECT["project"]["license"].split(" AND ")) == named
    assert "docs/reference/bill_of_materials.md" in PROJECT["project"]["license-files"]


def test_the_changelog_begins_with_this_version_and_a_date_or_none() -> None:
    headings = re.findall(r"(?m)^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    date = rf"{re.escape(__version__)} \((unreleased|\d{{4}}-\d\d-\d\d)\)"
    assert re.fullmatch(date, headings[0])
    assert len({heading.split()[0] for heading in headings}) == len(headings)


def test_the_wheel_says_that_it_is_typed() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    files = {
        file.distribution_path for file in wheel.WheelBuilder(str(ROOT)).recurse_project_files()
    }
    assert "capmoe_eval/py.typed" in files


@CHECKOUT
def test_continuous_integration_runs_every_python_that_the_project_names() -> None:
    prefix = "Programming Language :: Python :: 3."
    named = {c.removeprefix(prefix) for c in PROJECT["project"]["classifiers"] if prefix in c}
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert set(re.findall(r'"3\.(\d+)"', workflow)) == named
    assert min(map(int, named)) == int(PROJECT["project"]["requires-python"].rpartition(".")[2])


@CHECKOUT
def test_hooks_and_templates_name_what_is_there() -> None:
    """The tools of hooks are those of the lock: nothing else is pinned."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert {repository["repo"] for repository in config["repos"]} == {"local"}
    lock = (ROOT / "lock/suite.txt").read_text(encoding="utf-8")
    packages = {"lint-imports": "import-linter"}
    for hook in config["repos"][0]["hooks"]:
        tool = hook["entry"].split()[0].removeprefix(".venv/bin/")
        assert re.search(rf"(?m)^{packages.get(tool, tool)}==", lock)
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))
    pages = ROOT / "CONTRIBUTING.md", ROOT / ".github/PULL_REQUEST_TEMPLATE.md"
    for page in pages:
        used = re.findall(r"`make ([a-z -]+)`", page.read_text(encoding="utf-8"))
        assert {target for words in used for target in words.split()} <= targets
    for form in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        content = yaml.safe_load(form.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= content.keys() or form.stem == "config"
