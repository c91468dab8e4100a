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
import yaml
from capmoe_eval.routing.method import Method
from tests.wrapper.architectures import build
from transformers import PreTrainedModel

from capmoe_serve.server import local

NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (capmoe-serve[vllm])"
)

ENVIRONMENT = {**local.DEFAULTS, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
"""Variables of vLLM, which it reads when it is first imported."""
del ENVIRONMENT["TORCHDYNAMO_DISABLE"]  # a test compiles an engine
os.environ.update(ENVIRONMENT)

FAMILIES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("families.yaml").read_text(encoding="utf-8")
)["families"]
"""Settings of tiny random models by name."""


def make(name: str) -> PreTrainedModel:
    """Return a tiny random model of :data:`FAMILIES`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(name.split(maxsplit=1)[0], FAMILIES[name])
    for path, parameter in model.named_parameters():
        if name.startswith("deepseek") and path.endswith("o_proj.weight"):
            # Stock vLLM computes latent attention by 1e-3 otherwise than transformers, which would
            # hide what a capacity changes.
            parameter.data.zero_()
    return model


def prompts(*lengths: int, vocabulary: int = 97, seed: int = 0) -> list[list[int]]:
    """Return random prompts without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


@contextmanager
def installed(method: Method | None, *trace: Any) -> Iterator[None]:
    """Wrap vLLM's functions as the plugin does, and unwrap them on exit.

    ``trace`` is the directory of a trace, and its tokens.
    """
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
        if method is not None:
            seam.install(method, *trace)
        yield


class Engine:
    """An engine, in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    @property
    def runner(self) -> Any:
        """The model runner."""
        return local.runner_of(self.llm)

    def put_under(self, method: Method) -> None:
        """Put the loaded model under another method."""
        local.replace(self.runner, method)

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

    def report(self) -> dict[str, Any]:
        """Return what the plugin counted, all of whose proofs hold."""
        report: dict[str, Any] = self.llm.collective_rpc("capmoe_report")[0]
        assert [proof for proof in report["proofs"].values() if proof["passed"] is False] == []
        return report


def prompt_logprobs(outputs: Sequence[Any]) -> list[float]:
    """Return the log-probability of every token of the prompts behind the first."""
    return [
        next(iter(of.values())).logprob for output in outputs for of in output.prompt_logprobs[1:]
    ]


@contextmanager
def engine(
    model: str | Path, method: Method | None, *trace: Any, **options: Any
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
    with installed(method, *trace):
        started = Engine(LLM(str(model), **defaults | options))
        try:
            yield started
        finally:
            started.llm.llm_engine.engine_core.shutdown()
            del started
            cleanup_dist_env_and_memory()
            gc.collect()
