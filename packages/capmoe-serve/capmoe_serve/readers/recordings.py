"""Read recordings that torch wrote: SGLang's ``.pt``, and workloads of Megatron-LM.

SGLang's expert distribution recorder: ``python/sglang/srt/eplb/expert_distribution.py`` of
sgl-project/sglang (commit 02295fe5), ``_StatAccumulator.dump`` and ``_DetailAccumulator.dump``;
``forward_mode`` is a ``ForwardMode`` of ``python/sglang/srt/model_executor/forward_batch_info.py``
(commit 003bbaf9).

Megatron-LM's benchmark of token imbalance: ``benchmarks/moe/token_imbalance/trace.py`` ("trace v1")
of NVIDIA/Megatron-LM, pull request 7488 (commit 241aa13a), which ``benchmark.py --write-trace``
writes for workloads W0 to W7.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from capmoe_eval.errors import UsageError, first_line, reading, shown
from capmoe_eval.experiment.files import read_bytes

from capmoe_serve.readers.padding import left_out, without_padding
from capmoe_serve.trace import Array, Trace, unsigned
from capmoe_serve.trace_checks import check_pairs
from capmoe_serve.trace_file import check_regular

MANIFEST = "manifest.json"
_SCHEMA = 1
_MAP = "last_physical_to_logical_map"
_PROMPT, _DECODE = 1, 2

# Shape suffixes: S steps, L layers of the model (dense ones, too), P physical experts (with
# redundant copies), E logical experts, T tokens, K places (8, whatever the model's top-k).


def read_sglang(path: Path, n_experts: int | None = None) -> Trace:
    """Read a recording of any mode: ``stat`` and ``per_pass`` count, ``per_token`` has the experts.

    - ``stat``: ``logical_count`` [S, L, E], summed over all ranks by the server itself. Its buffer
      is circular unless ``--expert-distribution-recorder-buffer-size -1``: steps may be rotated.
    - ``per_token``: ``records``, a dictionary for each forward with ``topk_ids_of_layer`` [L, T, K]
      of physical experts and its ``forward_mode``; ``per_pass``: with ``global_physical_count``
      [L, P]. Both are of one rank. ``last_physical_to_logical_map`` [L, P] makes logical experts of
      the physical ones.

    Layers and steps in which nothing was counted are left out; ``layers`` numbers the others.

    Raises:
        UsageError: If it is no such file; one line names it and the field.
    """
    content = load_tensors(path)
    fix = (
        "give a file that SGLang's /dump_expert_distribution_record wrote, after requests were "
        "served"
    )
    with reading(path, "unexpected layout", fix):
        if isinstance(content, Mapping) and "logical_count" in content:
            return _counted(array("logical_count", content["logical_count"]), "stat")
        if isinstance(content, Mapping) and content.get("records"):
            return _recorded(content, n_experts)
        raise UsageError(f"has neither logical_count nor records; {fix}")


def _counted(count_SLE: Array, mode: str) -> Trace:
    if count_SLE.ndim not in (2, 3):
        raise UsageError(
            f"logical_count: {list(count_SLE.shape)}; must be [steps, layers, experts], or summed "
            "over steps"
        )
    count_SLE = count_SLE.reshape(-1, *count_SLE.shape[-2:])  # a sum over steps has none
    steps, layers = (np.flatnonzero(count_SLE.any(axis=axes)) for axes in ((1, 2), (0, 2)))
    if not len(steps):
        raise UsageError("logical_count: all are 0; no token was recorded")
    return Trace(
        n_experts=count_SLE.shape[2],
        load_SLE=count_SLE[np.ix_(steps, layers)],
        layers=tuple(map(str, layers)),
        source=f"sglang {mode}{left_out(layers, count_SLE.shape[1])}",
    )


def _recorded(content: Mapping[str, Any], n_experts: int | None) -> Trace:
    records: Sequence[Mapping[str, Any]] = content["records"]
    records = sorted(records, key=lambda record: int(record["forward_pass_id"]))
    rank = f"rank {records[0].get('rank', 'unknown')}"
    logical_LP = _map(content.get(_MAP))
    if logical_LP is not None:
        n_experts = int(logical_LP.max()) + 1
    if "topk_ids_of_layer" not in records[0]:
        if logical_LP is None or n_experts is None:
            raise UsageError(f"{_MAP}: is missing; the counts are of copies")
        count_SLP = np.stack(_arrays(records, "global_physical_count"))
        check_pairs("global_physical_count", count_SLP)
        count_SLE = np.zeros((*count_SLP.shape[:2], n_experts), dtype=np.int64)
        for layer, logical_P in enumerate(logical_LP):
            np.add.at(count_SLE[:, layer].T, logical_P, count_SLP[:, layer].T)
        return _counted(count_SLE, f"per_pass, {rank}")
    if n_experts is None:
        raise UsageError(f"n_experts: the recording has no {_MAP}; add --experts E")
    ids_LTK = _arrays(records, "topk_ids_of_layer")
    step_T = np.repeat(np.arange(len(records)), [ids.shape[1] for ids in ids_LTK])
    recorded = without_padding(np.concatenate(ids_LTK, axis=1).transpose(1, 0, 2))
    ids, step_T = recorded.ids, step_T[recorded.token]
    if logical_LP is not None:
        if (highest := int(ids.max())) >= logical_LP.shape[1]:
            raise UsageError(
                f"topk_ids_of_layer={highest}: the map has {logical_LP.shape[1]} physical experts; "
                "record with --disable-shared-experts-fusion"
            )
        ids = logical_LP[recorded.layer][np.arange(len(recorded.layer))[:, None], ids]
    decode_S, mixed = _kinds([records[step].get("forward_mode") for step in np.unique(step_T)])
    return Trace(
        n_experts=n_experts,
        expert_TLK=unsigned(ids),
        step_T=step_T,
        decode_S=decode_S,
        layers=tuple(map(str, recorded.layer)),
        source=f"sglang per_token, {rank}{mixed}{recorded.remark}",
    )


def _arrays(records: Sequence[Mapping[str, Any]], field: str) -> list[Array]:
    return [array(field, record[field]) for record in records]


def _map(tensor: Any) -> Array | None:
    """Return the logical expert of every physical one [L, P]; None where the file does not say."""
    if tensor is None:
        return None
    logical_LP = array(_MAP, tensor)
    if logical_LP.ndim != 2 or not logical_LP.size or logical_LP.dtype.kind not in "ui":
        raise UsageError(
            f"{_MAP}: {logical_LP.dtype} {list(logical_LP.shape)}; must be integers [layers, "
            "physical experts]"
        )
    lowest, highest = int(logical_LP.min()), int(logical_LP.max())
    if lowest < 0 or highest >= logical_LP.shape[1]:
        raise UsageError(
            f"{_MAP}={lowest if lowest < 0 else highest}: of {logical_LP.shape[1]} physical "
            f"experts, the logical ones are 0 to {logical_LP.shape[1] - 1} at most"
        )
    return logical_LP


def _is_other(mode: object) -> bool:
    """Return whether a mode is neither of prompts nor of decoding; 2.0 and true are neither."""
    return type(mode) is not int or mode not in (_PROMPT, _DECODE)


def _kinds(modes: Sequence[object]) -> tuple[Array | None, str]:
    """Return which steps are of decoding, and which modes do not say so, to follow the source.

    ``forward_mode`` is 1 for prompts (EXTEND) and 2 for decoding (DECODE). Others, such as 3
    (MIXED, a part of a prompt with running requests) or 5 (verified drafts), are neither, and the
    numbers above 5 differ between versions.
    """
    others = sorted({shown(mode) for mode in modes if _is_other(mode)})
    if not others:
        return np.array([mode == _DECODE for mode in modes]), ""
    if others == ["null"]:  # an old version
        return None, ""
    return None, f"; forward_mode {', '.join(others)} is neither of prompts nor of decoding"


def read_megatron(path: Path) -> Trace:
    """Read the directory of one workload: one step of one layer, with the gates of the experts.

    ``manifest.json`` names the tensors ``expert_ids`` and ``gates`` [T, K] and their SHA-256.
    ``source_rank`` [T] becomes the request of a token.

    Raises:
        UsageError: If a file is missing, changed or of another version.
    """
    fix = "give the directory of a workload that its benchmark.py --write-trace wrote"
    with reading(path, "no trace of Megatron-LM", fix):
        manifest = json.loads(read_bytes(path / MANIFEST))
        if not isinstance(manifest, dict):
            raise ValueError("manifest.json: must be a JSON object")
        if manifest["schema_version"] != _SCHEMA:
            raise UsageError(
                f"schema_version={manifest['schema_version']}: only {_SCHEMA} is known; write the "
                "trace with the benchmark of pull request 7488"
            )
        ids_TK, gates_TK, rank_T = (
            _tensor(path, name, manifest["tensors"][name])
            for name in ("expert_ids", "gates", "source_rank")
        )
        return Trace(
            n_experts=manifest["num_experts"],
            expert_TLK=unsigned(ids_TK)[:, None],
            score_TLK=gates_TK[:, None],
            step_T=rank_T * 0,
            request_T=rank_T,
            top_k=manifest["topk"],
            layers=(str(manifest["logical_layer_id"]),),
            source=f"megatron {manifest['workload_id']}, seed {manifest['seed']}",
        )


def _tensor(path: Path, name: str, meta: dict[str, Any]) -> Array:
    file = path / meta["file"]
    if not file.resolve().is_relative_to(path.resolve()):
        raise UsageError(f"tensors.{name}.file={meta['file']}: lies outside; must be below {path}")
    check_regular(file)
    if hashlib.sha256(file.read_bytes()).hexdigest() != meta["sha256"]:
        raise UsageError(f"tensors.{name}: its SHA-256 is not the manifest's; the file was changed")
    return array(f"tensors.{name}", load_tensors(file))


def load_tensors(path: Path) -> Any:
    """Return the tensors, numbers, texts, lists and dictionaries of a file of ``torch.save``.

    Raises:
        UsageError: If it holds anything else, or is no such file.
    """
    import torch

    check_regular(path)
    try:
        with path.open("rb") as file:
            start = file.read(2)
        if not start.startswith((b"PK", b"\x80")):  # an archive, or a pickle
            raise ValueError("it begins with other bytes")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of versions of pickles
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path}: not read, because it holds more than tensors and plain values, and a pickle "
            "can run any program (torch.load refuses it with weights_only=True); save tensors, "
            "numbers and lists alone"
        ) from error
    except Exception as error:  # a damaged pickle raises what its instructions meet
        reason = first_line(error).partition(". ")[0]
        raise UsageError(
            f"{path}: no whole file of torch.save ({reason}); write it or copy it again"
        ) from error


def array(field: str, tensor: Any) -> Array:
    """Return a tensor that a file holds as an array; bfloat16, which numpy lacks, as float32.

    Raises:
        UsageError: If it is no dense tensor, or repeats its numbers (``expand``): a small file
            could then stand for any size.
    """
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        raise UsageError(f"{field}: is no dense tensor; save one by torch.save")
    if tensor.is_quantized or tensor.is_meta:
        raise UsageError(f"{field}: is quantized, or without numbers; save plain numbers")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UsageError(f"{field}: repeats its numbers (expand); save tensor.contiguous()")
    tensor = tensor.detach()
    numbers: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return numbers
