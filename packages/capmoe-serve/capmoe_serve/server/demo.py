"""Serve a model by vLLM without and with a capacity, and ask both the same.

``make serve-demo`` runs it, with the embedded model or that of ``make real``
(``--model smollm2_moe``). Each server is ``vllm serve`` on a free loopback port, and is asked by
OpenAI's client.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final
from urllib.request import urlopen

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.arguments import Parser
from capmoe_eval.experiment.cell import REAL, checkpoint
from capmoe_eval.zoo import WEIGHTS
from capmoe_eval.zoo.checkpoints import copy_checkpoint
from capmoe_eval.zoo.sets import documents
from capmoe_eval.zoo.tokenizer import miniworld_tokenizer

from capmoe_serve.server.local import DEFAULTS
from capmoe_serve.server.settings import PREFIX, read_settings

MODEL: Final = "olmoe"
"""The embedded model."""
SMOLLM2: Final = "smollm2_moe"
PROMPTS: Final = (
    "The capital of France is",
    "Water boils when",
    "To bake bread, first",
    "The moon is smaller than the earth, so",
)
READY, STOPPED = 300, 30
"""Seconds that a server may take until it answers, and until it has stopped."""


def main(words: Sequence[str] | None = None) -> None:
    """Serve, ask, print and stop."""
    parser = Parser(prog="make serve-demo", description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="score", help="CAPMOE_METHOD (default: %(default)s)")
    parser.add_argument("--gamma", default="1.0", help="CAPMOE_GAMMA (default: %(default)s)")
    parser.add_argument(
        "--model", choices=(MODEL, SMOLLM2), default=MODEL, help="(default: %(default)s)"
    )
    options = parser.parse_args(words)
    settings = {f"{PREFIX}METHOD": options.method, f"{PREFIX}GAMMA": options.gamma}
    read_settings(settings)  # a mistake shows before a server starts
    weights = Path(checkpoint(REAL + SMOLLM2))
    if options.model == SMOLLM2 and not (weights / "config.json").is_file():
        raise UsageError(f"--model={options.model}: {weights} has no checkpoint; run `make real`")
    with tempfile.TemporaryDirectory(prefix="capmoe-demo-") as directory, ExitStack() as started:
        folder, tokenizer = Path(directory), weights
        prompts: Sequence[str] = PROMPTS
        if options.model == MODEL:
            weights = copy_checkpoint(WEIGHTS / MODEL, Path(tempfile.mkdtemp(dir=folder)))
            miniworld_tokenizer().save_pretrained(tokenizer := folder / "tokenizer")
            rows = documents("miniworld")["allenai/ai2_arc"]["ARC-Challenge"]["test"][:4]
            prompts = [f"Question: {row['question']}\nAnswer:" for row in rows]
        # Both start at once: most of it is the import of libraries.
        stock, capped = (
            started.enter_context(Server(folder, each, weights, tokenizer))
            for each in ({}, settings)
        )
        answers = {
            "stock vLLM": stock.ask(prompts),
            " ".join(settings.values()): capped.ask(prompts),
        }
        for number, prompt in enumerate(prompts):
            print(f"\n{prompt} …")
            for name, of_server in answers.items():
                logprob, text = of_server[number]
                width = max(map(len, answers))
                print(f"  {name:<{width}}  {logprob:9.3f}  {' '.join(text.split())}")
        print("\nThe number is the log-probability of the prompt. The plugin adds to /metrics:")
        # Without what is 0, and without histograms' buckets.
        for line in capped.metrics():
            name, _, value = line.rpartition(" ")
            if float(value) and not name.partition("{")[0].endswith(("_bucket", "_created")):
                print(f"  {line}")


class Server:
    """A server of the model in a ``with`` block, under the variables of the plugin."""

    def __init__(
        self, folder: Path, settings: Mapping[str, str], weights: Path, tokenizer: Path
    ) -> None:
        self._settings = settings
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self._log = folder / f"{port}.log"
        self._command = [
            *(str(Path(sys.executable).with_name("vllm")), "serve", str(weights)),
            *("--tokenizer", str(tokenizer), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
            *("--enforce-eager", "--max-model-len", "512", "--no-enable-prefix-caching"),
        ]

    def __enter__(self) -> Server:
        """Start the server."""
        others = {key: each for key, each in os.environ.items() if not key.startswith(PREFIX)}
        self._began = time.monotonic()
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                env={**DEFAULTS, "HF_HUB_OFFLINE": "1", **others, **self._settings},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is this process's, which then stops the server
            )
        return self

    def __exit__(self, *_error: object) -> None:
        """Stop the server, and every process that it has started."""
        self._process.terminate()  # it ends its workers by itself
        try:
            self._process.wait(STOPPED)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def await_ready(self) -> None:
        """Wait until the server answers.

        Raises:
            UsageError: If it ends, or does not answer in time; the line has what the plugin said
                last in the server's log, or the log's last line.
        """
        while time.monotonic() < self._began + READY and self._process.poll() is None:
            with suppress(OSError), urlopen(f"{self.address}/health", timeout=5):
                return
            time.sleep(0.2)
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        ours = (line for line in reversed(lines) if line.startswith("capmoe_eval:"))
        reason = next(ours, lines[-1] if lines else "no output")
        if (status := self._process.poll()) is not None:
            raise UsageError(f"vllm serve: ended with status {status}: {reason}")
        raise UsageError(f"vllm serve: does not answer after {READY} s: {reason}")

    def ask(self, prompts: Sequence[str]) -> list[tuple[float, str]]:
        """Return the log-probability of each prompt, and its most likely continuation."""
        import openai

        self.await_ready()
        client = openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0)
        # One request, so that the prompts meet in few steps and share their capacities.
        completion = client.completions.create(
            model=MODEL, prompt=list(prompts), max_tokens=24, echo=True, logprobs=0, temperature=0
        )
        answers = []
        choices = sorted(completion.choices, key=lambda choice: choice.index)
        for prompt, choice in zip(prompts, choices, strict=True):
            places = zip(choice.logprobs.text_offset, choice.logprobs.token_logprobs, strict=True)
            of_prompt = [value for place, value in places if 0 < place < len(prompt)]
            answers.append((math.fsum(of_prompt), choice.text[len(prompt) :]))
        return answers

    def metrics(self) -> list[str]:
        """Return the lines of ``/metrics`` that are the plugin's."""
        with urlopen(f"{self.address}/metrics", timeout=STOPPED) as response:
            lines = response.read().decode().splitlines()
        return [line for line in lines if line.startswith("capmoe_")]
