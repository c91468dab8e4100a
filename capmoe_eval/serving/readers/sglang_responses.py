"""Find the experts in a response of SGLang to a request with ``return_routed_experts``.

Layout of sgl-project/sglang: base64 of [tokens, layers, top-k], flat, of int32 or of the type that
``routed_experts_dtype`` beside it names (``python/sglang/srt/state_capturer/`` of commit a6463a10,
``routed_experts_wire.py``). Tokens are those of prompt and answer without the last one
(``test/registered/rl/test_return_routed_experts.py``, commit 05f70dc5), layers are
``num_hidden_layers``, where dense ones are 0 (``routed_experts.py``, commit 024911f2). It is

- in ``meta_info`` of ``/generate``, and of a choice with ``return_meta_info`` (pull request 35323);
- in ``sglext`` beside ``choices``, of the first choice alone (pull request 17648 and later);
- in ``sgl_ext`` of each choice before that (pull request 17434).
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from pydantic import NonNegativeInt

from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.routing.knobs import check
from capmoe_eval.serving.trace import Array

_ROUTED = "routed_experts"
_TYPES = {"int32": "<i4", "uint16": "<u2", "uint8": "u1"}
_OF_RESPONSES = {"meta_info", "sglext", "sgl_ext"}
_OF_CHOICES = {"meta_info", "sglext", "sgl_ext", "matched_stop"}
"""Fields that SGLang's responses and their choices have, and vLLM's have not."""


def is_of_sglang(response: Mapping[str, Any]) -> bool:
    """Return whether SGLang sent a response, by fields that only its responses have."""
    choices = response.get("choices", [])
    return bool(
        _OF_RESPONSES & response.keys() or any(_OF_CHOICES & choice.keys() for choice in choices)
    )


def routed(response: Mapping[str, Any], top_k: int | None) -> Iterator[tuple[int, Array]]:
    """Yield the experts [tokens, layers, top-k], each with the number of its choice.

    Raises:
        UsageError: If K is None, or the response has another number of experts than its tokens.
    """
    choices = response.get("choices", [response])
    of_choices = [choice.get("meta_info") or {} for choice in choices]
    if any(meta.get(_ROUTED) for meta in of_choices):
        for number, meta in enumerate(of_choices):
            if meta.get(_ROUTED):
                yield number, _decoded(meta, meta, top_k)
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
        yield 0, _decoded(extension, response["usage"], top_k)


def check_top_k(ids: Array, n_experts: int) -> None:
    """Refuse a K that divides the model's: two halves of a layer would pass for two layers.

    Two layers choose experts on their own, so that some token has an expert in both; two halves of
    a layer have none in common. By chance alone T·L/2·K²/E are: where that is 20 or more, none is
    no chance (e⁻²⁰).
    """
    top_k = ids.shape[2]
    one_TLK, next_TLK = ids[:, :-1:2], ids[:, 1::2]
    places = itertools.product(range(top_k), repeat=2)
    if one_TLK.size * top_k >= 20 * n_experts and not any(
        (one_TLK[:, :, one] == next_TLK[:, :, other]).any() for one, other in places
    ):
        raise UsageError(
            f"top_k={top_k}: no token has an expert in two neighbouring layers, so that these are "
            "parts of one; set --top-k to num_experts_per_tok in the model's config.json"
        )


def _decoded(part: Mapping[str, Any], usage: Mapping[str, Any], top_k: int | None) -> Array:
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
