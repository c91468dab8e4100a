"""Run one engine of vLLM in this process, and put its loaded model under one method after another.

In one process the scheduler's steps follow from the requests and the engine's settings alone, so
that results can be made again.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from capmoe_eval.errors import EnforcementError, UsageError, first_line
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.observers import Proof

from capmoe_serve.server.engine import EngineCapacity

# Variables that vLLM reads; a user's own values stay.
DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # a few small functions would be compiled even in eager mode
}


@functools.cache
def import_vllm() -> None:
    """Import vLLM with the variables that it reads, and wrap its functions once.

    Raises:
        UsageError: If this vLLM is not as the plugin expects.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from capmoe_serve.server.seam import install

    logging.getLogger("vllm").setLevel(logging.ERROR)  # until vLLM sets it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of vLLM's own code
        install(create_method("baseline"))


@contextmanager
def _unchanged_process() -> Iterator[None]:
    """Take back what the start of an engine does to torch's threads and all random generators."""
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_num_threads = set_threads  # vLLM's CPU worker puts a warning in its place
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


_running: list[Any] = []  # the engine of this process


def start_engine(**arguments: Any) -> Any:
    """Return a started ``vllm.LLM``; the engine that ran before is ended.

    Raises:
        UsageError: If vLLM cannot run the model; the line has vLLM's reason.
    """
    import_vllm()
    from vllm import LLM

    if _running:
        end_engine()

    with _unchanged_process(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of vLLM's own code
        try:
            llm = LLM(**arguments)
            _running.append(llm)
            _answers(llm)  # some kernels refuse a model in the first step
        except Exception as error:
            end_engine()
            raise UsageError(
                f"backend=vllm: vLLM cannot run this model here ({first_line(error)}); choose "
                "another model, or backend=transformers"
            ) from error
    return llm


def end_engine() -> None:
    """End the engine of this process, if there is one, also one whose start failed."""
    from vllm.distributed import cleanup_dist_env_and_memory

    while _running:
        _running.pop().llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    gc.collect()


def put_under(llm: Any, method: Method) -> Meter:
    """Put the model of an engine of :func:`start_engine` under a method; return its new meter.

    Before, it is proven that the method changes no bit where its bound is never reached.

    Raises:
        UsageError: If the model cannot be put under the method.
        EnforcementError: If the engine was started without the plugin, or the proof fails.
    """
    runner = runner_of(llm)
    if not isinstance(getattr(runner, "capmoe", None), EngineCapacity):
        raise EnforcementError("the engine runs without the plugin, so that it has no capacity")
    proof = _stock_at_infinity(llm, runner, method)
    meter = replace(runner, method)
    meter.stock_at_infinity = proof
    return meter


def replace(runner: Any, method: Method) -> Meter:
    """Put the model of a model runner under another method, without a proof of anything."""
    runner.capmoe.remove()
    runner.capmoe = EngineCapacity(runner.model, runner.vllm_config.model_config.hf_config, method)
    meter: Meter = runner.capmoe.meter
    return meter


def _stock_at_infinity(llm: Any, runner: Any, method: Method) -> Proof:
    """Compare log-probabilities of the stock engine with those under a bound out of reach."""
    layers = runner.capmoe.meter.layers
    never_binds = method.never_binding(
        max(layer.n_experts for layer in layers), min(layer.top_k for layer in layers)
    )
    if never_binds.renormalize == "always":  # it would change weights where nothing is dropped
        never_binds = dataclasses.replace(never_binds, renormalize="before")  # type: ignore[type-var]
    runner.capmoe.remove()
    stock = _answers(llm)
    for under in (create_method("baseline"), never_binds):
        replace(runner, under)
        if _answers(llm) == stock:
            continue
        runner.capmoe.remove()
        if _answers(llm) != stock:
            return {"passed": None, "why": "the stock engine is not deterministic"}
        raise EnforcementError("γ=∞ does not give the stock engine's log-probabilities bit for bit")
    return {"passed": True, "method": never_binds.name, "compared": 2 * len(stock)}


_PROMPTS, _LENGTH = 4, 8
"""Prompts that an engine is tried with, and the tokens of each."""


def _answers(llm: Any) -> list[float]:
    """Return log-probabilities of a few prompts, for each token the likeliest ones and its own."""
    from vllm import SamplingParams

    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    tokens = [place * 7919 % vocabulary for place in range(_PROMPTS * _LENGTH)]
    prompts = [
        {"prompt_token_ids": tokens[first : first + _LENGTH]}
        for first in range(0, len(tokens), _LENGTH)
    ]
    parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5, detokenize=False)
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    of_tokens = [of for output in outputs for of in output.prompt_logprobs[1:]]
    return [logprob.logprob for of in of_tokens for logprob in of.values()]


def runner_of(llm: Any) -> Any:
    """Return the model runner of an engine of this process."""
    return llm.collective_rpc(lambda worker: worker.model_runner)[0]


def engine_facts(llm: Any) -> dict[str, Any]:
    """Return the settings of an engine on which the composition of its steps depends, JSON-ready.

    They have vLLM's names.
    """
    config = llm.llm_engine.vllm_config
    scheduler, cache = config.scheduler_config, config.cache_config
    return {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "enable_chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "enforce_eager": bool(config.model_config.enforce_eager),
        "max_model_len": config.model_config.max_model_len,
        "block_size": cache.block_size,
        "num_gpu_blocks": cache.num_gpu_blocks,
    }
