"""Read responses of vLLM or SGLang, a JSON object in each line, as the server sent them.

vLLM has the experts with ``--enable-return-routed-experts``. Layouts of vllm-project/vllm: lists,
``docs/training/routed_experts_replay.md`` of v0.21.0 (commit 0087e005); base64 of ``.npy``,
``vllm/entrypoints/openai/completion/protocol.py`` (commit 002032ee). Both begin with zeros,
``vllm/model_executor/layers/fused_moe/routed_experts_capturer.py`` (commit 00bd1493): a row for
each of ``num_hidden_layers``, where dense ones stay 0.

SGLang has them for requests with ``return_routed_experts``. Layout of sgl-project/sglang: base64 of
[tokens, layers, top-k], flat, of int32 or of the type that ``routed_experts_dtype`` beside it names
(``python/sglang/srt/state_capturer/`` of commit a6463a10, ``routed_experts_wire.py``). Tokens are
those of prompt and answer without the last one (commit 05f70dc5,
``test/registered/rl/test_return_routed_experts.py``), layers are ``num_hidden_layers``, where dense
ones are 0 (``routed_experts.py``, commit 024911f2). It is

- in ``meta_info`` of ``/generate``, and of a choice with ``return_meta_info`` (pull request 35323);
- in ``sglext`` beside ``choices``, of the first choice alone (pull request 17648 and later);
- in ``sgl_ext`` of each choice before that (pull request 17434).
"""

from __future__ import annotations

import base64
import io
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np
from pydantic import NonNegativeInt

from capmoe_eval.errors import UsageError, bad_choice, first_line, reading
from capmoe_eval.routing.knobs import check
from capmoe_eval.serving.trace import Array, Trace, unsigned

_ROUTED = "routed_experts"
_TYPES = {"int32": "<i4", "uint16": "<u2", "uint8": "u1"}
_OF_RESPONSES = {"meta_info", "sglext", "sgl_ext"}
_OF_CHOICES = {"meta_info", "sglext", "sgl_ext", "matched_stop"}
"""Fields that SGLang's responses and their choices have, and vLLM's have not."""
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
        of_sglang = _is_of_sglang(response)
        servers.add("sglang" if of_sglang else "vllm")
        models.add(str(response.get("model")))
        try:
            routed = list(_of_sglang(response, top_k) if of_sglang else _of_vllm(response))
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
        _check_top_k(recorded.ids, n_experts)
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


def _is_of_sglang(response: Mapping[str, Any]) -> bool:
    """Return whether SGLang sent a response, by fields that only its responses have."""
    choices = response.get("choices", [])
    return bool(
        _OF_RESPONSES & response.keys() or any(_OF_CHOICES & choice.keys() for choice in choices)
    )


def _of_sglang(response: Mapping[str, Any], top_k: int | None) -> Iterator[tuple[int, Array]]:
    """Yield the experts [tokens, layers, top-k], each with the number of its choice.

    Raises:
        UsageError: If K is None, or the response has another number of experts than its tokens.
    """
    choices = response.get("choices", [response])
    of_choices = [choice.get("meta_info") or {} for choice in choices]
    if any(meta.get(_ROUTED) for meta in of_choices):
        for number, meta in enumerate(of_choices):
            if meta.get(_ROUTED):
                yield number, _by_usage(meta, meta, top_k)
        return
    for part in (response, *choices):
        extension = part.get("sglext") or part.get("sgl_ext") or {}
        if not extension.get(_ROUTED):
            continue
        if len(choices) > 1:
            raise UsageError(
                f"{len(choices)} choices, and usage has the tokens of all together; send "
                '"return_meta_info": true, or "n": 1'
            )
        yield 0, _by_usage(extension, response["usage"], top_k)


