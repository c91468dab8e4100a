"""Write traces as ``.npz`` or ``.parquet``, and read them; nothing is ever unpickled."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from capmoe_eval.errors import UsageError, bad_choice, reading, shown, writing
from capmoe_eval.experiment.files import whole_file
from capmoe_eval.serving.trace import ROWS, Array, Trace, unsigned

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".npz", ".parquet")
_ARRAYS = (*ROWS, "decode_S")
_ABOUT = ("n_experts", "top_k", "layers", "model", "source", "ranks")
_SCHEMA = 1


def save_trace(trace: Trace, path: Path, *, compress: bool = False) -> None:
    """Write a trace whole, as ``.npz`` (numpy alone) or ``.parquet`` (for pandas).

    An ``.npz`` that is not compressed is memory-mapped when it is read, whatever its size. A row of
    the parquet is a token in a layer, or with counts a step in a layer.

    Raises:
        UsageError: For another suffix, or if the file cannot be written.
    """
    check_suffix(path)
    about = {"schema": _SCHEMA} | {name: getattr(trace, name) for name in _ABOUT}
    arrays = {name: array for name in _ARRAYS if (array := getattr(trace, name)) is not None}
    with writing("trace", path), whole_file(path) as file:
        if path.suffix == ".parquet":
            if trace.decode_S is not None:
                arrays["decode_S"] = trace.by_row(trace.decode_S)
            _frame(arrays, about).to_parquet(file)
        else:
            write = np.savez_compressed if compress else np.savez
            write(file, about=np.array(json.dumps(about)), **arrays)


def _frame(arrays: dict[str, Array], about: dict[str, Any]) -> pd.DataFrame:
    import pandas as pd

    n_layers = len(about["layers"])
    columns: dict[str, Array] = {}
    for name, array in arrays.items():
        if array.ndim == 1:
            columns[name[:-2]] = np.repeat(array, n_layers)
        else:
            columns["layer"] = np.tile(unsigned(np.arange(n_layers)), len(array))
            flat = array.reshape(-1, array.shape[2])
            columns |= {f"{name[:-4]}_{place}": flat[:, place] for place in range(flat.shape[1])}
    frame = pd.DataFrame(columns)
    frame.attrs.update(about)
    return frame


def load_trace(path: Path) -> Trace:
    """Read a trace that :func:`save_trace` wrote; nothing in it is unpickled.

    Raises:
        UsageError: If it is no whole trace; one line names the file and what is wrong.
    """
    check_suffix(path)
    fix = "give a file that save_trace=DIR wrote, or copy it again"
    with reading(path, "not a whole trace of this suite", fix):
        content = _read_npz(path) if path.suffix == ".npz" else _read_parquet(path)
        return Trace(**content | _described(content.pop("about")))


def _described(about: Any) -> dict[str, Any]:
    """Return the fields of a trace that are no arrays."""
    newer = about.keys() - {"schema", *_ABOUT}
    if about["schema"] != _SCHEMA or newer:
        raise UsageError(
            f"{min(newer, default='schema')}: the file is of another version of this suite; "
            "update it"
        )
    fields = {name: about[name] for name in about if name != "schema"}
    return fields | {"layers": tuple(about["layers"])}


def check_suffix(path: Path) -> None:
    """Refuse a path that is not one of a trace file of ours."""
    if path.suffix not in SUFFIXES:
        raise bad_choice(f"{shown(path)}: format", path.suffix or "none", SUFFIXES)


def _read_npz(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive, np.load(path, allow_pickle=False) as arrays:
        content: dict[str, Any] = {"about": json.loads(str(arrays["about"]))}
        for name in _ARRAYS:
            if name in arrays:
                mapped = _mapped(path, archive.getinfo(f"{name}.npy"))
                content[name] = arrays[name] if mapped is None else mapped
    return content


def _mapped(path: Path, member: zipfile.ZipInfo) -> Array | None:
    """Return a memory map of an array in an archive, or None if it is compressed."""
    if member.compress_type != zipfile.ZIP_STORED:
        return None
    with path.open("rb") as file:
        # A member's own header: 26 bytes, the lengths of its name and extra field, both of them.
        file.seek(member.header_offset + 26)
        lengths = np.frombuffer(file.read(4), dtype="<u2")
        file.seek(member.header_offset + 30 + int(lengths.sum()))
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0}.get(
            version, np.lib.format.read_array_header_2_0
        )
        shape, fortran, dtype = read(file)
        if dtype.hasobject or fortran or not math.prod(shape):
            return None
        return np.memmap(path, dtype=dtype, mode="r", offset=file.tell(), shape=shape)


def _read_parquet(path: Path) -> dict[str, Any]:
    import pandas as pd

    frame = pd.read_parquet(path)
    about: dict[str, Any] = {str(name): value for name, value in frame.attrs.items()}
    content: dict[str, Any] = {"about": about}
    n_layers = len(about["layers"])
    for name in ("expert_TLK", "score_TLK", "load_SLE"):
        columns = [column for column in frame if str(column).startswith(f"{name[:-4]}_")]
        if columns:
            content[name] = frame[columns].to_numpy().reshape(-1, n_layers, len(columns))
    for name in ("step_T", "request_T"):
        if name[:-2] in frame:
            content[name] = frame[name[:-2]].to_numpy()[::n_layers]
    if "decode" in frame:
        decode_rows = frame["decode"].to_numpy()[::n_layers]
        steps = content.get("step_T", np.arange(len(decode_rows)))
        content["decode_S"] = decode_rows[np.diff(steps, prepend=-1) != 0]
    return content
