"""The demo asks two servers, compares their answers, and leaves no process behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from capmoe_eval.errors import UsageError

from capmoe_serve.server import demo
from server.engines import NEEDS_VLLM

SETTINGS = {"CAPMOE_METHOD": "score", "CAPMOE_GAMMA": "1.0"}
PATHS = Path("weights"), Path("tokenizer")
FAKE = """
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("worker", child.pid, "gamma", os.environ.get("CAPMOE_GAMMA"), flush=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
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


@pytest.mark.parametrize("settings", [{}, SETTINGS])
def test_a_server_and_its_workers_end_when_the_demo_is_interrupted(
    program: Path, settings: dict[str, str]
) -> None:
    def interrupted(server: demo.Server) -> None:
        with server:
            server.await_ready()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted(demo.Server(program.parent, settings, *PATHS))
    (log,) = program.parent.glob("*.log")
    _, worker, _, gamma = log.read_text(encoding="utf-8").splitlines()[0].split()
    assert gamma == str(settings.get("CAPMOE_GAMMA"))
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


def test_the_log_probability_is_of_the_answer_s_tokens() -> None:
    prompt = "Question: Answer: why?\nAnswer: no way"
    begin = prompt.index(" no")
    logprobs = SimpleNamespace(
        text_offset=[0, begin - 1, begin, begin + 3, len(prompt)],
        token_logprobs=[None, -5.0, -1.0, -0.5, -9.0],
    )
    assert demo.answer_logprob(logprobs, prompt) == -1.5


def test_the_report_compares_the_answers_and_leaves_zeros_out() -> None:
    questions = demo.miniworld_questions(2)
    stock = demo.Answered([[-1.0, -2.0, -3.0, -4.0]] * 2, [])
    metrics = ['capmoe_a_total{layer="0"} 3.0', 'capmoe_b{le="1",x="y"} 0.0', "capmoe_a_bucket 1.0"]
    capped = demo.Answered([[-1.25, -2.0, -3.0, -4.0]] * 2, metrics)
    text = "\n".join(demo.report(questions, stock, capped, SETTINGS))
    assert "of 8 answers to 2 questions" in text
    assert text.count("-1.000      -1.250   -0.250") == 2
    n_first = sum(question.right == 0 for question in questions)
    assert f"Right: {n_first} of 2 by stock vLLM, {n_first} under score 1.0" in text
    assert "Largest change: 0.250." in text
    assert [line.split()[0] for line in text.splitlines() if "capmoe_" in line] == [
        metrics[0].split()[0]
    ]
    assert "  CAPMOE_METHOD=score CAPMOE_GAMMA=1.0 vllm serve MODEL" in text


def test_completions_stand_below_their_prompt_and_need_the_checkpoint() -> None:
    lines = demo.completions(["The sea"], [" is\nblue."], [" is."], SETTINGS)
    assert list(lines) == ["\nThe sea …", "  stock vLLM  is blue.", "  score 1.0   is."]
    with pytest.raises(UsageError, match="smollm2_moe has no checkpoint; run `make real`"):
        demo.main(["--model", "smollm2_moe"])


@NEEDS_VLLM
@pytest.mark.slow
def test_real_servers_are_asked_and_stopped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "PROMETHEUS_MULTIPROC_DIR"):
        monkeypatch.delenv(name, raising=False)  # as a user has it
    demo.main(["--questions", "2"])
    text = capsys.readouterr().out
    changes = re.findall(r"(?m)^.{58}\S+ +-\d+\.\d+ +-\d+\.\d+ +([+-]\d+\.\d+)$", text)
    assert len(changes) == 8
    assert any(map(float, changes))
    assert "capmoe_dropped_pairs_total" in text
    assert text.count("stopped") == 2
    assert os.environ.get("CAPMOE_METHOD") is None
