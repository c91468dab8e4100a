"""Traces that cannot be read: cut off, damaged, crafted to take all memory, or no files at all."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from capmoe_serve.trace import Trace
from capmoe_serve.trace_file import save_trace

TRACE = Trace(4, np.tile(np.arange(2, dtype=np.uint8), (999, 1, 1)))


def write_traces(place: Path) -> None:
    """Write traces that are cut off, of another kind or of a server, below a directory."""
    for name in ("recorded", "workload"):
        (place / name).mkdir(parents=True)
    np.savez(place / "other.npz", a=np.arange(3))
    about = {"schema": 1, "n_experts": 4, "layers": ["0"], "field": 1}
    np.savez(place / "later.npz", about=np.array(json.dumps(about)), load_SLE=np.ones((1, 1, 4)))
    pd.DataFrame({"a": [1]}).to_parquet(place / "other.parquet")
    for number in range(2):
        counted = {"logical_count": torch.ones(2, 3, 8, dtype=torch.int64)}
        torch.save(counted, place / f"recorded/{number}.pt")
    torch.save({"logical_count": torch.ones(8)}, place / "flat.pt")
    torch.save({"weight": torch.ones(8)}, place / "other.pt")
    for kind in ("npz", "parquet", "pt"):
        path = place / f"other.{kind}"
        (place / f"cut.{kind}").write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    responses = {
        "empty": "",
        "cut": '{"choices": [{"routed_experts": [[[0, 1',
        "chat": '{"choices": [{"message": {"content": "a"}}]}',
        "words": '{"choices": ["a"]}',
        "ragged": '{"choices": [{"routed_experts": [[[0, 1], [1]]]}]}',
        "number": '{"choices": [{"routed_experts": 5}]}',
    }
    for name, text in responses.items():
        (place / f"{name}.jsonl").write_text(text)
    (place / "text.pt").write_text("a")
    _write_others(place)
    _write_damaged(place)
    _write_crafted(place)
    (place / "workload/manifest.json").write_text('{"schema_version": 1}')


def _write_others(place: Path) -> None:
    """Write inputs that are no regular files, which may never end."""
    for name in ("fifo.npz", "fifo.jsonl", "fifo.parquet", "fifo.pt", "recorded/fifo.json"):
        os.mkfifo(place / name)
    (place / "zero.npz").symlink_to("/dev/zero")


def _write_damaged(place: Path) -> None:
    """Write traces of which bits have changed."""
    for name in ("flipped.npz", "squeezed.npz", "flipped.parquet", "encrypted.npz"):
        save_trace(TRACE, place / name, compress=name == "squeezed.npz")
        data = bytearray((place / name).read_bytes())
        if name == "encrypted.npz":
            for start, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
                for part in bytes(data).split(start)[:-1]:
                    data[data.index(start, len(part)) + flags] |= 1
                data[data.index(start) + flags] |= 1
        else:
            data[_middle(place / name)] ^= 255
        (place / name).write_bytes(data)


def _middle(path: Path) -> int:
    """Return the place of a byte of the experts: in the middle, or the first of packed ones."""
    if path.suffix == ".parquet":
        return 40
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo("expert_TLK.npy")
    lengths = path.read_bytes()[member.header_offset + 26 : member.header_offset + 30]
    start = member.header_offset + 30 + sum(struct.unpack("<HH", lengths))
    return start if member.compress_type else start + member.compress_size // 2


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def _write_npz(path: Path, packing: int = zipfile.ZIP_STORED, **fields: Any) -> None:
    """Write a trace of counts with other fields of ``about``, or arrays in place of them."""
    about: dict[str, Any] = {"schema": 1, "n_experts": 4, "layers": ["0"], "source": "made"}
    arrays = {"load_SLE": _npy(np.ones((2, 1, 4), dtype=np.int64))}
    for name, value in fields.items():
        if isinstance(value, bytes):
            arrays[name] = value
        else:
            about[name] = value
    if "expert_TLK" in fields:
        del arrays["load_SLE"]
    with zipfile.ZipFile(path, "w", packing) as archive:
        archive.writestr("about.npy", _npy(np.array(json.dumps(about))))
        for name, content in arrays.items():
            archive.writestr(f"{name}.npy", content)


def _write_crafted(place: Path) -> None:
    """Write traces that say what cannot be."""
    vast = {"descr": "<i8", "fortran_order": False, "shape": (10**12, 1, 4)}
    ids, score = np.zeros((2, 1, 1), dtype=np.uint8), np.full((2, 1, 1), 1e308)
    for name, fields in {
        "vast": {"load_SLE": _header(f"{vast}\n")},
        "braces": {"load_SLE": _header("(" * 900 + "\n")},
        "wide": {"n_experts": 10**10},
        "nameless": {"source": None},
        "escape": {"model": "\x1b[31m"},
        "named": {"layers": "abcd"},
        "high": {"load_SLE": _npy(np.array([[[2**62, 0, 0, 0]]]))},
        "loud": {"expert_TLK": _npy(ids), "score_TLK": _npy(score)},
    }.items():
        _write_npz(place / f"{name}.npz", **fields)
    _write_npz(place / "packed.npz", zipfile.ZIP_LZMA)
    frame = pd.DataFrame({"layer": [0, 1], "expert_0": np.array([1, 2], dtype=np.uint8)})
    frame.attrs.update(schema=1, n_experts=4, layers=["0"], source="made")
    frame.to_parquet(place / "relabelled.parquet")
    counts = torch.ones(1, 1, 1, dtype=torch.int64)
    torch.save({"logical_count": counts.expand(9**5, 9**5, 4)}, place / "expanded.pt")
    torch.save({"logical_count": torch.ones(2, 1, 4, requires_grad=True)}, place / "gradient.pt")
    (place / "memo.pt").write_bytes(b"\x80\x02h\x05.")  # a pickle that asks for what it never put
    braces = b64encode(_header("(" * 900 + "\n")).decode()
    for name, routed in {
        "header": json.dumps(braces),
        "negative": "[[[-2, 1]]]",
        "vllm": "[[[0, 1]], [[2, 3]]]",
    }.items():
        (place / f"{name}.jsonl").write_text(f'{{"choices": [{{"routed_experts": {routed}}}]}}')
    (place / "nested.jsonl").write_text("[" * 10**5)
    (place / "vllm.csv").write_text("0,1")
