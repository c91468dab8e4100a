"""What cannot be served under a capacity is refused before any process of the engine starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.registry import create_method
from capmoe_eval.zoo import WEIGHTS
from transformers import Qwen3Config, Qwen3ForCausalLM

from server.engines import NEEDS_VLLM, installed

MODEL = str(WEIGHTS / "olmoe")


def test_the_entry_module_imports_nothing() -> None:
    program = (
        "import sys; import capmoe_serve; before = set(sys.modules); "
        "import capmoe_serve.server.plugin; print(*sorted(set(sys.modules) - before))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert output.stdout.split() == ["capmoe_serve.server", "capmoe_serve.server.plugin"]


def configured(model: str = MODEL, **arguments: Any) -> Any:
    """Return the configuration of an engine, under the plugin."""
    from vllm.engine.arg_utils import EngineArgs

    with installed(create_method("score", 1.0)):
        return EngineArgs(model, skip_tokenizer_init=True, **arguments).create_engine_config()


NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


@NEEDS_VLLM
@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "arguments"),
    [
        ("pipeline_parallel_size=2: was not tried", {"pipeline_parallel_size": 2}),
        ("data_parallel_size=2: was not tried", {"data_parallel_size": 2}),
        (
            "moe_backend=deep_gemm_mega_moe: one kernel",
            {"moe_backend": "deep_gemm_mega_moe", "enable_expert_parallel": True},
        ),
        ("; set moe_backend=auto", {"moe_backend": "flashinfer_moe_ep_cutedsl"}),
        ("set enable_expert_parallel=False", {"enable_expert_parallel": True}),
        (
            "distributed_executor_backend=ext",
            {"distributed_executor_backend": "external_launcher"},
        ),
        ("lora_config: was not tried under a capacity; leave it out", {"enable_lora": True}),
        ("quantization=experts_int8: was not tried", {"quantization": "experts_int8"}),
        ("speculative_config: was not tried under a capacity", {"speculative_config": NGRAM}),
        ("dense: has no Mixture-of-Experts layer", {"model": "dense"}),
    ],
)
def test_an_engine_that_was_not_tried_is_refused(
    part: str,
    arguments: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if "model" in arguments:
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32}
        sizes |= {"vocab_size": 97, "num_attention_heads": 2, "num_key_value_heads": 2}
        Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained("dense")
    with pytest.raises(SystemExit) as caught:
        configured(**arguments)
    assert caught.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "capmoe_eval: " in line]
    assert part in line


@NEEDS_VLLM
@pytest.mark.slow
def test_compiled_graphs_of_a_stock_engine_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from capmoe_serve.server import seam

    stock = EngineArgs(MODEL, skip_tokenizer_init=True).create_engine_config().compute_hash()
    ours = configured().compute_hash()
    monkeypatch.setattr(seam, "__version__", "0.0.0")
    assert len({stock, ours, configured().compute_hash()}) == 3


# Other versions of vLLM.


@NEEDS_VLLM
@pytest.mark.slow
def test_the_tested_vllm_has_the_classes_that_are_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    from capmoe_serve.server.seam import VLLM_LIBRARY

    VLLM_LIBRARY.check()
    monkeypatch.delattr(BaseRouter, "_compute_routing")
    with pytest.raises(UsageError, match=r"base_router.*install vllm==0\.32\.0"):
        VLLM_LIBRARY.check()


# A failure of the plugin ends the process.


def load_plugins() -> None:
    """Load vLLM's plugins as at its start."""
    import vllm.plugins

    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()


@NEEDS_VLLM
@pytest.mark.slow
def test_a_failure_of_the_plugin_is_never_only_logged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setenv("CAPMOE_METHOD", "scor")
    with pytest.raises(SystemExit) as caught:
        load_plugins()
    assert caught.value.code == 2
    assert "capmoe_eval: CAPMOE_METHOD=scor: did you mean 'score'?" in capsys.readouterr().err
    monkeypatch.setenv("CAPMOE_METHOD", "baseline")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a fault of ours"):
        patch.setattr("capmoe_serve.server.settings.read_settings", fails)
        load_plugins()
    monkeypatch.setitem(sys.modules, "capmoe_serve.server.seam", None)  # it cannot be imported
    with pytest.raises(SystemExit):
        load_plugins()


@NEEDS_VLLM
@pytest.mark.slow
def test_without_a_method_nothing_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    monkeypatch.delenv("CAPMOE_METHOD", raising=False)
    monkeypatch.setenv("CAPMOE_DATA_ROOT", "/data")
    before = EngineArgs.create_engine_config, GPUModelRunner.execute_model
    load_plugins()
    assert (EngineArgs.create_engine_config, GPUModelRunner.execute_model) == before
    monkeypatch.setenv("CAPMOE_METHOD", "baseline")
    with installed(None):
        load_plugins()
        assert EngineArgs.create_engine_config is not before[0]
        assert GPUModelRunner.execute_model is not before[1]
