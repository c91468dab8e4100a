"""The demo's servers answer, bear many clients, and end with all their processes."""

from __future__ import annotations

import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from capmoe_eval.errors import UsageError
from capmoe_eval.zoo import WEIGHTS
from capmoe_eval.zoo.checkpoints import copy_checkpoint
from capmoe_eval.zoo.tokenizer import miniworld_tokenizer

from capmoe_serve.server import demo
from server.engines import NEEDS_VLLM

SETTINGS = {"CAPMOE_METHOD": "score", "CAPMOE_GAMMA": "1.0"}
CLIENTS = 100


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The weights and the tokenizer of a server, in the environment that a user has."""
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "PROMETHEUS_MULTIPROC_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CAPMOE_GAMMA", "7")  # of the caller, which no server of the demo has
    miniworld_tokenizer().save_pretrained(tokenizer := tmp_path / "tokenizer")
    (weights := tmp_path / "weights").mkdir()
    return copy_checkpoint(WEIGHTS / demo.MODEL, weights), tokenizer


def test_wrong_settings_show_before_a_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.Server, "__enter__", lambda _: pytest.fail("started"))
    with pytest.raises(UsageError, match="CAPMOE_GAMMA=-1: "):
        demo.main(["--gamma", "-1"])
    with pytest.raises(UsageError, match="smollm2_moe has no checkpoint; run `make real`"):
        demo.main(["--model", "smollm2_moe"])


@NEEDS_VLLM
@pytest.mark.slow
def test_both_servers_are_asked_the_same(
    paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    demo.main([])
    text, _, metrics = capsys.readouterr().out.partition("The plugin adds to /metrics:\n")
    logprobs = {
        side: [float(line.split()[2]) for line in text.splitlines() if line.startswith(f"  {side}")]
        for side in ("stock vLLM", "score 1.0")
    }
    assert [len(values) for values in logprobs.values()] == [4, 4]
    assert max(max(values) for values in logprobs.values()) < 0
    assert logprobs["stock vLLM"] != logprobs["score 1.0"]
    names = [line.split("{")[0].strip() for line in metrics.splitlines()]
    assert {"capmoe_info", "capmoe_dropped_pairs_total"} <= set(names)
    assert all(name.startswith("capmoe_") and "bucket" not in name for name in names)


@NEEDS_VLLM
@pytest.mark.slow
def test_a_server_that_ends_is_reported_with_the_plugin_s_line(
    tmp_path: Path, paths: tuple[Path, Path]
) -> None:
    settings = {"CAPMOE_METHOD": "scor"}
    line = "ended with status .*: capmoe_eval: CAPMOE_METHOD=scor: did you mean 'score'"
    with (
        demo.Server(tmp_path, settings, *paths) as server,
        pytest.raises(UsageError, match=line) as refused,
    ):
        server.await_ready()
    assert "\n" not in str(refused.value)


def stream(address: str, number: int) -> int:
    """Ask one question; every fifth client leaves after the first token. Return its tokens."""
    import openai

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    prompt = f"Question: what is {number} times {number + 3}?\nAnswer:" * (1 + number % 4)
    call = {"model": demo.MODEL, "prompt": prompt, "temperature": 0.0, "stream": True}
    with client.completions.create(
        **call, max_tokens=24, extra_body={"ignore_eos": True}
    ) as tokens:
        received = 0
        for _ in tokens:
            received += 1
            if number % 5 == 0:
                break
    return received


@NEEDS_VLLM
@pytest.mark.slow
def test_a_server_bears_many_clients_and_aborted_requests_and_leaves_no_process(
    tmp_path: Path, paths: tuple[Path, Path]
) -> None:
    settings = {**SETTINGS, "CAPMOE_DECODE": "constrained"}
    with pytest.raises(KeyboardInterrupt), demo.Server(tmp_path, settings, *paths) as server:
        server.await_ready()
        with ThreadPoolExecutor(CLIENTS) as clients:
            tokens = list(clients.map(lambda n: stream(server.address, n), range(CLIENTS)))
        assert all(count == 1 for count in tokens[::5])
        assert all(count > 1 for place, count in enumerate(tokens) if place % 5)
        assert len(server.ask(demo.PROMPTS)) == len(demo.PROMPTS)
        sums: dict[str, float] = {}
        for line in server.metrics():
            name, value = line.split("{")[0].split(" ")[0], line.rsplit(" ", 1)[1]
            sums[name] = sums.get(name, 0.0) + float(value)
        routed, kept, dropped, added = (
            sums[f"capmoe_{name}_pairs_total"] for name in ("routed", "kept", "dropped", "added")
        )
        assert kept + dropped - added == routed == sums["capmoe_tokens_total"] * 4 * 8
        assert dropped > 0
        raise KeyboardInterrupt
    time.sleep(1)  # until those that were killed have ended
    group = re.compile(rf"^\s*{server._process.pid}\s+[^Z\s]", re.MULTILINE)  # with no zombie
    assert not group.search(subprocess.check_output(["ps", "-eo", "pgid=,stat="], text=True))
