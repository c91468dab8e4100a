"""Read a trace of any kind; the path says which."""

from __future__ import annotations

from pathlib import Path

from capmoe_eval.errors import UsageError, shown
from capmoe_eval.serving.readers.megatron import MANIFEST, read_megatron
from capmoe_eval.serving.readers.sglang import read_sglang
from capmoe_eval.serving.readers.vllm import read_vllm
from capmoe_eval.serving.trace import Trace
from capmoe_eval.serving.trace_file import SUFFIXES, load_trace


def read_trace(path: Path, n_experts: int | None = None) -> Trace:
    """Read a trace of ours, of vLLM, SGLang or Megatron-LM.

    Args:
        path: Ours (``.npz``, ``.parquet``), responses of vLLM (``.jsonl``), SGLang's recording
            (``.pt``), or the directory of a workload of Megatron-LM.
        n_experts: Routed experts E of a layer, which vLLM's responses do not say.

    Raises:
        UsageError: If there is no such file, it cannot be read as what its name says, or it has
            another number of experts.
    """
    if not path.exists():
        raise UsageError(f"{shown(path)}: no such file or directory; give the path of a trace")
    if path.is_dir():
        trace = _in_directory(path)
    elif path.suffix in SUFFIXES:
        trace = load_trace(path)
    elif path.suffix == ".jsonl":
        trace = read_vllm(path, n_experts)
    elif path.suffix == ".pt":
        trace = read_sglang(path, n_experts)
    else:
        raise UsageError(
            f"{shown(path)}: not the name of a trace; must end in {', '.join(SUFFIXES)} (ours), "
            ".jsonl (responses of vLLM) or .pt (SGLang), or be a directory (Megatron-LM)"
        )
    if n_experts not in (None, trace.n_experts):
        raise UsageError(
            f"experts={n_experts}: {shown(path)} has {trace.n_experts} in a layer; leave --experts "
            "out"
        )
    return trace


def _in_directory(path: Path) -> Trace:
    if (path / MANIFEST).is_file():
        return read_megatron(path)
    if files := sorted(file for file in path.iterdir() if file.suffix in (".jsonl", ".pt")):
        raise UsageError(
            f"{shown(path)}: a directory with {len(files)} files of a server; give one of them, "
            f"such as {files[0]}"
        )
    raise UsageError(
        f"{shown(path)}: a directory without {MANIFEST}; give a file, or the directory of one "
        "workload of Megatron-LM"
    )
