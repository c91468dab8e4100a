"""Read a trace of any kind; the path says which."""

import json
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, Final

from capmoe_eval.errors import UsageError, shown
from capmoe_eval.experiment.files import read_bytes

from capmoe_serve.readers.recordings import RECORDINGS, read_counts, read_recordings
from capmoe_serve.readers.responses import read_responses
from capmoe_serve.trace import OWN_ARRAYS, SUFFIX, Trace, check_regular, load_trace

EXAMPLE: Final = "example"
"""Stands for the trace in the package."""


def read_trace(path: Path, n_experts: int | None = None, top_k: int | None = None) -> Trace:
    """Read a trace of ours, of vLLM or SGLang.

    Args:
        path: Ours (``.npz``), responses of vLLM or SGLang (``.jsonl``, or a ``.json`` list of
            them), SGLang's recording (``.pt``, ``.csv``) or counts (``.json``), a directory of its
            ranks' recordings, or ``example``.
        n_experts: Routed experts E of a layer, which responses do not say.
        top_k: Experts K of a token, which SGLang's responses do not say.

    Raises:
        UsageError: If there is no such file, it cannot be read as what its name says, or it has
            another E or K.
    """
    if str(path) == EXAMPLE:
        with resources.as_file(resources.files("capmoe_serve") / "data/example.npz") as example:
            trace = load_trace(example)
    elif not path.exists():
        raise UsageError(f"{shown(path)}: no such file or directory; give the path of a trace")
    elif path.is_dir():
        trace = _in_directory(path, n_experts, top_k)
    else:
        check_regular(path)
        trace = _in_file(path, n_experts, top_k)
    for field, option, asked, value in (
        ("experts", "--experts", n_experts, trace.n_experts),
        ("top_k", "--top-k", top_k, trace.top_k),
    ):
        if asked not in (None, value) and value is not None:
            raise UsageError(f"{field}={asked}: {shown(path)} has {value}; leave {option} out")
    return trace


def _in_file(path: Path, n_experts: int | None, top_k: int | None) -> Trace:
    if path.suffix == SUFFIX:
        return load_trace(path)
    content: Any = None
    if path.suffix == ".json":
        with suppress(ValueError, RecursionError):  # then it is not the name of a trace
            content = json.loads(read_bytes(path))
    fields = content.keys() if isinstance(content, dict) else set()
    if path.suffix == ".jsonl" or isinstance(content, list) or fields & {"choices", "meta_info"}:
        return read_responses(path, n_experts, top_k)
    if "logical_count" in fields:
        return read_counts(content, path)
    if path.suffix in RECORDINGS:
        return read_recordings([path], n_experts, top_k)
    raise UsageError(
        f"{shown(path)}: not the name of a trace; must be a file that ends in {SUFFIX} (ours), "
        ".jsonl (responses of vLLM or SGLang, or a .json list of them), .pt, .csv or .json "
        f"(SGLang's recordings and counts); for {OWN_ARRAYS}"
    )


def _in_directory(path: Path, n_experts: int | None, top_k: int | None) -> Trace:
    """Read the recordings of several ranks, which are all the files of their kind there."""
    for suffix in RECORDINGS:
        if files := sorted(path.glob(f"*{suffix}")):
            return read_recordings(files, n_experts, top_k)
    raise UsageError(
        f"{shown(path)}: is a directory without recordings of SGLang (.pt, .csv); give the "
        "file of a trace"
    )