def _check_top_k(ids: Array, n_experts: int) -> None:
    """Refuse a K that divides the model's: two halves of a layer would pass for two layers.

    Two layers choose experts on their own, so that some token has an expert in both; two halves of
    a layer have none in common. By chance alone T·L/2·K²/E are: where that is 20 or more, none is
    no chance (e⁻²⁰).
    """
    top_k = ids.shape[2]
    first_TLK, next_TLK = ids[:, :-1:2], ids[:, 1::2]
    places = itertools.product(range(top_k), repeat=2)
    if first_TLK.size * top_k >= 20 * n_experts and not any(
        (first_TLK[:, :, place] == next_TLK[:, :, other]).any() for place, other in places
    ):
        raise UsageError(
            f"top_k={top_k}: no token has an expert in two neighbouring layers, so that these are "
            "parts of one; set --top-k to num_experts_per_tok in the model's config.json"
        )


def _by_usage(part: Mapping[str, Any], usage: Mapping[str, Any], top_k: int | None) -> Array:
    if top_k is None:
        raise UsageError(
            "SGLang does not say how many experts a token has; add --top-k K (num_experts_per_tok "
            "in the model's config.json)"
        )
    name = part.get("routed_experts_dtype") or "int32"
    if name not in _TYPES:
        raise bad_choice("routed_experts_dtype", name, _TYPES)
    ids = np.frombuffer(base64.b64decode(part[_ROUTED], validate=True), dtype=_TYPES[name])
    for field in ("prompt_tokens", "completion_tokens"):
        check(field, usage[field], NonNegativeInt)
    tokens = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    if tokens < 1 or not ids.size or ids.size % (tokens * top_k):
        raise UsageError(
            f"{ids.size} ids are no multiple of {tokens} tokens (prompt_tokens + completion_tokens "
            f"− 1) × top_k={top_k}; set --top-k to num_experts_per_tok, and leave "
            "routed_experts_start_len out of the requests"
        )
    return ids.reshape(tokens, -1, top_k)


def _of_vllm(response: dict[str, Any]) -> Iterator[tuple[int, Array]]:
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


class RecordedIds(NamedTuple):
    """The part of an array of expert ids that holds experts."""

    ids: Array  # [T, L, K], all at least 0
    token: Array  # which rows of the array are left [T]
    layer: Array  # which layers of it are left [L]
    remark: str  # which layers were left out, to follow the source of a trace; empty if none


def without_padding(ids: Array) -> RecordedIds:
    """Return expert ids without layers, tokens and places that a server did not record.

    Servers begin with a buffer of 0 (vLLM, and SGLang's responses) or of −1, and write the layers
    that have a router. So a layer without an id above 0 has no experts. Tokens that were not
    computed (vLLM: a cached prefix) and places beyond the model's top-k (SGLang) are −1.

    Raises:
        UsageError: If nothing is left, or a token lacks some of its experts.
    """
    n_layers = ids.shape[1]
    highest_L = ids.max(axis=0).max(axis=1) if ids.size else np.zeros(n_layers)
    layer = np.flatnonzero(highest_L > 0)
    if not len(layer):
        raise UsageError(
            "expert ids: all are 0 or -1, so that the server recorded no expert; its MoE kernel "
            "may not record them: serve with another MoE backend, or a newer version"
        )
    remark = left_out(layer, n_layers)
    left = ids if len(layer) == n_layers else ids[:, layer]
    if (lowest := int(left.min())) >= 0:
        return RecordedIds(left, np.arange(len(ids)), layer, remark)
    if lowest < -1:
        raise UsageError(f"expert ids: {lowest} is none; must be at least 0, or -1 for no expert")
    filled = left >= 0
    token, place = (np.flatnonzero(filled.any(axis=axes)) for axes in ((1, 2), (0, 1)))
    left = left[np.ix_(token, np.arange(len(layer)), place)]
    if (left < 0).any():
        row, column, _ = np.argwhere(left < 0)[0]
        raise UsageError(
            f"expert ids: token {token[row]} lacks experts (-1) in layer {layer[column]} alone; "
            "only a whole token, layer or place may be -1"
        )
    return RecordedIds(left, token, layer, remark)


def left_out(layer: Array, n_layers: int) -> str:
    """Return in words which of the model's layers have no experts; empty where all have some."""
    if len(layer) == n_layers:
        return ""
    others = np.setdiff1d(np.arange(n_layers), layer)
    numbers = ", ".join(map(str, others))
    return f"; without layer{'s'[: len(others) > 1]} {numbers}, which recorded no expert"
