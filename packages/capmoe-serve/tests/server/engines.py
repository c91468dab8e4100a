"""Engines of vLLM in the process of the tests, one at a time, and models that they can run."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from capmoe_eval.routing.method import Method
from tests.wrapper.architectures import build
from transformers import PreTrainedModel

from capmoe_serve.server.local import DEFAULTS
from capmoe_serve.server.settings import ServerSettings

NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (capmoe-serve[vllm])"
)

ENVIRONMENT = {
    **{name: value for name, value in DEFAULTS.items() if name != "TORCHDYNAMO_DISABLE"},
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}
"""Variables of vLLM, which it reads when it is first imported."""
os.environ.update(ENVIRONMENT)

_K3 = {"num_experts_per_tok": 3}
# What the CPU's attention and experts take: heads of 32, sizes that 32 divides.
_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
_LATENT: dict[str, Any] = {  # of 576 numbers, which alone vLLM's CPU attention takes
    "head_dim": 64,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("olmoe", {**_K3, "intermediate_size": 32}),
    "qwen3_moe": ("qwen3_moe", {**_K3, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "deepseek_v2": (
        "deepseek_v2",
        _LATENT | {"topk_method": "greedy", "n_group": 1, "routed_scaling_factor": 1.7},
    ),
    "deepseek_v2_groups": (
        "deepseek_v2",
        _LATENT
        | {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            **_K3,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        _LATENT
        | {
            "n_group": 4,
            "topk_group": 2,
            **_K3,
            "norm_topk_prob": True,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.5,
        },
    ),
}
"""Families of tiny random models by name."""


def make(name: str) -> PreTrainedModel:
    """Return a tiny random model of :data:`FAMILIES`."""
    family, settings = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(family, _SIZES | settings)
    for path, parameter in model.named_parameters():
        if family.startswith("deepseek") and path.endswith("o_proj.weight"):
            # Stock vLLM computes latent attention by 1e-3 otherwise than transformers, which would
            # hide what a capacity changes.
            parameter.data.zero_()
    return model


def prompts(*lengths: int, vocabulary: int = 97, seed: int = 0) -> list[list[int]]:
    """Return random prompts without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


@contextmanager
def installed(settings: ServerSettings | None) -> Iterator[None]:
    """Wrap vLLM's functions as the plugin does, and unwrap them on exit."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase

    from capmoe_serve.server import seam

    def stock(function: Any) -> Any:
        """Return a function of vLLM as it is without the plugin, which other tests may have."""
        while function.__code__.co_filename == seam.__file__:
            function = function.__wrapped__
        return function

    with pytest.MonkeyPatch.context() as patch:
        for of, name in (
            (EngineArgs, "create_engine_config"),
            (CPUModelRunner, "load_model"),
            (GPUModelRunner, "load_model"),
            (GPUModelRunner, "execute_model"),
        ):
            patch.setattr(of, name, stock(vars(of)[name]))
        patch.setattr(WorkerBase, "capmoe_report", None, raising=False)
        # vLLM asks every class of models what it is in a process of its own, which takes 15 s.
        patch.setattr(registry, "_run_in_subprocess", lambda ask: ask())
        if settings is not None:
            seam.install(settings)
        yield


class Engine:
    """An engine, in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    @property
    def runner(self) -> Any:
        """The model runner."""
        executor = self.llm.llm_engine.engine_core.engine_core.model_executor
        return executor.driver_worker.worker.model_runner

    def put_under(self, method: Method) -> None:
        """Put the loaded model under another method."""
        from capmoe_serve.server.engine import EngineCapacity

        runner = self.runner
        runner.capmoe.remove()
        config = runner.vllm_config.model_config.hf_config
        runner.capmoe = EngineCapacity(runner.model, config, method)

    def generate(
        self, texts: Sequence[Sequence[int]], tokens: int = 1, **sampling: Any
    ) -> list[Any]:
        """Return vLLM's outputs of prompts, with the log-probabilities of every token."""
        from vllm import SamplingParams

        chosen = {"prompt_logprobs": 0, "logprobs": 0, "detokenize": False, "temperature": 0.0}
        parameters = SamplingParams(max_tokens=tokens, ignore_eos=True, **chosen | sampling)
        requests = [{"prompt_token_ids": list(text)} for text in texts]
        outputs: list[Any] = self.llm.generate(requests, parameters, use_tqdm=False)
        return outputs

    def logprobs(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the log-probability of every token of the prompts behind the first."""
        return prompt_logprobs(self.generate(texts))

    def report(self) -> dict[str, Any]:
        """Return what the plugin counted."""
        reports: list[dict[str, Any]] = self.llm.collective_rpc("capmoe_report")
        return reports[0]


def prompt_logprobs(outputs: Sequence[Any]) -> list[float]:
    """Return the log-probability of every token of the prompts behind the first."""
    return [
        next(iter(of.values())).logprob for output in outputs for of in output.prompt_logprobs[1:]
    ]


@contextmanager
def engine(
    model: str | Path, method: Method | ServerSettings | None, **options: Any
) -> Iterator[Engine]:
    """Start an engine under a method, or a stock one, and end it on exit."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    defaults = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "num_gpu_blocks_override": 64,
        "max_model_len": 256,
        "enable_prefix_caching": False,
    }
    settings = ServerSettings(method) if isinstance(method, Method) else method
    with installed(settings):
        started = Engine(LLM(str(model), **defaults | options))
        try:
            yield started
        finally:
            started.llm.llm_engine.engine_core.shutdown()
            del started
            cleanup_dist_env_and_memory()
            gc.collect()
