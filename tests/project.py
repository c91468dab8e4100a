"""What ``pyproject.toml`` says of the project, and programs that run in a checkout."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it there
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


PROJECT = read_toml(ROOT / "pyproject.toml")


def run(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with a few more variables of the environment, whatever its status."""
    env = os.environ | environment
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
