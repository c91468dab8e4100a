"""A server's settings, and what is refused in one line before any process of an engine starts."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.zoo import WEIGHTS
from transformers import Qwen3Config, Qwen3ForCausalLM

from capmoe_serve.server.settings import TRACE_TOKENS, read_settings
from server.engines import NEEDS_VLLM, installed


def read(**settings: str) -> tuple[Method, Path | None, int] | None:
    """Return the settings of an environment with variables by their names without the prefix."""
    variables = {f"CAPMOE_{name.upper()}": value for name, value in settings.items()}
    return read_settings({"PATH": "/bin", **variables})


def test_the_variables_are_the_knobs_of_a_method() -> None:
    settings = read(
        method="expanded_drop", gamma="1.5", candidates="ranked", m="2", protect_topk="true"
    )
    knobs = {"candidates": "ranked", "m": 2, "protect_topk": True}
    assert settings == (create_method("expanded_drop", 1.5, **knobs), None, TRACE_TOKENS)
    by_layer = read(method="score", gamma="[1.0, 0.5]", trace="there", trace_tokens="7")
    assert by_layer == (create_method("score", [1.0, 0.5]), Path("there"), 7)
    for gamma in ("inf", ".inf", "1000"):
        assert read(method="score", gamma=gamma) is not None
    assert read(method="baseline") == (create_method("baseline"), None, TRACE_TOKENS)
    assert read(method="score", gamma="inf") == (
        create_method("score", math.inf),
        None,
        TRACE_TOKENS,
    )


def test_without_a_method_there_is_none() -> None:
    assert read() is None
    assert read(data_root="/data", results_dir="/results", debug="1") is None


SCORE = "METHOD=score GAMMA=1"
REFUSED = {
    "METHOD=score GAMMA=-1": "^CAPMOE_GAMMA=-1: .*at least 0",
    "METHOD=score GAMMA=nan": "^CAPMOE_GAMMA=nan: ",
    "METHOD=score": "^CAPMOE_GAMMA: .*for example CAPMOE_GAMMA=1.0",
    "METHOD=scor GAMMA=1": r"^CAPMOE_METHOD=scor: did you mean 'score'\?",
    "METHOD= GAMMA=1": "^CAPMOE_METHOD=: choose one of baseline, order",
    "METHOD=score GAMA=1": r"^CAPMOE_GAMA=1: did you mean 'CAPMOE_GAMMA'\?",
    "METHD=score": r"^CAPMOE_METHD=score: did you mean 'CAPMOE_METHOD'\?",
    "GAMMA=1": "^CAPMOE_GAMMA=1: has no effect without CAPMOE_METHOD",
    "TRACE=there": "^CAPMOE_TRACE=there: has no effect without CAPMOE_METHOD",
    f"{SCORE} EP_SIZE=8": "^CAPMOE_EP_SIZE=8: an engine has the tokens of one rank.*leave ep_size",
    f"{SCORE} SCOPE=sequence": "^CAPMOE_SCOPE=sequence: ",
    f"{SCORE} COUNT_PADDING=true": "^CAPMOE_COUNT_PADDING=true: ",
    f"{SCORE} MODALITY=text_first": "^CAPMOE_MODALITY=text_first: a step does not tell",
    f"{SCORE} DECODE=yes": "^CAPMOE_DECODE=.*choose one of",
    "METHOD=device_drop GAMMA=1.5": "^CAPMOE_METHOD=device_drop: drops nothing in an engine",
    f"{SCORE} TRACE_TOKENS=0": "^CAPMOE_TRACE_TOKENS=0: must be a whole number of at least 1",
    "METHOD=sere": "^CAPMOE_METHOD=sere: needs a calibration.*such as CAPMOE_METHOD=score",
    "METHOD=macs GAMMA=1": "^CAPMOE_METHOD=macs: needs a calibration",
}


@pytest.mark.parametrize(("words", "part"), REFUSED.items())
def test_a_wrong_setting_is_refused_in_one_line(words: str, part: str) -> None:
    with pytest.raises(UsageError, match=part) as caught:
        read(**dict(word.split("=") for word in words.split()))
    assert "\n" not in str(caught.value)


# Engines that cannot be served.

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
        ("distributed_executor_backend=ext", {"distributed_executor_backend": "external_launcher"}),
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
