"""``capmoe-eval loads`` on the embedded trace and on traces of servers."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from capmoe_serve.loads import main
from capmoe_serve.summary import ALL, GAMMAS, summarise
from capmoe_serve.trace_file import load_trace
from serving.test_readers import IDS, completion, lines

EXAMPLE = Path(str(resources.files("capmoe_serve") / "data" / "example.npz"))


def loads(*words: object) -> int:
    with pytest.raises(SystemExit) as done:
        main([str(word) for word in words])
    return int(done.value.code or 0)


def test_every_layer_is_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert loads(EXAMPLE, "--json", file) == 0
    trace, content = load_trace(EXAMPLE), json.loads(file.read_text())
    summary = summarise(trace)
    assert (content["assumed_steps"], content["decode_steps"]) == (None, 0)
    assert (content["steps"], content["ranks"]) == (trace.n_steps, None)
    assert [layer["layer"] for layer in content["layers"]] == [*trace.layers, ALL]
    assert content["load"][trace.layers[2]] == summary.load_LE[2].tolist()
    rows = [row for row in content["capacities"] if row["layer"] == ALL]
    assert [row["gamma"] for row in rows] == list(GAMMAS)
    assert [row["dropped"] for row in rows] == summary.capacities.loc[ALL, "dropped"].tolist()
    assert "Not known without --ranks" in capsys.readouterr().out
    assert loads(EXAMPLE, "--only", "prompts", "--gammas", 1, "--ranks", 5) == 0
    assert "5 ranks do not divide 64 experts: 1 of them have" in capsys.readouterr().out


def test_steps_that_a_server_does_not_tell_are_assumed_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path / "out.jsonl", completion(IDS.tolist()))
    assert loads(path, "--experts", 6, "--step-tokens", 2) == 0
    printed = capsys.readouterr().out
    assert "5 tokens, 3 steps, 2 MoE layers, 6 experts, top-2" in printed
    assert "assumed, 2 tokens in the order of the file" in printed
    assert "Not known without gate scores" in printed
    assert "lost_score" not in printed
    assert loads(path) == 2
    assert "add --experts E" in capsys.readouterr().err
    path.with_suffix(".json").write_text(json.dumps([completion(IDS.tolist())], indent=1))
    assert loads(path.with_suffix(".json"), "--experts", 6) == 0
    assert "5 tokens" in capsys.readouterr().out


def test_the_example_has_scores_that_tell_the_methods_apart() -> None:
    assert EXAMPLE.stat().st_size < 600_000
    trace = load_trace(EXAMPLE)
    assert trace.score_TLK is not None
    at = summarise(trace, (1.0,)).capacities.loc[ALL, 1.0]
    assert at["lost_score"] < 0.8 * at["lost_random"]
