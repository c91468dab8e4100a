"""Serve a model by vLLM without and with a capacity, and ask both the same.

``make serve-demo`` runs it. The embedded model answers questions, and the one of ``make real``
(``--model smollm2_moe``) completes English sentences. Each server is ``vllm serve`` on a free
loopback port, and is asked by OpenAI's client.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.request import urlopen

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.arguments import COUNT, Parser
from capmoe_eval.experiment.cell import REAL, checkpoint
from capmoe_eval.zoo import WEIGHTS
from capmoe_eval.zoo.sets import documents
from capmoe_eval.zoo.tokenizer import miniworld_tokenizer

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
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # some small functions would be compiled even in eager mode
}


class Question(NamedTuple):
    """A question with its possible answers."""

    prompt: str
    answers: Sequence[str]
    right: int


@dataclass(frozen=True)
class Answered:
    """The answers of one server."""

    logprobs: Sequence[Sequence[float]]  # of every answer of every question
    metrics: Sequence[str]  # lines of the plugin

    def n_right(self, questions: Sequence[Question]) -> int:
        """Return how often the right answer is the most likely one."""
        pairs = zip(questions, self.logprobs, strict=True)
        return sum(max(range(len(of)), key=of.__getitem__) == q.right for q, of in pairs)


def main(words: Sequence[str] | None = None) -> None:
    """Serve, ask, print and stop."""
    parser = Parser(prog="make serve-demo", description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="score", help="CAPMOE_METHOD (default: %(default)s)")
    parser.add_argument("--gamma", default="1.0", help="CAPMOE_GAMMA (default: %(default)s)")
    parser.add_argument("--questions", type=COUNT, default=8, help="(default: %(default)s)")
    parser.add_argument(
        "--model", choices=(MODEL, SMOLLM2), default=MODEL, help="(default: %(default)s)"
    )
    options = parser.parse_args(words)
    settings = {f"{PREFIX}METHOD": options.method, f"{PREFIX}GAMMA": options.gamma}
    read_settings(settings)  # a mistake shows before a server starts
    weights = WEIGHTS / MODEL if options.model == MODEL else Path(checkpoint(REAL + SMOLLM2))
    if not (weights / "config.json").is_file():
        raise UsageError(f"--model={options.model}: {weights} has no checkpoint; run `make real`")
    questions = miniworld_questions(options.questions)
    with tempfile.TemporaryDirectory(prefix="capmoe-demo-") as directory, ExitStack() as started:
        folder = Path(directory)
        tokenizer = weights
        if options.model == MODEL:
            miniworld_tokenizer().save_pretrained(tokenizer := folder / "tokenizer")
        # Both start at once: most of it is the import of libraries.
        servers = [
            started.enter_context(Server(folder, each, weights, tokenizer))
            for each in ({}, settings)
        ]
        for server in servers:
            server.await_ready()
        if options.model == SMOLLM2:
            free, bound = (complete(server, PROMPTS) for server in servers)
            print(*completions(PROMPTS, free, bound, settings), sep="\n")
            return
        stock, capped = (ask(server, questions) for server in servers)
    print(*report(questions, stock, capped, settings), sep="\n")


def miniworld_questions(count: int) -> list[Question]:
    """Return held-out questions about the mini-world, as ARC-Challenge has them."""
    rows = documents("miniworld")["allenai/ai2_arc"]["ARC-Challenge"]["test"][:count]
    return [
        Question(
            f"Question: {row['question']}\nAnswer:",
            [f" {text}" for text in row["choices"]["text"]],
            row["choices"]["label"].index(row["answerKey"]),
        )
        for row in rows
    ]


def ask(server: Server, questions: Sequence[Question]) -> Answered:
    """Ask a server all questions at once, and read its metrics."""
    import openai

    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    prompts = [question.prompt + answer for question in questions for answer in question.answers]
    # One request, so that the prompts meet in few steps and share their capacities.
    completion = client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=1, echo=True, logprobs=0, temperature=0
    )
    with urlopen(f"{server.address}/metrics", timeout=STOPPED) as response:
        lines = response.read().decode().splitlines()
    choices = sorted(completion.choices, key=lambda choice: choice.index)
    logprobs = iter([answer_logprob(c.logprobs, p) for c, p in zip(choices, prompts, strict=True)])
    return Answered(
        [[next(logprobs) for _ in question.answers] for question in questions],
        [line for line in lines if line.startswith("capmoe_")],
    )


def complete(server: Server, prompts: Sequence[str]) -> list[str]:
    """Return a server's most likely continuation of each prompt; they are sent in one request."""
    import openai

    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    completion = client.completions.create(
        model=MODEL, prompt=list(prompts), max_tokens=24, temperature=0
    )
    return [c.text for c in sorted(completion.choices, key=lambda choice: choice.index)]


