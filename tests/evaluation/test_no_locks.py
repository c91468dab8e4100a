"""Two processes share a directory on a file system that has no ``flock``."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from capmoe_eval.experiment.results import read_results
from tests.satellites import NEEDS_METHODS

SOURCE = Path(__file__).parents[1] / "experiment/flock.c"
WORDS = ("-m", "model=tiny_olmoe", "tasks=obqa", "limit=2", "ep_size=2", "gamma=adaptive")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose flock fails."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc, for a library whose flock fails")
    library = tmp_path_factory.mktemp("shim") / "flock.so"
    words = ["gcc", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    subprocess.run(words, check=True, capture_output=True)
    return library


@NEEDS_METHODS
@pytest.mark.nightly
def test_processes_share_a_directory_without_locks(shim: Path, tmp_path: Path) -> None:
    results, notes = tmp_path / "results", tmp_path / "notes"
    results.mkdir()
    (results / ".inputs.json.lock").touch()  # as an earlier version left it, or filelock makes it
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "NO_FLOCK_UNDER": str(tmp_path),
        "NO_FLOCK_ERRNO": str(errno.ENOSYS),
        "NO_FLOCK_NOTES": str(notes),
    }
    check = (
        "import fcntl, sys\n"
        "with open(sys.argv[1]) as file:\n"
        "    try:\n"
        "        fcntl.flock(file, fcntl.LOCK_EX)\n"
        "    except OSError as error:\n"
        "        print(error.errno)\n"
    )
    line = [sys.executable, "-c", check, str(results / ".inputs.json.lock")]
    assert int(subprocess.run(line, env=environment, check=True, capture_output=True).stdout) == (
        errno.ENOSYS
    )
    notes.unlink()
    line = [sys.executable, "-m", "capmoe_eval", *WORDS, "budget=0.1,0.3", f"results_dir={results}"]
    with (tmp_path / "out").open("w") as out:
        processes = [
            subprocess.Popen(line, env=environment, stdout=out, stderr=out) for _ in range(2)
        ]
        statuses = [process.wait(timeout=240) for process in processes]
    assert statuses == [0, 0], (tmp_path / "out").read_text()
    assert notes.exists(), "locks were asked for, and refused"
    results_read = read_results(results)
    assert len(results_read.records) == 2
    assert not results_read.broken
    assert not list(results.rglob(".*")), "nothing is left behind"
