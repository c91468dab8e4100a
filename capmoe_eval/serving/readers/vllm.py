"""Read the routed experts that vLLM returns with ``--enable-return-routed-experts``.

Layouts of vllm-project/vllm: lists, ``docs/training/routed_experts_replay.md`` of v0.21.0 (commit
0087e005); base64 of ``.npy``, ``vllm/entrypoints/openai/completion/protocol.py`` (commit 002032ee).
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from capmoe_eval.errors import UsageError, first_line, reading
from capmoe_eval.serving.readers.padding import without_padding
from capmoe_eval.serving.trace import Array, Trace, unsigned


def read_vllm(path: Path, n_experts: int | None) -> Trace:
    """Read responses, a JSON object in each line, as the server sent them.

    The experts [tokens, layers, top-k] are in ``choices[].routed_experts``: of the generated
    tokens, with the prompt's in ``prompt_routed_experts`` beside ``choices`` (v0.21, lists); or of
    prompt and answer together (later, base64 of an ``.npy``). The last token of an answer has none,
    since nothing was computed from it. Each choice is a request; the responses do not say which
    forward computed a token.

    Raises:
        UsageError: If the responses have no experts, or E is not given.
    """
    with reading(path, "not read", "give a JSON response of vLLM in each line"):
        if n_experts is None:
            raise UsageError(
                "responses do not say how many experts a layer has; add --experts E (num_experts "
                "or n_routed_experts in the model's config.json)"
            )
        return _trace(path, n_experts)


def _trace(path: Path, n_experts: int) -> Trace:
    parts: list[Array] = []
    requests: list[int] = []
    n_requests = 0
    models: set[str] = set()
    for number, response in _responses(path):
        models.add(str(response.get("model")))
        try:
            found = list(_routed(response))
        except (ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
            raise UsageError(f"line {number}: routed_experts: {first_line(error)}") from error
        parts += [_narrow(ids) for _, ids in found]
        requests += [n_requests + choice for choice, _ in found]
        n_requests += len(response["choices"])
    if not models:
        raise UsageError("is empty; give a JSON response of vLLM in each line")
    if not parts:
        raise UsageError(
            "no response has routed_experts; start the server with --enable-return-routed-experts"
        )
    if len({part.shape[1:] for part in parts}) > 1:
        raise UsageError("routed_experts: responses differ in layers or top-k; split the file")
    filled = without_padding(np.concatenate(parts))
    request_T = np.repeat(requests, [len(part) for part in parts])[filled.token]
    return Trace(
        n_experts=n_experts,
        expert_TLK=unsigned(filled.ids),
        request_T=request_T,
        layers=tuple(map(str, filled.layer)),
        model=", ".join(sorted(models - {"None"})) or None,
        source="vllm",
    )


def _responses(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the responses of a file with the numbers of their lines."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _response(line, f"line {number}")


def _response(line: str, place: str) -> dict[str, Any]:
    """Return the response of a line."""
    try:
        response: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{place}: not a whole JSON object ({error.msg} at column {error.colno}); give a "
            "response of vLLM in each line (jq -c), without stream"
        ) from error
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise UsageError(f"{place}: no response of vLLM with choices")
    return dict(response)


def _routed(response: dict[str, Any]) -> Iterator[tuple[int, Array]]:
    """Yield the experts of a response's prompt and answers, each with the number of its choice."""
    if (prompt := response.get("prompt_routed_experts")) is not None:
        yield 0, _decoded(prompt)
    for number, choice in enumerate(response["choices"]):
        routed = choice.get("routed_experts")  # null where the request was aborted
        if routed not in (None, [], ""):
            yield number, _decoded(routed)


def _decoded(routed: Any) -> Array:
    ids: Array
    if isinstance(routed, str):
        data = base64.b64decode(routed, validate=True)
        ids = np.load(io.BytesIO(data), allow_pickle=False)
    else:
        try:
            ids = np.array(routed)
        except ValueError:
            raise UsageError("tokens differ in their layers or in their top-k") from None
    if ids.ndim != 3 or ids.dtype.kind not in "ui":
        raise UsageError(f"{ids.dtype} {list(ids.shape)}; must be integers [tokens, layers, top-k]")
    return ids


def _narrow(ids: Array) -> Array:
    """Return ids in as few bytes as hold them: those of all responses are kept together."""
    kind = np.result_type(*map(np.min_scalar_type, (ids.min(initial=0), ids.max(initial=0))))
    return ids.astype(kind, copy=False)
