"""Find the experts in a response of vLLM, which has them with ``--enable-return-routed-experts``.

Layouts of vllm-project/vllm: lists, ``docs/training/routed_experts_replay.md`` of v0.21.0 (commit
0087e005); base64 of ``.npy``, ``vllm/entrypoints/openai/completion/protocol.py`` (commit 002032ee).
Both begin with zeros, ``vllm/model_executor/layers/fused_moe/routed_experts_capturer.py`` (commit
00bd1493): a row for each of ``num_hidden_layers``, where dense ones stay 0.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from capmoe_eval.errors import UsageError
from capmoe_eval.serving.trace import Array


def routed(response: dict[str, Any]) -> Iterator[tuple[int, Array]]:
    """Yield the experts [tokens, layers, top-k], each with the number of its choice.

    They are in ``choices[].routed_experts``: of the generated tokens, with the prompt's in
    ``prompt_routed_experts`` beside ``choices`` (v0.21, lists); or of prompt and answer together
    (later, base64 of an ``.npy``).
    """
    if (prompt := response.get("prompt_routed_experts")) is not None:
        yield 0, _decoded(prompt)
    for number, choice in enumerate(response["choices"]):
        ids = choice.get("routed_experts")  # null where the request was aborted
        if ids not in (None, [], ""):
            yield number, _decoded(ids)


def _decoded(content: Any) -> Array:
    ids: Array
    if isinstance(content, str):
        data = base64.b64decode(content, validate=True)
        ids = np.load(io.BytesIO(data), allow_pickle=False)
    else:
        try:
            ids = np.array(content)
        except ValueError:
            raise UsageError("tokens differ in their layers or in their top-k") from None
    if ids.ndim != 3 or ids.dtype.kind not in "ui":
        raise UsageError(f"{ids.dtype} {list(ids.shape)}; must be integers [tokens, layers, top-k]")
    return ids
