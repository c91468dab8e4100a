"""Write traces as ``.npz``, and read them; nothing is ever unpickled."""

from __future__ import annotations

import json
import stat
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from capmoe_eval.errors import UsageError, bad_choice, reading, shown, writing
from capmoe_eval.experiment.files import whole_file

from capmoe_serve.trace import ROWS, Trace

SUFFIX: Final = ".npz"
SCHEMA: Final = 1
_ARRAYS: Final = (*ROWS, "decode_S")
_ABOUT: Final = ("n_experts", "top_k", "layers", "model", "source", "ranks")
_MOST_UNPACKED: Final = 2**32  # bytes of a compressed array, which a small file may stand for
OWN_ARRAYS: Final = "counts or ids in arrays of your own see docs/how-to/record_traffic.md"


def check_regular(path: Path) -> None:
    """Refuse a path that leads to no regular file: a pipe may never end, and a device never does.

    Raises:
        UsageError: For a pipe, a device or a socket; a missing file is left to who opens it.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        raise UsageError(f"{shown(path)}: no regular file; save the input in one")


def save_trace(trace: Trace, path: Path, *, compress: bool = False) -> None:
    """Write a trace whole, as ``.npz``, which numpy alone reads.

    Without ``compress`` the file can be memory-mapped, whatever its size.

    Raises:
        UsageError: For another suffix, or if the file cannot be written.
    """
    _check_suffix(path)
    about = {name: getattr(trace, name) for name in _ABOUT}
    arrays = {name: array for name in _ARRAYS if (array := getattr(trace, name)) is not None}
    write: Any = np.savez_compressed if compress else np.savez
    with writing("trace", path), whole_file(path) as file:
        write(file, about=np.array(json.dumps({"schema": SCHEMA, **about})), **arrays)


def load_trace(path: Path) -> Trace:
    """Read a trace that :func:`save_trace` wrote; nothing in it is unpickled.

    Raises:
        UsageError: If it is no whole trace; one line names the file and what is wrong.
    """
    _check_suffix(path)
    check_regular(path)
    fix = "give a file that save_trace=DIR wrote, or copy it again"
    with reading(path, "not a whole trace of this suite", fix):
        with zipfile.ZipFile(path) as archive:
            sizes = {member.filename: member.file_size for member in archive.infolist()}
        if "about.npy" not in sizes:
            raise UsageError(f"about is not in the archive; for {OWN_ARRAYS}")
        # An uncompressed array has its bytes in the file, so that only packed ones can surprise.
        largest = max(sizes, key=sizes.__getitem__)
        if sizes[largest] > max(_MOST_UNPACKED, path.stat().st_size):
            raise UsageError(
                f"{largest}: has {sizes[largest]:,} bytes, too many to unpack; save it "
                "uncompressed (numpy.savez)"
            )
        with np.load(path, allow_pickle=False) as arrays:
            about = json.loads(str(arrays["about"]))
            content = {name: arrays[name] for name in _ARRAYS if name in arrays}
        return Trace(**content, **_described(about))


def _described(about: Any) -> dict[str, Any]:
    """Return the fields of a trace that are no arrays."""
    newer = about.keys() - {"schema", *_ABOUT}
    if about["schema"] != SCHEMA or newer:
        raise UsageError(
            f"{min(newer, default='schema')}: the file is of another version of this suite; "
            "update it"
        )
    if not isinstance(about["layers"], list):
        raise UsageError(f"layers={shown(about['layers'])}: must be a list of names")
    fields = {name: about[name] for name in about if name != "schema"}
    return fields | {"layers": tuple(about["layers"])}


def _check_suffix(path: Path) -> None:
    """Refuse a path without the suffix of a trace file of this suite."""
    if path.suffix != SUFFIX:
        raise bad_choice(f"{shown(path)}: format", path.suffix or "none", [SUFFIX])
