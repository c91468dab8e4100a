"""Read the ``.pt`` of SGLang's expert distribution recorder.

Layout: ``python/sglang/srt/eplb/expert_distribution.py`` of sgl-project/sglang (commit 02295fe5),
``_StatAccumulator.dump`` and ``_DetailAccumulator.dump``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from capmoe_eval.errors import UsageError, reading
from capmoe_eval.serving.readers.padding import without_padding
from capmoe_eval.serving.readers.tensor_file import load_tensors
from capmoe_eval.serving.trace import Array, Trace, unsigned

# Shape suffixes: S steps, L layers of the model (dense ones, too), P physical experts (with
# redundant copies), E logical experts, T tokens, K places (8, whatever the model's top-k).


def read_sglang(path: Path, n_experts: int | None = None) -> Trace:
    """Read a recording of any mode: ``stat`` and ``per_pass`` count, ``per_token`` has the experts.

    - ``stat``: ``logical_count`` [S, L, E], summed over all ranks by the server itself. Its buffer
      is circular unless ``--expert-distribution-recorder-buffer-size -1``: steps may be rotated.
    - ``per_token``: ``records``, a dictionary for each forward with ``topk_ids_of_layer`` [L, T, K]
      of physical experts; ``per_pass``: with ``global_physical_count`` [L, P]. Both are of one
      rank. ``last_physical_to_logical_map`` [L, P] makes logical experts of the physical ones.

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
            return _counted(content["logical_count"].numpy(), "stat")
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
        source=f"sglang {mode}",
    )


def _recorded(content: Mapping[str, Any], n_experts: int | None) -> Trace:
    records: Sequence[Mapping[str, Any]] = content["records"]
    records = sorted(records, key=lambda record: int(record["forward_pass_id"]))
    rank = f"rank {records[0].get('rank', 'unknown')}"
    mapped = content.get("last_physical_to_logical_map")
    logical_LP = None if mapped is None else mapped.numpy()
    if logical_LP is not None:
        n_experts = int(logical_LP.max()) + 1
    if "topk_ids_of_layer" not in records[0]:
        if logical_LP is None or n_experts is None:
            raise UsageError("last_physical_to_logical_map: is missing; the counts are of copies")
        count_SLP = np.stack([record["global_physical_count"].numpy() for record in records])
        is_copy_LPE = logical_LP[:, :, None] == np.arange(n_experts)
        count_SLE = np.einsum("slp,lpe->sle", count_SLP, is_copy_LPE.astype(np.int64))
        return _counted(count_SLE, f"per_pass, {rank}")
    if n_experts is None:
        raise UsageError(
            "n_experts: the recording has no last_physical_to_logical_map; add --experts E"
        )
    ids_LTK = [record["topk_ids_of_layer"].numpy() for record in records]
    step_T = np.repeat(np.arange(len(records)), [ids.shape[1] for ids in ids_LTK])
    filled = without_padding(np.concatenate(ids_LTK, axis=1).transpose(1, 0, 2))
    ids = filled.ids
    if logical_LP is not None:
        if (highest := int(ids.max())) >= logical_LP.shape[1]:
            raise UsageError(
                f"topk_ids_of_layer={highest}: the map has {logical_LP.shape[1]} physical experts; "
                "record with --disable-shared-experts-fusion"
            )
        ids = logical_LP[filled.layer][np.arange(len(filled.layer))[:, None], ids]
    return Trace(
        n_experts=n_experts,
        expert_TLK=unsigned(ids),
        step_T=step_T[filled.token],
        layers=tuple(map(str, filled.layer)),
        source=f"sglang per_token, {rank}",
    )
