"""Read the traces of Megatron-LM's benchmark of token imbalance.

Layout: ``benchmarks/moe/token_imbalance/trace.py`` ("trace v1") of NVIDIA/Megatron-LM, pull request
7488 (commit 241aa13a), which ``benchmark.py --write-trace`` writes for workloads W0 to W7.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from capmoe_eval.errors import UsageError, reading
from capmoe_eval.experiment.files import read_bytes
from capmoe_eval.serving.readers.tensor_file import array, load_tensors
from capmoe_eval.serving.trace import Array, Trace, unsigned
from capmoe_eval.serving.trace_file import check_regular

MANIFEST = "manifest.json"
_SCHEMA = 1


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
