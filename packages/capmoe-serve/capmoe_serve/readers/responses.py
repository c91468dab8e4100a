"""Read responses of vLLM or SGLang, a JSON object in each line or a ``.json`` list of them.

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

With a prefix cache, both return the experts of the whole sequence, read from the cache's slots. How
many tokens were cached is in ``usage.prompt_tokens_details`` (vLLM only with
``--enable-prompt-tokens-details``, and some versions leave a 0 out) or in SGLang's ``meta_info``.

``vllm run-batch`` puts the response into ``response.body``.
"""

import base64
import hashlib
import io
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from capmoe_eval.errors import UsageError, bad_choice, first_line, reading, shown
from capmoe_eval.experiment.reservations import print_warning
from capmoe_eval.routing.knobs import check
from pydantic import NonNegativeInt

from capmoe_serve.readers.recordings import without_padding
from capmoe_serve.trace import Array, Trace, unsigned

ROUTED = "routed_experts"
"""The field of the experts."""
_BLOCK = 16  # tokens that vLLM's prefix cache keeps together by default
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


class _Rows(NamedTuple):
    """The experts of consecutive tokens of a choice."""

    ids: Array  # [tokens, layers, top-k]
    prompt: int  # the first tokens, as many as may be the prompt's
    cached: int | None = None  # the first tokens, as many as were cached; None if not said
    is_one_of_several: bool = False  # cached is the number of one choice, not known of which


def read_responses(path: Path, n_experts: int | None, top_k: int | None = None) -> Trace:
    """Read the experts of the tokens of responses.

    The responses do not say which forward computed a token. The last token of an answer has no
    experts, since nothing was computed from it. Tokens that a response says were cached are left
    out, and so are responses that cannot be read; ``source`` counts both.

    Raises:
        UsageError: If no response has experts, or E (of SGLang also K) is not given.
    """
    with reading(path, "not read", "give a JSON response of vLLM or SGLang in each line"):
        if n_experts is None:
            raise UsageError(
                "responses do not say how many experts a layer has; add --experts E (num_experts "
                "or n_routed_experts in the model's config.json)"
            )
        return _trace(path, n_experts, top_k)


def _trace(path: Path, n_experts: int, top_k: int | None) -> Trace:
    read: list[_Rows] = []
    bad: list[str] = []
    n_read = 0
    models: set[str] = set()
    servers: set[str] = set()
    for place, content in _contents(path, bad):
        field = ""
        try:
            response = _unwrapped(content)
            field, of_sglang = "routed_experts: ", _is_of_sglang(response)
            rows = list(_of_sglang(response, top_k or 1) if of_sglang else _of_vllm(response))
        except Exception as error:  # damaged arrays make numpy raise any kind
            bad.append(f"{place}: {field}{first_line(error)}")
            continue
        if of_sglang and top_k is None:
            raise UsageError(
                "SGLang does not say how many experts a token has; add --top-k K "
                "(num_experts_per_tok in the model's config.json)"
            )
        n_read += 1
        servers.add("sglang" if of_sglang else "vllm")
        models.add(str(response.get("model")))
        read += [of._replace(ids=_narrow(of.ids)) for of in rows]
    if not read:
        if servers:
            flags = " or ".join(_FLAGS[server] for server in sorted(servers))
            raise UsageError(f"no response has routed_experts; {flags}")
        raise UsageError(
            bad[0] if bad else "is empty; give a JSON response of vLLM or SGLang in each line"
        )
    if len({rows.ids.shape[1:] for rows in read}) > 1:
        raise UsageError("routed_experts: responses differ in layers or top-k; split the file")
    cached, remark = _cached(path, read)
    parts = [rows.ids[first:] for rows, first in zip(read, cached, strict=True)]
    ids, _, layers, padding = without_padding(np.concatenate(parts))
    if "sglang" in servers:
        _check_top_k(ids, n_experts)
    if bad:
        reason = shown(bad[0].partition("; ")[0])
        remark += f"; without {len(bad):,} of {n_read + len(bad):,} responses ({reason})"
    return Trace(
        n_experts=n_experts,
        expert_TLK=unsigned(ids),
        layers=tuple(map(str, layers)),
        model=", ".join(sorted(models - {"None"})) or None,
        source=" and ".join(sorted(servers)) + padding + remark,
    )


def _cached(path: Path, read: Sequence[_Rows]) -> tuple[list[int], str]:
    """Return how many first tokens were cached, and that in words to follow the source.

    A choice that computed the prompt which the others found in the cache is not named. So of
    several choices, those blocks of a prompt count as cached that an earlier request has.

    Where a response has no number, nothing is left out, and repeated prefixes get a warning.
    """
    seen: set[bytes] = set()
    counts, unsaid, remark = [], 0, ""
    for rows in read:
        repeated = min(_repeated(rows.ids, seen), rows.prompt)
        unsaid += repeated if rows.cached is None else 0
        counts.append(repeated if rows.is_one_of_several and rows.cached else rows.cached or 0)
    if total := sum(counts):
        remark = f"; without {total:,} cached tokens of prompts"
    if unsaid:
        tokens = sum(len(rows.ids) for rows in read)
        print_warning(
            f"{path}: {unsaid:,} of {tokens:,} tokens have the experts of an earlier request's "
            "prefix, and their responses do not say how many were cached; all are counted. Start "
            "vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
        )
        remark += f"; with {unsaid:,} tokens that may have been cached"
    return counts, remark


