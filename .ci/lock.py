"""Write ``lock/``: the pins of ``constraints.txt`` with the hashes of all their files.

Needs uv (``pip install uv``). Run it after a change of ``constraints.txt`` or ``pyproject.toml``:
``make lock``. A build of a pinned version that the package index lacks, such as torch for CPUs, is
added by its hash if pip finds it here, and stays while the pin does.
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
# Each lock has what its requirements need and no lock before it has.
PARTS = {
    # Hatchling builds the project; editables, for `pip install -e`; the others source archives.
    "build": [*PROJECT["build-system"]["requires"], "editables", "setuptools", "wheel"],
    "suite": [*PROJECT["project"]["dependencies"], *EXTRAS["dev"]],
    "slurm": EXTRAS["slurm"],
    "easy-vqa": EXTRAS["easy-vqa"],
}
OF_TORCH = "cuda"  # what the package index's torch needs on Linux, and a build for CPUs does not
HEADERS = {
    "build": "What builds packages: installed first, so that no build fetches anything.",
    "suite": "The suite, with what its tests and linters need.",
    "slurm": "The extra `slurm`.",
    "easy-vqa": "The extra `easy-vqa`.",
    OF_TORCH: "What torch needs on a GPU.",
}

Lock = dict[str, tuple[str, set[str]]]  # by name: the version, and the hashes of its files


def main() -> None:
    """Write every lock, or name the pins of ``constraints.txt`` that none of them needs."""
    pins = dict(
        re.findall(r"(?m)^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"))
    )
    pinned = {_normal(name): version for name, version in pins.items()}
    before = {name: read(LOCKS / f"{name}.txt") for name in HEADERS}
    asked: list[str] = []
    done: Lock = {}
    locks: dict[str, Lock] = {}
    for part, requirements in PARTS.items():
        asked += requirements
        resolved = resolve(asked)
        locks[part] = {n: e for n, e in resolved.items() if n in pinned and n not in done}
        done |= resolved
    if unused := sorted(pinned.keys() - done.keys()):
        sys.exit(f"constraints.txt: nothing needs {', '.join(unused)}; remove the lines")
    locks[OF_TORCH] = {name: entry for name, entry in done.items() if name not in pinned}
    for part, lock in locks.items():
        for name, (version, hashes) in lock.items():
            version_before, hashes_before = before[part].get(name, ("", set()))
            if version_before == version:
                hashes.update(hashes_before)
    version, hashes = locks["suite"]["torch"]
    hashes.add(hash_here(f"torch=={version}"))
    for part, lock in locks.items():
        write(LOCKS / f"{part}.txt", HEADERS[part], lock)


def resolve(requirements: list[str]) -> Lock:
    """Return what requirements need on Linux, under the constraints."""
    uv = shutil.which("uv") or sys.exit("uv is not installed; pip install uv")
    command = [uv, "pip", "compile", "-", "--quiet", "--constraints", str(ROOT / "constraints.txt")]
    command += ["--generate-hashes", "--no-annotate", "--no-header", "--no-config"]
    command += ["--no-emit-index-url", "--no-emit-find-links", "--python-version", "3.11"]
    command += ["--python-platform", "x86_64-manylinux_2_28"]
    text = subprocess.run(
        command, input="\n".join(requirements), stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return parsed(text)


def hash_here(requirement: str) -> str:
    """Return the hash of the file that pip installs for a requirement on this machine."""
    with tempfile.TemporaryDirectory() as directory:
        download = ["pip", "download", "--quiet", "--no-deps", "--dest", directory, requirement]
        subprocess.run([sys.executable, "-m", *download], check=True)
        (file,) = Path(directory).iterdir()
        return hashlib.sha256(file.read_bytes()).hexdigest()


def read(path: Path) -> Lock:
    """Return a lock; an absent one is empty."""
    return parsed(path.read_text("utf-8")) if path.exists() else {}


def parsed(text: str) -> Lock:
    """Return the entries of a lock's text."""
    entries = re.findall(
        r"(?m)^([\w.-]+)==(\S+) \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text
    )
    return {
        _normal(name): (version, set(re.findall(r"[0-9a-f]{64}", hashes)))
        for name, version, hashes in entries
    }


def write(path: Path, header: str, lock: Lock) -> None:
    """Write a lock in the order of names and hashes."""
    lines = [f"# {header} Written by `make lock`."]
    for name, (version, hashes) in sorted(lock.items()):
        lines.append(
            " \\\n".join(
                [f"{name}=={version}", *(f"    --hash=sha256:{h}" for h in sorted(hashes))]
            )
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