def completions(
    prompts: Sequence[str], stock: Sequence[str], capped: Sequence[str], settings: Mapping[str, str]
) -> Iterator[str]:
    """Yield the lines that show the continuations of two servers below each other."""
    names = "stock vLLM", " ".join(settings.values())
    width = max(map(len, names))
    for prompt, *both in zip(prompts, stock, capped, strict=True):
        yield f"\n{prompt} …"
        for name, text in zip(names, both, strict=True):
            yield f"  {name:<{width}}  {' '.join(text.split())}"


def answer_logprob(logprobs: Any, prompt: str) -> float:
    """Return the log-probability of the answer at the end of a prompt that was echoed."""
    begin = prompt.rindex("Answer:") + len("Answer:")
    places = zip(logprobs.text_offset, logprobs.token_logprobs, strict=True)
    return math.fsum(value for place, value in places if begin <= place < len(prompt))


class Server:
    """A server of the model in a ``with`` block, under the variables of the plugin."""

    def __init__(
        self, folder: Path, settings: Mapping[str, str], weights: Path, tokenizer: Path
    ) -> None:
        self._name = " ".join(f"{key}={value}" for key, value in settings.items()) or "stock vLLM"
        self._settings, self._folder = settings, folder
        port = free_port()
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
        print(f"{self._name}: vllm serve starts at {self.address}", flush=True)
        others = {key: each for key, each in os.environ.items() if not key.startswith(PREFIX)}
        self._began = time.monotonic()
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                env={**_ENVIRONMENT, **others, **self._settings},
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
        print(f"{self._name}: stopped", flush=True)

    def await_ready(self) -> None:
        """Wait until the server answers.

        Raises:
            UsageError: If it ends, or does not answer in time; the line has the reason.
        """
        while time.monotonic() < self._began + READY:
            if self._process.poll() is not None:
                status = self._process.returncode
                raise UsageError(f"vllm serve: ended with status {status}: {reason(self._log)}")
            try:
                with urlopen(f"{self.address}/health", timeout=5):
                    spent = time.monotonic() - self._began
                    print(f"{self._name}: answers after {spent:.0f} s", flush=True)
                    return
            except OSError:
                time.sleep(0.2)
        raise UsageError(f"vllm serve: does not answer after {READY} s: {reason(self._log)}")


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def reason(log: Path) -> str:
    """Return what the plugin said last in a server's log, or the log's last line."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
    return next((line for line in reversed(lines) if line.startswith("capmoe_eval:")), lines[-1])


def report(
    questions: Sequence[Question], stock: Answered, capped: Answered, settings: Mapping[str, str]
) -> Iterator[str]:
    """Yield the lines that compare two servers."""
    name = " ".join(settings.values())
    n_answers = sum(len(question.answers) for question in questions)
    yield ""
    yield (
        f"Log-probabilities of {n_answers} answers to {len(questions)} questions of the "
        "mini-world, sent in one request (* is the right answer):"
    )
    yield f"{'question':<58}{'answer':<12}{'stock':>9}{name:>12}{'change':>9}"
    changes = []
    for question, before, after in zip(questions, stock.logprobs, capped.logprobs, strict=True):
        text = question.prompt.removeprefix("Question: ").removesuffix("\nAnswer:")
        for number, answer in enumerate(question.answers):
            change = after[number] - before[number]
            changes.append(abs(change))
            mark = "*" if number == question.right else ""
            yield (
                f"{'' if number else text[:56]:<58}{answer.strip() + mark:<12}"
                f"{before[number]:>9.3f}{after[number]:>12.3f}{change:>+9.3f}"
            )
    yield ""
    yield (
        f"Right: {stock.n_right(questions)} of {len(questions)} by stock vLLM, "
        f"{capped.n_right(questions)} under {name}. Largest change: {max(changes):.3f}."
    )
    yield ""
    yield "What the plugin adds to /metrics (docs/server.md says what each line means):"
    yield from shortened(capped.metrics) if capped.metrics else ["  none"]
    yield ""
    yield "Next, your model, with the variables of docs/server.md:"
    variables = " ".join(f"{key}={value}" for key, value in settings.items())
    yield f"  {variables} vllm serve MODEL --enforce-eager"


def shortened(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of metrics that are not 0, without histograms' buckets."""
    for line in lines:
        name, _, value = line.rpartition(" ")
        if float(value) and not name.partition("{")[0].endswith(("_bucket", "_created")):
            yield f"  {line}"
