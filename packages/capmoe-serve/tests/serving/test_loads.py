"""``capmoe-eval loads`` on the embedded trace and on traces of servers."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from capmoe_serve.loads import main
from capmoe_serve.summary import GAMMAS, summarise
from capmoe_serve.trace import Trace
from capmoe_serve.trace_file import load_trace
from serving.test_readers import IDS, completion, lines

EXAMPLE = Path(str(resources.files("capmoe_serve") / "data" / "example.npz"))


def loads(*words: object) -> int:
    with pytest.raises(SystemExit) as done:
        main([str(word) for word in words])
    return int(done.value.code or 0)


def test_every_layer_is_in_the_json_and_one_in_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, described = tmp_path / "out.svg", tmp_path / "out.json"
    assert loads(EXAMPLE, out, "--json", described, "--layer", 2) == 0
    summary = summarise(load_trace(EXAMPLE))
    content = json.loads(described.read_text())
    assert content["assumed_steps"] is None
    assert content["steps"] == summary.steps
    assert [layer["name"] for layer in content["layers"]] == list(load_trace(EXAMPLE).layers)
    assert content["layers"][2]["load"] == list(summary.layers[2].load)
    assert [at["gamma"] for at in content["total"]["at"]] == list(GAMMAS)
    assert "<svg" in out.read_text()
    assert "Not known without --ranks" in capsys.readouterr().out
    assert content["decode_steps"] == 0
    assert loads(EXAMPLE, "--only", "prompts", "--gammas", 1) == 0
    assert loads(EXAMPLE, "--only", "decode") == 2
    assert "only=decode: the trace has no such step" in capsys.readouterr().err
    assert loads(EXAMPLE, out, "--layer", 4) == 2
    assert "layer=4: the trace has MoE layers 0 to 3" in capsys.readouterr().err


def test_steps_that_a_server_does_not_tell_are_assumed_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path / "out.jsonl", completion(IDS.tolist()))
    assert loads(path, "--experts", 6, "--step-tokens", 2) == 0
    printed = capsys.readouterr().out
    assert "5 tokens, 3 steps, 2 MoE layers, 6 experts, top-2" in printed
    assert "assumed, 2 tokens in the order of the file" in printed
    assert "Not known without gate scores" in printed
    assert "scores lost" not in printed
    assert loads(path) == 2
    assert "add --experts E" in capsys.readouterr().err
    path.with_suffix(".json").write_text(json.dumps([completion(IDS.tolist())], indent=1))
    assert loads(path.with_suffix(".json"), "--experts", 6) == 0
    assert "5 tokens" in capsys.readouterr().out


def test_the_example_has_scores_that_tell_the_methods_apart() -> None:
    assert EXAMPLE.stat().st_size < 600_000
    trace = load_trace(EXAMPLE)
    assert isinstance(trace, Trace)
    assert trace.score_TLK is not None
    at = next(at for at in summarise(trace).total.at if at.gamma == 1.0)
    assert at.dropped_score is not None
    assert at.dropped_score["score"] < 0.8 * at.dropped_score["random"]
