"""The demo's servers end with all their processes; a real one bears many clients and a restart."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from capmoe_eval.errors import UsageError
from capmoe_eval.zoo import WEIGHTS
from capmoe_eval.zoo.tokenizer import miniworld_tokenizer

from capmoe_serve.server import demo
from server.engines import NEEDS_VLLM

SETTINGS = {"CAPMOE_METHOD": "score", "CAPMOE_GAMMA": "1.0"}
PATHS = Path("weights"), Path("tokenizer")
FAKE = """
import http.server, json, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
gamma = os.environ.get("CAPMOE_GAMMA")
print("worker", child.pid, "gamma", gamma, flush=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
class Answers(http.server.BaseHTTPRequestHandler):
    def answer(self, text):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(text.encode())
    def do_GET(self):
        self.answer('capmoe_a_total 3.0\\ncapmoe_b{le="1"} 0.0\\ncapmoe_a_bucket 1.0\\nother 1.0')
    def do_POST(self):
        prompts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        value = -2.0 if gamma else -1.0
        of = [{"index": n, "finish_reason": "length", "text": prompt + " yes", "logprobs": {
            "text_offset": [0, 1, 2, len(prompt)], "token_logprobs": [None, value, value, -9.0],
        }} for n, prompt in enumerate(prompts)]
        self.answer(json.dumps({"id": "a", "object": "text_completion", "created": 0, "model": "m",
                                "choices": of[::-1]}))
http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a program in the place of ``vllm``, of which the tests write the text."""
    path = tmp_path / "vllm"
    python = sys.executable
    path.write_text(f'#!/bin/sh\nexec {python} {tmp_path}/fake.py "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setattr(demo.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("CAPMOE_GAMMA", "7")  # of the caller, which no server of the demo has
    (tmp_path / "fake.py").write_text(FAKE, encoding="utf-8")
    return tmp_path / "fake.py"


def is_running(process: int) -> bool:
    """Whether a process runs; a zombie does not."""
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False
    ).stdout
    return bool(state.strip()) and not state.startswith("Z")


def test_a_server_and_its_workers_end_when_the_demo_is_interrupted(program: Path) -> None:
    with pytest.raises(KeyboardInterrupt), demo.Server(program.parent, SETTINGS, *PATHS) as server:
        server.await_ready()
        raise KeyboardInterrupt
    (log,) = program.parent.glob("*.log")
    _, worker, _, gamma = log.read_text(encoding="utf-8").splitlines()[0].split()
    assert gamma == SETTINGS["CAPMOE_GAMMA"]
    until = time.monotonic() + 10
    while is_running(int(worker)):
        assert time.monotonic() < until, "a worker was left behind"
        time.sleep(0.05)


def test_a_server_that_ends_is_reported_with_the_plugin_s_line(program: Path) -> None:
    program.write_text(
        "import sys; print('capmoe_eval: gamma=x: wrong'); print('bye'); sys.exit(2)", "utf-8"
    )
    with (
        demo.Server(program.parent, SETTINGS, *PATHS) as server,
        pytest.raises(UsageError) as refused,
    ):
        server.await_ready()
    assert str(refused.value) == "vllm serve: ended with status 2: capmoe_eval: gamma=x: wrong"


def test_wrong_settings_show_before_a_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.Server, "__enter__", lambda _: pytest.fail("started"))
    with pytest.raises(UsageError, match="CAPMOE_GAMMA=-1: "):
        demo.main(["--gamma", "-1"])
    with pytest.raises(UsageError, match="smollm2_moe has no checkpoint; run `make real`"):
        demo.main(["--model", "smollm2_moe"])


def test_both_servers_are_asked_the_same(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    demo.main([])
    assert program
    text = capsys.readouterr().out
    assert text.count("stock vLLM     -2.000  yes") == text.count("score 1.0      -4.000  yes") == 4
    assert text.endswith("adds to /metrics:\n  capmoe_a_total 3.0\n")


CLIENTS = 100


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
def test_a_server_bears_many_clients_aborted_requests_and_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "PROMETHEUS_MULTIPROC_DIR"):
        monkeypatch.delenv(name, raising=False)  # as a user has it
    miniworld_tokenizer().save_pretrained(tokenizer := tmp_path / "tokenizer")
    settings = {**SETTINGS, "CAPMOE_DECODE": "constrained"}
    server = demo.Server(tmp_path, settings, WEIGHTS / demo.MODEL, tokenizer)
    with server:
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
    assert server._process.returncode is not None
    with server:  # again, on the same port
        assert len(server.ask(demo.PROMPTS)) == len(demo.PROMPTS)
