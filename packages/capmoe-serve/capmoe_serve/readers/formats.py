"""Read a trace of any kind; the path says which."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path
from typing import Final

from capmoe_eval.errors import UsageError, shown

from capmoe_serve.readers.recordings import MANIFEST, read_megatron, read_sglang
from capmoe_serve.readers.response_files import holds_responses
from capmoe_serve.readers.responses import read_responses
from capmoe_serve.trace import Trace
from capmoe_serve.trace_file import OWN_ARRAYS, SUFFIXES, check_regular, load_trace

EXAMPLE: Final = "example"
"""Stands for the trace in the package."""
_FILES: Final = (
    f"that ends in {', '.join(SUFFIXES)} (ours), .jsonl (responses of vLLM or SGLang, or a .json "
    "list of them) or .pt (SGLang)"
)


def read_trace(path: Path, n_experts: int | None = None, top_k: int | None = None) -> Trace:
    """Read a trace of ours, of vLLM, SGLang or Megatron-LM.

    Args:
        path: Ours (``.npz``, ``.parquet``), responses of vLLM or SGLang (``.jsonl``, or a
            ``.json`` list of them), SGLang's recording (``.pt``), the directory of a workload of
            Megatron-LM, or ``example``.
        n_experts: Routed experts E of a layer, which responses do not say.
        top_k: Experts K of a token, which SGLang's responses do not say.

    Raises:
        UsageError: If there is no such file, it cannot be read as what its name says, or it has
            another E or K.
    """
    if str(path) == EXAMPLE:
        with as_file(files("capmoe_serve") / "data" / "example.npz") as example:
            trace = load_trace(example)
    elif not path.exists():
        raise UsageError(f"{shown(path)}: no such file or directory; give the path of a trace")
    elif path.is_dir():
        trace = _in_directory(path)
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
    if path.suffix in SUFFIXES:
        return load_trace(path)
    if path.suffix == ".jsonl" or holds_responses(path):
        return read_responses(path, n_experts, top_k)
    if path.suffix == ".pt":
        return read_sglang(path, n_experts)
    raise UsageError(
        f"{shown(path)}: not the name of a trace; must be a file {_FILES}, or a directory "
        f"(Megatron-LM); for {OWN_ARRAYS}"
    )


def _in_directory(path: Path) -> Trace:
    if (path / MANIFEST).is_file():
        return read_megatron(path)
    if recorded := sorted(file for file in path.iterdir() if file.suffix in (".jsonl", ".pt")):
        raise UsageError(
            f"{shown(path)}: a directory with {len(recorded)} files of a server; give one of them, "
            f"such as {recorded[0]}"
        )
    raise UsageError(
        f"{shown(path)}: not the directory of a workload of Megatron-LM, which has a {MANIFEST}; "
        f"give such a directory, or a file {_FILES}"
    )