def _repeated(ids: Array, seen: set[bytes]) -> int:
    """Return how many first tokens are those of an earlier call, in whole blocks.

    As a prefix cache finds them; ``seen`` has a digest of each block with all before it.
    """
    tokens, digest = 0, b""
    for end in range(_BLOCK, len(ids) + 1, _BLOCK):
        block = ids[end - _BLOCK : end]
        digest = hashlib.sha256(digest + block.tobytes()).digest()
        if digest in seen and block.max() > 0:  # not of tokens without experts
            tokens = end
        seen.add(digest)
    return tokens


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


def _of_sglang(response: Mapping[str, Any], top_k: int) -> Iterator[_Rows]:
    """Yield the experts of each choice that has some.

    Raises:
        UsageError: If the response has another number of experts than its tokens.
    """
    choices = response.get("choices", [response])
    metas = [choice.get("meta_info") or {} for choice in choices]
    for meta in (described := [meta for meta in metas if meta.get(ROUTED)]):
        yield _by_usage(meta, meta, top_k)
    for part in () if described else (response, *choices):
        extension = part.get("sglext") or part.get("sgl_ext") or {}
        if not extension.get(ROUTED):
            continue
        if len(choices) > 1:
            raise UsageError(
                f"{len(choices)} choices, and usage has the tokens of all together; send "
                '"return_meta_info": true, or "n": 1'
            )
        yield _by_usage(extension, response["usage"], top_k)


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


def _by_usage(part: Mapping[str, Any], usage: Mapping[str, Any], top_k: int) -> _Rows:
    name = part.get("routed_experts_dtype") or "int32"
    if name not in _TYPES:
        raise bad_choice("routed_experts_dtype", name, _TYPES)
    ids = np.frombuffer(base64.b64decode(part[ROUTED], validate=True), dtype=_TYPES[name])
    prompt, answer = (
        check(field, usage[field], NonNegativeInt)
        for field in ("prompt_tokens", "completion_tokens")
    )
    tokens = prompt + answer - 1
    if tokens < 1 or not ids.size or ids.size % (tokens * top_k):
        raise UsageError(
            f"{ids.size} ids are no multiple of {tokens} tokens (prompt_tokens + completion_tokens "
            f"− 1) × top_k={top_k}; set --top-k to num_experts_per_tok, and leave "
            "routed_experts_start_len out of the requests"
        )
    return _Rows(ids.reshape(tokens, -1, top_k), prompt, _cached_tokens(usage, prompt))


def _cached_tokens(usage: Mapping[str, Any], prompt: int) -> int | None:
    """Return how many tokens of a prompt were cached; None if the server does not say."""
    cached = usage.get("cached_tokens")  # of SGLang's meta_info
    if cached is None:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is None:
        return None
    if (tokens := int(check("cached_tokens", cached, NonNegativeInt))) > prompt:
        raise UsageError(f"cached_tokens={tokens}: the prompt has {prompt} tokens")
    return tokens


def _of_vllm(response: Mapping[str, Any]) -> Iterator[_Rows]:
    """Yield the experts of the prompt and of each choice, or of both together.

    They are in ``choices[].routed_experts``: of the generated tokens, with the prompt's in
    ``prompt_routed_experts`` beside ``choices`` (v0.21, lists); or of prompt and answer together
    (later, base64 of an ``.npy``).
    """
    choices, usage = response["choices"], response.get("usage") or {}
    is_several = len(choices) > 1
    if (routed := response.get("prompt_routed_experts")) is not None:
        ids = _decoded(routed)
        yield _Rows(ids, len(ids), _cached_tokens(usage, len(ids)), is_several)
    for choice in choices:
        if choice.get(ROUTED) in (None, [], ""):  # null where the request was aborted
            continue
        ids = _decoded(choice[ROUTED])
        if routed is not None:
            yield _Rows(ids, 0)
            continue
        prompt = check("prompt_tokens", usage.get("prompt_tokens") or len(ids), NonNegativeInt)
        cached = _cached_tokens(usage, prompt)
        if cached and not is_several:
            # The first tokens are missing where the request had routed_experts_prompt_start.
            missing = prompt + usage.get("completion_tokens", 0) - 1 - len(ids)
            cached = max(cached - max(missing, 0), 0)
        yield _Rows(ids, prompt, cached, is_several)


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


def _contents(path: Path, bad: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield what is in the list of a ``.json`` file, or in each line, which may have a list."""
    is_whole = path.suffix == ".json"
    with path.open(encoding="utf-8", errors="replace") as file:  # of text that is not needed
        for number, text in enumerate([file.read()] if is_whole else file, 1):
            place = f"line {number}"
            try:
                content = json.loads(text) if text.strip() else []
            except json.JSONDecodeError as error:
                bad.append(
                    f"{place}: not a whole JSON object ({error.msg} at column {error.colno}); give "
                    "a response in each line (jq -c), without stream"
                )
            except RecursionError:
                bad.append(f"{place}: nested too deeply; give a response in each line")
            else:
                each = content if isinstance(content, list) else [content]
                for count, response in enumerate(each, 1):
                    yield f"response {count}" if is_whole else place, response


def _unwrapped(content: Any) -> dict[str, Any]:
    """Return the response that ``vllm run-batch`` wrapped, or the content itself.

    Raises:
        UsageError: If it is no object with choices, and none of SGLang's ``/generate``.
    """
    response = content if isinstance(content, dict) else {}
    if isinstance(batched := response.get("response"), dict):
        response = batched.get("body") or {}
    choices = response.get("choices")
    if choices is None and isinstance(response.get("meta_info"), dict):
        return response
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise UsageError("no response of vLLM or SGLang, which has choices, or meta_info")
    return response
