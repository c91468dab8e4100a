"""The model of lm-eval in an engine, with a stand-in for the engine; it needs no vLLM."""

from __future__ import annotations

import functools
import importlib
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from capmoe_eval.zoo.tiny import tiny_tokenizer
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM


@functools.cache
def engine_class() -> Any:
    """The model of lm-eval in an engine, with stand-ins for what lm-eval imports of vLLM."""
    names = ("lora", "lora.request", "renderers", "renderers.hf", "tokenizers")
    version = metadata.version
    with pytest.MonkeyPatch.context() as patch:
        for name in ("vllm", *(f"vllm.{name}" for name in names)):
            patch.setitem(sys.modules, name, mock.MagicMock(TokensPrompt=dict))
        patch.setattr(metadata, "version", lambda of: "0.32.0" if of == "vllm" else version(of))
        return importlib.import_module("capmoe_serve.lm").CapmoeVllmLM


class Engine:
    """Answers each prompt in a step of its own."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    def generate(self, prompts: list[dict[str, list[int]]], **_: Any) -> list[Any]:
        self.prompts += [prompt["prompt_token_ids"] for prompt in prompts]
        return [
            SimpleNamespace(
                request_id=number,
                prompt_logprobs=[{token: -1.0} for token in self.prompts[number]],
                outputs=[SimpleNamespace(text="")],
            )
            for number in range(len(self.prompts) - len(prompts), len(self.prompts))
        ]


def engine_lm(**settings: Any) -> Any:
    lm = engine_class().__new__(engine_class())
    LM.__init__(lm)
    lm.model, lm.tokenizer, lm._steps = Engine(), tiny_tokenizer(), SimpleNamespace(first=range(99))
    names = ("lora_request", "think_end_token", "enable_thinking", "custom_prefix_token_id")
    vars(lm).update(dict.fromkeys(names), add_bos_token=False, data_parallel_size=1, batch_size=9)
    vars(lm).update(truncation_side="left", quiet=True, truncated={}, batches={}, **settings)
    return lm


@pytest.mark.parametrize("shuffle", [None, 0])
@pytest.mark.parametrize("kind", ["loglikelihood", "generate_until"])
def test_what_an_engines_prompt_loses_is_noted_by_document(kind: str, shuffle: int | None) -> None:
    """It keeps a place for a token more than transformers does."""
    settings = {"until": ["\n\n"], "max_gen_toks": 2}
    lm, sizes = engine_lm(_max_length=6, _max_gen_toks=4, shuffle=shuffle), (9, 7, 5, 3, 3, 2)
    asked = [(" tea" * n, " iron" if kind == "loglikelihood" else settings) for n in sizes]
    requests = [Instance(kind, {}, each, 0, ("t", n // 2, 1)) for n, each in enumerate(asked)]
    getattr(lm, kind)(requests)
    needed, places = (1, 5) if kind == "loglikelihood" else (0, 4)
    kept = sorted(map(len, lm.model.prompts))
    assert kept == sorted(min(size + needed, places) for size in sizes)
    lost = [max(sizes[n : n + 2]) + needed - places for n in (0, 2, 4)]
    assert lost[2] < 0 < lost[1] < lost[0]
    assert lm.truncated == {("t", 0): lost[0], ("t", 1): lost[1]}
    assert sorted(lm.batches) == [("t", n) for n in range(3)]
