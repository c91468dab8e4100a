"""An environment with torch, transformers and pydantic, what they require, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]
INSTALLED = ("torch", "transformers", "safetensors", "numpy", "pydantic")
"""What docs/how-to/gpu.md tells a person to install."""


def bare_site(at: Path) -> Path:
    """Make a directory of links to the packages of INSTALLED and of all that they require."""
    at.mkdir()
    names, seen = list(INSTALLED), set()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue  # such as a library of NVIDIA's, which torch for a CPU lacks
        needed = [Requirement(line) for line in found.requires or []]
        names += [
            one.name for one in needed if not one.marker or one.marker.evaluate({"extra": ""})
        ]
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (at / top).exists():
                (at / top).symlink_to(Path(str(found.locate_file(top))))
    return at


def run_bare(site: Path, *words: str, limit: float = 120) -> subprocess.CompletedProcess[str]:
    """Run this Python with these packages and this repository alone."""
    places = [site, *(REPOSITORY / name for name in ("", "benchmarks", "packages/capmoe-zoo"))]
    paths = {"PYTHONPATH": os.pathsep.join(map(str, places)), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-S", *words],
        env={**os.environ, **paths, "OMP_NUM_THREADS": "1"},
        cwd=site.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=limit,
    )
