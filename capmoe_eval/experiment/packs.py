"""The bytes of records: a file for each, or packed by model and task.

A pack is ``<model>/<task>.jsonl.zst``. The first line says of each record what it says beside its
answers and layers. Then each record is a line: the bytes of its own file, with a tab for each line
break, since no string of JSON holds one. Last, where every reader of zstd skips it, stands the
SHA-256 of the whole file before it.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic_core import from_json, to_json

from capmoe_eval.errors import UsageError, first_line
from capmoe_eval.experiment.files import read_bytes
from capmoe_eval.lazy import pa

SUFFIX: Final = ".jsonl.zst"
_FORMAT: Final = 1
_LEVEL: Final = 19  # of compression: a quarter less than 12, in 0.2 s for 40 records
_SKIPPED: Final = struct.pack("<II", 0x184D2A50, hashlib.sha256().digest_size)
_DETAILS: Final = ("documents", "layers")
_UNPACKED: Final = 16  # packs whose records are kept in memory

# A list of numbers as json indents it. No string of JSON holds a bare line break.
_NUMBERS: Final = re.compile(r'\[\n([^\[\]{}"]+)\n *\]')
_CHECKSUM: Final = b'"checksum": "%s"'
_BLANK: Final = b"0" * 64


def sealed(content: dict[str, Any]) -> bytes:
    """Set the checksum of a record's content and return the bytes of its file.

    The checksum is the SHA-256 of the file with 64 zeros in the checksum's place. NaN in lm-eval's
    part becomes null, as JSON has none.
    """
    part = content["capmoe"]
    part["checksum"] = _BLANK.decode()
    whole = from_json(to_json(content | {"capmoe": None}, inf_nan_mode="null")) | {"capmoe": part}
    text = json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False)
    data = (_NUMBERS.sub(lambda n: f"[{' '.join(n[1].split())}]", text) + "\n").encode()
    part["checksum"] = hashlib.sha256(data).hexdigest()
    return data.replace(_CHECKSUM % _BLANK, _CHECKSUM % part["checksum"].encode())


def has_checksum(data: bytes, checksum: str) -> bool:
    """Return whether the bytes of a record's file have the checksum that they say."""
    blanked = data.replace(_CHECKSUM % checksum.encode(), _CHECKSUM % _BLANK)
    return hashlib.sha256(blanked).hexdigest() == checksum


class Pack:
    """A pack that was read; a record is unpacked when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Read a pack's first line; UsageError if the file is not as it was written."""
        self.path = path
        self.data = read_bytes(path)
        body = self.data[: -len(_seal(b""))]
        try:
            if self.data != body + _seal(body):
                raise ValueError("its checksum is another")
            with _content(self.data) as stream:  # no more than the first line is unpacked
                head = from_json(io.BufferedReader(stream).readline())
            if head["pack"] != _FORMAT:
                raise ValueError(f"format {head['pack']}, this version reads {_FORMAT}")
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(
                f"{path}: truncated, or changed after it was written ({first_line(error)}); "
                "restore it, or delete it to compute its cells anew"
            ) from error
        self.digest = self.data[-hashlib.sha256().digest_size :].hex()
        """The SHA-256 of the file before its seal, which no other content has."""
        self.summaries: dict[str, dict[str, Any]] = {}
        """What each record says beside its answers and layers, by the name of its file."""
        self._places: dict[str, slice] = {}
        end = 0
        for summary in head["records"]:
            name, start, end = summary.pop("file"), end, end + summary.pop("size")
            self.summaries[name], self._places[name] = summary, slice(start, end)

    def record(self, name: str) -> bytes:
        """Return the bytes of a record's own file; UsageError if they have another checksum."""
        data = _lines(self)[self._places[name]].replace(b"\t", b"\n")
        if not has_checksum(data, self.summaries[name]["checksum"]):
            raise UsageError(f"{self.path}: the checksum of {name} is another than the pack says")
        return data


def _content(data: bytes) -> Any:
    """Return a stream of what the bytes of a pack were packed from."""
    return pa.CompressedInputStream(pa.BufferReader(data), "zstd")


@functools.lru_cache(maxsize=_UNPACKED)
def _lines(pack: Pack) -> bytes:
    """Return the lines of all records of a pack."""
    with _content(pack.data) as stream:
        lines: bytes = stream.read()
    return lines[lines.index(b"\n") + 1 :]


def pack_path(record: Path) -> Path:
    """Return the path of the pack that a record belongs to, by that of its own file."""
    return record.parent.parent / (record.parent.name + SUFFIX)


def pack_with(record: Path) -> Pack | None:
    """Return the pack that has a record, by the path of its own file, or None.

    Raises:
        UsageError: If there is a pack, and it is damaged.
    """
    pack = open_pack(pack_path(record))
    return pack if pack is not None and record.name in pack.summaries else None


def record_bytes(path: Path) -> bytes:
    """Return the bytes of a record's own file, from it or from its pack.

    Raises:
        OSError: If there is none.
        UsageError: If the pack is damaged.
    """
    try:
        return read_bytes(path)
    except FileNotFoundError:
        if (pack := pack_with(path)) is None:
            raise
        return pack.record(path.name)


def open_pack(path: Path) -> Pack | None:
    """Return a pack, read once as long as its file is the same; None if there is none."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _opened(path, status.st_ino, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1024)
def _opened(path: Path, *_version: int) -> Pack:
    return Pack(path)


def packed(records: Mapping[str, bytes]) -> bytes:
    """Return the content of a pack of records, the bytes of each by the name of its file.

    Raises:
        ValueError: If one has a tab, or does not end in a line break; no record that was written by
            this suite.
    """
    summaries, lines = [], []
    for name, data in sorted(records.items()):
        if b"\t" in data or not data.endswith(b"\n"):
            raise ValueError(f"{name}: has a tab, or no line break at its end")
        part = from_json(data)["capmoe"]
        rest = {key: value for key, value in part.items() if key not in _DETAILS}
        summaries.append({"file": name, "size": len(data), **rest})
        lines.append(data[:-1].replace(b"\n", b"\t") + b"\n")
    # Indented as a record is, so that a record's line repeats what its summary says.
    head = json.dumps({"pack": _FORMAT, "records": summaries}, indent=1).replace("\n", "\t")
    content = b"".join([head.encode() + b"\n", *lines])
    body: bytes = pa.Codec("zstd", compression_level=_LEVEL).compress(content, asbytes=True)
    return body + _seal(body)


def _seal(body: bytes) -> bytes:
    return _SKIPPED + hashlib.sha256(body).digest()
