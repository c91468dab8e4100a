"""Write ``lock/``: the pins of ``constraints.txt`` with the hashes of all their files.

Needs uv (``pip install uv``). Run it after a change of ``constraints.txt`` or ``pyproject.toml``:
``make lock``. Torch has two locks: the package index's build, with NVIDIA's libraries, and a build
for CPUs, which the index lacks. The hashes of the latter stay while its version does. Of another
version, pip has to find the build on this machine; the hashes of other Pythons and processors are
added by hand from torch's own index (https://download.pytorch.org/whl/cpu/torch).

The lock of the server's environment, ``server.txt``, keeps the pins of ``constraints.txt`` where
vLLM can have them. Its other packages keep the versions that the lock has.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "lock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
SERVE = tomllib.loads((ROOT / "packages/capmoe-serve/pyproject.toml").read_text("utf-8"))
VLLM = SERVE["project"]["optional-dependencies"]["vllm"]
# Each lock has what its requirements need and no lock before it has.
PARTS = {
    # Hatchling builds the project; editables, for `pip install -e`; the others source archives.
    "build": [*PROJECT["build-system"]["requires"], "editables", "setuptools", "wheel"],
    "suite": [*PROJECT["project"]["dependencies"], *EXTRAS["dev"]],
    "slurm": EXTRAS["slurm"],
    "easy-vqa": EXTRAS["easy-vqa"],
}
GPU, CPU, SERVER, DOCS = "torch-gpu", "torch-cpu", "server", "docs"
TESTS = ("hypothesis", "pytest", "pytest-xdist")  # what the tests of the server need of `dev`
# vLLM 0.32 refuses the transformers that the suite needs, and runs with it. The builds of torch's
# companions on the index do not load beside torch for CPUs, and transformers imports them.
LAID_OVER = ("torch", "transformers")
LEFT_OUT = ("torchaudio", "torchcodec", "torchvision")
HEADERS = {
    "build": "What builds packages: installed first, so that no build fetches anything.",
    "suite": "The suite, with what its tests and linters need.",
    "slurm": "The extra `slurm`.",
    "easy-vqa": "The extra `easy-vqa`.",
    GPU: "Torch for GPUs, and what it needs on Linux.",
    CPU: "Torch for CPUs, instead of the above.",
    DOCS: "The extra `docs`, in an environment of its own.",
    SERVER: "The extra `vllm` of capmoe-serve, with the suite and what tests need: the server's.",
}

Lock = dict[str, tuple[str, set[str]]]  # by name: the version, and the hashes of its files


def main() -> None:
    """Write every lock, or name the pins of ``constraints.txt`` that none of them needs."""
    pins = dict(
        re.findall(r"(?m)^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"))
    )
    pinned = {_normal(name): version for name, version in pins.items()}
    asked: list[str] = []
    done: Lock = {}
    locks: dict[str, Lock] = {}
    for part, requirements in PARTS.items():
        asked += requirements
        resolved = parsed(compiled(asked, "--constraints", str(ROOT / "constraints.txt")))
        locks[part] = {n: e for n, e in resolved.items() if n in pinned and n not in done}
        done |= resolved
    if unused := sorted(pinned.keys() - done.keys()):
        sys.exit(f"constraints.txt: nothing needs {', '.join(unused)}; remove the lines")
    torch = locks["suite"].pop("torch")
    locks[GPU] = {name: entry for name, entry in done.items() if name not in pinned}
    locks[GPU]["torch"] = torch
    locks[CPU], version = before(CPU), f"{torch[0]}+cpu"
    if locks[CPU].get("torch", ("", ()))[0] != version:
        locks[CPU] = {"torch": (version, {hash_here(f"torch=={version}")})}
    locks[SERVER] = server_lock(locks, pinned)
    locks[DOCS] = kept(DOCS, EXTRAS["docs"], pinned)
    for part, lock in locks.items():
        write(LOCKS / f"{part}.txt", HEADERS[part], lock)


def server_lock(locks: dict[str, Lock], pinned: dict[str, str]) -> Lock:
    """Return what the server's environment has beside the locks ``build`` and ``torch-cpu``."""
    tests = [need for need in EXTRAS["dev"] if re.match(r"[\w-]+", need)[0] in TESTS]
    asked = [*PROJECT["project"]["dependencies"], *VLLM, *tests]
    with tempfile.TemporaryDirectory() as directory:
        overrides = Path(directory) / "overrides.txt"
        laid_over = [f"{name}=={pinned[name]}" for name in LAID_OVER]
        never = [f"{name}; sys_platform == 'never'" for name in LEFT_OUT]
        overrides.write_text("\n".join([*laid_over, *never]), encoding="utf-8")
        lock = kept(SERVER, asked, pinned, "--overrides", str(overrides))
    # Triton, too, is torch's for GPUs: vLLM does not use it on a CPU.
    return {
        name: entry
        for name, entry in lock.items()
        if name not in locks[GPU] and locks["build"].get(name) != entry
    }


