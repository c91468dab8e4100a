"""Read a trace of any kind; the path says which."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

from capmoe_eval.errors import UsageError, shown

from capmoe_serve.readers.recordings import read_sglang
from capmoe_serve.readers.responses import read_responses
from capmoe_serve.trace import OWN_ARRAYS, SUFFIX, Trace, check_regular, load_trace

EXAMPLE: Final = "example"
"""Stands for the trace in the package."""


def read_trace(path: Path, n_experts: int | None = None, top_k: int | None = None) -> Trace:
    """Read a trace of ours, of vLLM or SGLang.

    Args:
        path: Ours (``.npz``), responses of vLLM or SGLang (``.jsonl``, or a ``.json`` list of
            them), SGLang's recording (``.pt``), a directory of its ranks' recordings, or
            ``example``.
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
        if not (files := sorted(path.glob("*.pt"))):
            raise UsageError(
                f"{shown(path)}: is a directory without recordings of SGLang (.pt); give one file, "
                "and a model's records by --results"
            )
        trace = read_sglang(files, n_experts)
    elif path.suffix == SUFFIX:
        trace = load_trace(path)
    elif path.suffix in (".json", ".jsonl"):
        check_regular(path)
        trace = read_responses(path, n_experts, top_k)
    elif path.suffix == ".pt":
        trace = read_sglang([path], n_experts)
    else:
        raise UsageError(
            f"{shown(path)}: not the name of a trace; must be a file that ends in {SUFFIX} (ours), "
            ".jsonl (responses of vLLM or SGLang, or a .json list of them) or .pt (SGLang's "
            f"recording); for {OWN_ARRAYS}"
        )
    for field, option, asked, value in (
        ("experts", "--experts", n_experts, trace.n_experts),
        ("top_k", "--top-k", top_k, trace.top_k),
    ):
        if asked not in (None, value) and value is not None:
            raise UsageError(f"{field}={asked}: {shown(path)} has {value}; leave {option} out")
    return trace
