"""Write traces as ``.npz`` or ``.parquet``, and read them; nothing is ever unpickled."""

from __future__ import annotations

import json
import math
import stat
import zipfile
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
from capmoe_eval.errors import UsageError, bad_choice, first_line, reading, shown, writing
from capmoe_eval.experiment.files import whole_file
from capmoe_eval.experiment.trace_file import SCHEMA, write_npz

from capmoe_serve.trace import ROWS, Array, Trace, unsigned

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".npz", ".parquet")
_ARRAYS = (*ROWS, "decode_S")
_ABOUT = ("n_experts", "top_k", "layers", "model", "source", "ranks")
_AT_ONCE = 2**20  # bytes that are read together
_MOST_UNPACKED = 2**32  # bytes of a compressed array
_MOST_VALUES = 2**31  # of a parquet
OWN_ARRAYS = "counts or ids in arrays of your own see docs/how-to/record_traffic.md"


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
    """Write a trace whole, as ``.npz`` (numpy alone) or ``.parquet`` (for pandas).

    An ``.npz`` that is not compressed is memory-mapped when it is read, whatever its size. A row of
    the parquet is a token in a layer, or with counts a step in a layer.

    Raises:
        UsageError: For another suffix, or if the file cannot be written.
    """
    check_suffix(path)
    about = {name: getattr(trace, name) for name in _ABOUT}
    arrays = {name: array for name in _ARRAYS if (array := getattr(trace, name)) is not None}
    if path.suffix == ".npz":
        write_npz(path, about, arrays, compress=compress)
        return
    if trace.decode_S is not None:
        arrays["decode_S"] = trace.by_row(trace.decode_S)
    with writing("trace", path), whole_file(path) as file:
        frame = _frame(arrays, {"schema": SCHEMA, **about})
        frame.to_parquet(file, write_page_checksum=True)


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
    check_regular(path)
    fix = "give a file that save_trace=DIR wrote, or copy it again"
    with reading(path, "not a whole trace of this suite", fix):
        content = _read_npz(path) if path.suffix == ".npz" else _read_parquet(path)
        return Trace(**content | _described(content.pop("about")))


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


def check_suffix(path: Path) -> None:
    """Refuse a path without the suffix of a trace file of this suite."""
    if path.suffix not in SUFFIXES:
        raise bad_choice(f"{shown(path)}: format", path.suffix or "none", SUFFIXES)


def _read_npz(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        members = {each.filename.removesuffix(".npy"): each for each in archive.infolist()}
        if "about" not in members:
            raise UsageError(f"about is not in the archive; for {OWN_ARRAYS}")
        content: dict[str, Any] = {
            name: _array(path, archive, members[name])
            for name in ("about", *_ARRAYS)
            if name in members
        }
    return content | {"about": json.loads(str(content["about"]))}


def _array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """Return an array of an archive whose checksum holds; a memory map if it is not compressed."""
    name = member.filename
    is_mapped = member.compress_type == zipfile.ZIP_STORED
    if member.flag_bits & 1:
        raise UsageError(f"{name}: is encrypted; save the trace without a password")
    if not is_mapped and member.compress_type != zipfile.ZIP_DEFLATED:
        raise UsageError(f"{name}: is packed in another way than by numpy.savez_compressed; use it")
    if not is_mapped and member.file_size > _MOST_UNPACKED:
        raise UsageError(
            f"{name}: has {member.file_size:,} bytes, too many to unpack; save it uncompressed "
            "(numpy.savez), which is read in parts"
        )
    try:
        with archive.open(member) as stream:
            shape, fortran, dtype = _header(stream)
            held, needed = member.file_size - stream.tell(), math.prod(shape) * dtype.itemsize
            if dtype.hasobject:
                raise UsageError(f"{name}: holds Python objects; nothing is ever unpickled")
            if needed != held:
                raise UsageError(
                    f"{name}: {dtype} {list(shape)} are {needed:,} bytes, and the file has {held:,}"
                )
            start = stream.tell()
            parts = [] if is_mapped else [stream.read()]
            while stream.read(_AT_ONCE):  # to its end, where the checksum is compared
                pass
    except (zlib.error, TokenError, SyntaxError) as error:  # the last two: of the header
        raise UsageError(f"{name}: cannot be unpacked ({first_line(error)})") from error
    order: Literal["F", "C"] = "F" if fortran else "C"
    if parts or not needed:
        return np.frombuffer(b"".join(parts), dtype=dtype).reshape(shape, order=order)
    with path.open("rb") as file:
        # A member's own header: 26 bytes, the lengths of its name and extra field, both of them.
        file.seek(member.header_offset + 26)
        lengths = np.frombuffer(file.read(4), dtype="<u2")
    start += member.header_offset + 30 + int(lengths.sum())
    # As a plain array: slices of a memmap cost ten times as much.
    return np.asarray(np.memmap(path, dtype, "r", offset=start, shape=shape, order=order))


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, order and type of an array from the header of its ``.npy``."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    return np.lib.format.read_array_header_2_0(stream)


def _read_parquet(path: Path) -> dict[str, Any]:
    import pandas as pd
    import pyarrow.parquet as pq

    size = pq.read_metadata(path)
    if size.num_rows * size.num_columns > _MOST_VALUES:  # repeated ones take no space in the file
        raise UsageError(
            f"{size.num_rows:,} rows of {size.num_columns} columns are too many to read as a "
            "whole; save the trace as .npz, which is read in parts"
        )
    frame = pd.read_parquet(path, page_checksum_verification=True)
    about: dict[str, Any] = {str(name): value for name, value in frame.attrs.items()}
    content: dict[str, Any] = {"about": about}
    n_layers = len(about["layers"])
    if not n_layers or not np.array_equal(frame["layer"], np.arange(len(frame)) % n_layers):
        raise UsageError(f"layer: must be 0 to {n_layers - 1} in turn, as layers names them")
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