def kept(name: str, requirements: list[str], pinned: dict[str, str], *options: str) -> Lock:
    """Return what requirements need, in the pins' versions or those that the lock has."""
    pins = {package: version for package, (version, _) in before(name).items()} | pinned
    with tempfile.TemporaryDirectory() as directory:
        # uv prefers the versions in the file that it writes.
        preferred = Path(directory) / f"{name}.txt"
        preferred.write_text("\n".join(f"{n}=={v}" for n, v in pins.items()), encoding="utf-8")
        compiled(requirements, *options, "--output-file", str(preferred))
        return parsed(preferred.read_text("utf-8"))


def before(name: str) -> Lock:
    """Return a lock as it is in the repository; nothing if there is none."""
    path = LOCKS / f"{name}.txt"
    return parsed(path.read_text("utf-8")) if path.exists() else {}


def compiled(requirements: list[str], *options: str) -> str:
    """Return what uv prints of the versions that requirements resolve to, on Linux."""
    uv = shutil.which("uv") or sys.exit("uv is not installed; pip install uv")
    command = [uv, "pip", "compile", "-", "--quiet", *options]
    command += ["--generate-hashes", "--no-annotate", "--no-header", "--no-config"]
    command += ["--no-emit-index-url", "--no-emit-find-links", "--python-version", "3.11"]
    command += ["--python-platform", "x86_64-manylinux_2_28"]
    return subprocess.run(
        command, input="\n".join(requirements), stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def hash_here(requirement: str) -> str:
    """Return the hash of the file that pip installs for a requirement on this machine."""
    with tempfile.TemporaryDirectory() as directory:
        download = ["pip", "download", "--quiet", "--no-deps", "--dest", directory, requirement]
        subprocess.run([sys.executable, "-m", *download], check=True)
        (file,) = Path(directory).iterdir()
        return hashlib.sha256(file.read_bytes()).hexdigest()


def parsed(text: str) -> Lock:
    """Return the entries of a lock's text."""
    entries = re.findall(
        r"(?m)^([\w.-]+)==([^\s;]+)[^\n]* \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text
    )
    return {
        _normal(name): (version, set(re.findall(r"[0-9a-f]{64}", hashes)))
        for name, version, hashes in entries
    }


def write(path: Path, header: str, lock: Lock) -> None:
    """Write a lock in the order of names and hashes."""
    marker = "; sys_platform == 'linux'" if path.stem == GPU else ""  # of all but torch itself
    lines = [f"# {header} Written by `make lock`."]
    for name, (version, hashes) in sorted(lock.items()):
        pin = f"{name}=={version}" + (marker if name != "torch" else "")
        lines.append(" \\\n".join([pin, *(f"    --hash=sha256:{h}" for h in sorted(hashes))]))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
