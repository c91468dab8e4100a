"""The version of this code, and its commit where that is known."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import subprocess
from pathlib import Path

from capmoe_eval import __version__


def version_line() -> str:
    """Return the version and, where it is known, the commit, in one line."""
    known = revision()
    return f"capmoe_eval {__version__}" + (f" (commit {known})" if known else "")


@functools.cache
def revision() -> str | None:
    """Return the commit of this code, or None outside of its checkout.

    ``-dirty`` is added if the code was changed since. Where pip installed it from a repository, the
    commit is the one that pip has noted (PEP 610).
    """
    package = Path(__file__).parents[1]

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(package), *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        # Installed into an environment inside someone's repository, we are not part of that.
        git("ls-files", "--error-unmatch", __file__)
        dirty = git("status", "--porcelain", "--", str(package))
        return git("rev-parse", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return _installed()


def _installed() -> str | None:
    try:
        noted = importlib.metadata.distribution("capmoe-eval").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    commit = json.loads(noted or "{}").get("vcs_info", {}).get("commit_id")
    return str(commit) if commit else None
