"""Read responses of vLLM or SGLang, a JSON object in each line, as the server sent them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from capmoe_eval.errors import UsageError, first_line, reading
from capmoe_eval.serving.readers import sglang_responses, vllm
from capmoe_eval.serving.readers.padding import without_padding
from capmoe_eval.serving.trace import Array, Trace, unsigned

_FLAGS = {
    "vllm": "start the server with --enable-return-routed-experts (since September 2026 it needs "
    "Model Runner V2)",
    "sglang": "start the server with --enable-return-routed-experts, and send "
    '"return_routed_experts": true with each request',
}
"""The way to get experts from each server; "or" joins them where a file has responses of both."""


def read_responses(path: Path, n_experts: int | None, top_k: int | None = None) -> Trace:
    """Read the experts of the tokens of responses; see the modules of the servers for the fields.

    Each choice is a request; the responses do not say which forward computed a token. The last
    token of an answer has no experts, since nothing was computed from it.

    Raises:
        UsageError: If the responses have no experts, or E (of SGLang also K) is not given.
    """
    with reading(path, "not read", "give a JSON response of vLLM or SGLang in each line"):
        if n_experts is None:
            raise UsageError(
                "responses do not say how many experts a layer has; add --experts E (num_experts "
                "or n_routed_experts in the model's config.json)"
            )
        return _trace(path, n_experts, top_k)


def _trace(path: Path, n_experts: int, top_k: int | None) -> Trace:
    parts: list[Array] = []
    requests: list[int] = []
    n_requests = 0
    models: set[str] = set()
    servers: set[str] = set()
    for number, response in _responses(path):
        of_sglang = sglang_responses.is_of_sglang(response)
        servers.add("sglang" if of_sglang else "vllm")
        models.add(str(response.get("model")))
        try:
            routed = list(
                sglang_responses.routed(response, top_k) if of_sglang else vllm.routed(response)
            )
        except (
            *(ValueError, KeyError, TypeError, AttributeError, EOFError),
            # Of what the response, or the header of an array in it, says.
            *(MemoryError, OverflowError, RecursionError, SyntaxError, TokenError),
        ) as error:
            raise UsageError(f"line {number}: routed_experts: {first_line(error)}") from error
        parts += [_narrow(ids) for _, ids in routed]
        requests += [n_requests + choice for choice, _ in routed]
        n_requests += len(response.get("choices", (response,)))
    if not servers:
        raise UsageError("is empty; give a JSON response of vLLM or SGLang in each line")
    if not parts:
        flags = " or ".join(_FLAGS[server] for server in sorted(servers))
        raise UsageError(f"no response has routed_experts; {flags}")
    if len({part.shape[1:] for part in parts}) > 1:
        raise UsageError("routed_experts: responses differ in layers or top-k; split the file")
    recorded = without_padding(np.concatenate(parts))
    if "sglang" in servers:
        sglang_responses.check_top_k(recorded.ids, n_experts)
    request_T = np.repeat(requests, [len(part) for part in parts])[recorded.token]
    return Trace(
        n_experts=n_experts,
        expert_TLK=unsigned(recorded.ids),
        request_T=request_T,
        layers=tuple(map(str, recorded.layer)),
        model=", ".join(sorted(models - {"None"})) or None,
        source=" and ".join(sorted(servers)) + recorded.remark,
    )


def _responses(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the responses of a file with the numbers of their lines; a line may have a list."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                content = _parsed(line, number)
                for response in content if isinstance(content, list) else [content]:
                    _check(response, number)
                    yield number, response


def _parsed(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"line {number}: not a whole JSON object ({error.msg} at column {error.colno}); give a "
            "response in each line (jq -c), without stream"
        ) from error
    except RecursionError as error:
        raise UsageError(
            f"line {number}: nested too deeply; give a response in each line"
        ) from error


def _check(response: Any, number: int) -> None:
    """Refuse what is no response: no object with choices, and none of SGLang's ``/generate``."""
    fields = response if isinstance(response, dict) else {}
    choices = fields.get("choices")
    if isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices):
        return
    if choices is None and isinstance(fields.get("meta_info"), dict):
        return
    raise UsageError(
        f"line {number}: no response of vLLM or SGLang, which has choices, or meta_info"
    )


def _narrow(ids: Array) -> Array:
    """Return ids in as few bytes as hold them: those of all responses are kept together."""
    kind = np.result_type(*map(np.min_scalar_type, (ids.min(initial=0), ids.max(initial=0))))
    return ids.astype(kind, copy=False)
