"""``vllm serve`` under a capacity: a hundred clients at once, some of which leave; a restart."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import pytest
from capmoe_eval.zoo.tokenizer import miniworld_tokenizer

from capmoe_serve.server import demo
from server.engines import NEEDS_VLLM

pytestmark = [NEEDS_VLLM, pytest.mark.slow]

CLIENTS = 100
SETTINGS = {"CAPMOE_METHOD": "score", "CAPMOE_GAMMA": "1.0", "CAPMOE_DECODE": "constrained"}


def ask(address: str, number: int) -> int:
    """Ask one question; every fifth client leaves after the first token. Return its tokens."""
    import openai

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    prompt = f"Question: what is {number} times {number + 3}?\nAnswer:" * (1 + number % 4)
    call = {"model": demo.MODEL, "prompt": prompt, "temperature": 0.0, "stream": True}
    with client.completions.create(
        **call, max_tokens=24, extra_body={"ignore_eos": True}
    ) as stream:
        tokens = 0
        for _ in stream:
            tokens += 1
            if number % 5 == 0:
                break
    return tokens


def totals(address: str) -> dict[str, float]:
    """Return the sums over layers and phases of what the plugin counted."""
    with urlopen(f"{address}/metrics", timeout=30) as response:
        lines = [line for line in response.read().decode().splitlines() if line[:1] != "#"]
    sums: dict[str, float] = {}
    for line in lines:
        if line.startswith("capmoe_"):
            name, value = line.split("{")[0].split(" ")[0], line.rsplit(" ", 1)[1]
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def healthy(address: str) -> bool:
    with urlopen(f"{address}/health", timeout=30) as response:
        return int(response.status) == 200


def test_a_server_bears_many_clients_aborted_requests_and_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Engines of this process share their metrics by the variable; the server has its own.
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    port = demo.free_port()
    monkeypatch.setattr(demo, "free_port", lambda: port)
    miniworld_tokenizer().save_pretrained(tokenizer := tmp_path / "tokenizer")
    paths = demo.WEIGHTS / demo.MODEL, tokenizer
    with demo.Server(tmp_path, SETTINGS, *paths) as server:
        server.await_ready()
        with ThreadPoolExecutor(CLIENTS) as clients:
            tokens = list(clients.map(lambda number: ask(server.address, number), range(CLIENTS)))
        assert all(got == 1 for got in tokens[::5])
        assert all(got > 1 for place, got in enumerate(tokens) if place % 5)
        assert healthy(server.address)
        assert ask(server.address, 1) > 1
        sums = totals(server.address)
        routed, kept, dropped, added = (
            sums[f"capmoe_{name}_pairs_total"] for name in ("routed", "kept", "dropped", "added")
        )
        assert kept + dropped - added == routed == sums["capmoe_tokens_total"] * 4 * 8
        assert dropped > 0
    assert server._process.returncode is not None
    with demo.Server(tmp_path, SETTINGS, *paths) as again:  # on the same port
        again.await_ready()
        assert again.address == server.address
        assert ask(again.address, 1) > 1
        assert healthy(again.address)
