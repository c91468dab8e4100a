"""Find the responses in a file, and unwrap those of batches and gateways.

``vllm run-batch`` puts the response into ``response.body``. prime-rl has objects
``{"data", "shape", "dtype"}`` in the choices (pull request 3051), in base64. NVIDIA Dynamo has the
same in ``nvext``, earlier in base85 without ``dtype`` (pull request 9651), and of an SGLang worker
what SGLang has.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from capmoe_eval.errors import UsageError, first_line
from capmoe_eval.experiment.files import read_bytes

ROUTED = "routed_experts"
"""The field of the experts."""
_NPY = base64.b64encode(b"\x93NUMPY").decode()


def json_of(path: Path) -> object:
    """Return what is in a ``.json`` file; None for another file, or one that is none."""
    if path.suffix == ".json" and path.is_file():
        with suppress(ValueError, RecursionError):  # whoever reads it says so
            return json.loads(read_bytes(path))
    return None


def are_responses(content: object) -> bool:
    """Return whether the content of a ``.json`` file are responses of a server."""
    return isinstance(content, list) or (
        isinstance(content, dict) and not content.keys().isdisjoint(("choices", "meta_info"))
    )


def responses_of(path: Path, bad: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the responses of a file, each with its place; ``bad`` takes what is none, and why."""
    for place, content in _contents(path, bad):
        try:
            response = _unwrapped(content)
        except (ValueError, TypeError, AttributeError) as error:
            bad.append(f"{place}: {first_line(error)}")
        else:
            yield place, response


def _contents(path: Path, bad: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield what is in the list of a ``.json`` file, or in each line, which may have a list."""
    with path.open(encoding="utf-8", errors="replace") as file:  # of text that is not needed
        if path.suffix == ".json":
            content = json.load(file)
            for number, each in enumerate(content if isinstance(content, list) else [content], 1):
                yield f"response {number}", each
            return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"line {number}"
            try:
                content = json.loads(line)
            except json.JSONDecodeError as error:
                bad.append(
                    f"{place}: not a whole JSON object ({error.msg} at column {error.colno}); give "
                    "a response in each line (jq -c), without stream"
                )
            except RecursionError:
                bad.append(f"{place}: nested too deeply; give a response in each line")
            else:
                for each in content if isinstance(content, list) else [content]:
                    yield place, each


def _unwrapped(content: Any) -> dict[str, Any]:
    """Return the response that a batch or a gateway wrapped, with the experts at their place.

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
    extension = response.get("nvext") or {}
    routed = extension.get(ROUTED) or (extension.get("engine_data") or {}).get(ROUTED)
    if not routed:
        return response
    if len(choices) != 1:
        raise UsageError(f'nvext.routed_experts: of one of {len(choices)} choices; send "n": 1')
    if isinstance(routed, str) and not routed.startswith(_NPY):  # of an SGLang worker
        return response | {"sglext": {ROUTED: routed}}
    return response | {"choices": [choices[0] | {ROUTED: routed}]}
