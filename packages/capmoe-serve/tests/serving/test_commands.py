"""The commands ``loads`` and ``advise``, and every command of their pages."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from capmoe_eval.__main__ import main
from tests.records import planned

from capmoe_serve.readers.formats import read_trace
from capmoe_serve.summary import ALL, GAMMAS, summarise
from capmoe_serve.trace import Trace, load_trace, save_trace
from serving.test_readers import completion, generated, lines, recording


def status(*words: object) -> int:
    """Return the exit status of a subcommand."""
    with pytest.raises(SystemExit) as done:
        main([*map(str, words)])
    return int(done.value.code or 0)


def test_every_layer_is_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert status("loads", "example", "--json", file) == 0
    trace, content = read_trace(Path("example")), json.loads(file.read_text())
    _, capacities = summarise(trace)
    assert (content["source"], content["decode_steps"]) == (trace.source, 0)
    assert (content["steps"], content["ranks"]) == (trace.n_steps, None)
    assert [layer["layer"] for layer in content["layers"]] == [*trace.layers, ALL]
    assert content["load"][trace.layers[2]] == trace.load(2).sum(axis=0).tolist()
    rows = [row for row in content["capacities"] if row["layer"] == ALL]
    assert [row["gamma"] for row in rows] == list(GAMMAS)
    assert [row["dropped"] for row in rows] == capacities.loc[ALL, "dropped"].tolist()
    assert "Not known without --ranks" in capsys.readouterr().out
    assert status("loads", "example", *["--only", "prompts", "--gammas", "1", "--ranks", "5"]) == 0
    assert "5 ranks do not divide 64 experts: 1 of them have" in capsys.readouterr().out


# The command of an advice: what it prints and writes; and every command of its pages.


ROOT = Path(__file__).parents[4]
PAGES = [
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in (
        "how-to/record_traffic.md",
        "how-to/choose_a_setting.md",
        "explanation/adaptive_gamma.md",
    )
]
TUTORIAL = (ROOT / "docs/tutorials/server_log.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"^    (capmoe-eval .*)$", "\n".join(PAGES), re.MULTILINE)))
HEADING = "## Counts or ids in arrays of your own"
OWN_ARRAYS = PAGES[0].partition(HEADING)[2].split("```")[1][7:]
"""The example that makes traces of arrays."""
assert {shlex.split(command)[1] for command in COMMANDS} == {"run", "sweep", "loads", "advise"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what the commands of the pages name, as a user's would be."""
    import torch

    generator = np.random.default_rng(0)
    experts = np.argsort(generator.random((5000, 2, 128)), axis=2)[:, :, :8]
    lines(tmp_path / "responses.jsonl", completion(experts.tolist()))
    lines(tmp_path / "generated.jsonl", generated(experts))
    (tmp_path / "results").symlink_to(ROOT / "results")
    (tmp_path / "capmoe_eval").symlink_to(ROOT / "capmoe_eval")
    recorded = {"logical_count": torch.from_numpy(generator.integers(1, 9, (4, 3, 16)))}
    torch.save(recorded, tmp_path / "expert_distribution_recorder_1790000000.5.pt")
    (tmp_path / "dump").mkdir()
    for rank in range(2):
        name = f"expert_distribution_recorder_1790000000.5_{rank}.pt"
        torch.save(recording(rank), tmp_path / "dump" / name)
    kinds = np.array([False, True, True])
    load_SLE = generator.integers(1, 9, (3, 4, 32))
    save_trace(
        Trace(32, load_SLE=load_SLE, decode_S=kinds), tmp_path / "traces/zoo_olmoe/gsm8k/1.npz"
    )
    np.save(tmp_path / "counts.npy", load_SLE)
    for layer in range(2):
        np.save(tmp_path / f"layer{layer}.npy", experts[:, layer])
    monkeypatch.chdir(tmp_path)
    exec(OWN_ARRAYS)
    return tmp_path


def run(command: str) -> int:
    """Return the exit status of a command; the cells of an evaluation, of minutes, are planned."""
    _, subcommand, *words = shlex.split(command, comments=True)
    if subcommand not in ("run", "sweep"):
        return status(subcommand, *words)
    keys = [word.split("=", 1) for word in words]
    sweep = [[f"{key}={value}" for value in values.split(",")] for key, values in keys]
    return 0 if all(planned(*each) for each in itertools.product(*sweep)) else 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_pages_runs(
    command: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = command.replace("/tmp/", "").replace("*", "1")
    assert run(command) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    if "advise" in command:
        advice = json.loads((place / "advice" / "advice.json").read_text())
        assert advice["sentence"] in printed
        assert all((place / "advice" / name).is_file() for name in advice["files"])


def test_arrays_of_a_users_own_become_traces(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = load_trace(place / "counts.npz")
    np.testing.assert_array_equal(counts.loads(), np.load("counts.npy"))
    ids = load_trace(place / "ids.npz")
    assert (ids.n_experts, ids.top_k) == (128, 8)
    np.testing.assert_array_equal(ids.expert_TLK[:, 1], np.load("layer1.npy"))
    assert HEADING in PAGES[0]
    assert status("loads", "counts.npy") == 2
    assert "for counts or ids in arrays of your own see" in capsys.readouterr().err


def test_the_sweep_of_the_tutorial_has_what_is_recommended_then_and_later(place: Path) -> None:
    (last,) = re.findall("^capmoe-eval advise .* --results .*$", TUTORIAL, re.MULTILINE)
    recommended, sweeps = [], []
    for command in (last.partition(" --at-most")[0], last.partition(" --results")[0], last):
        assert run(command) == 0
        advice = json.loads((place / "advice" / "advice.json").read_text())
        sweeps.append(advice["commands"])
        if advice["recommended"] is not None:
            recommended.append(advice["settings"][advice["recommended"]])
    assert sweeps.pop() == []
    for setting, (_, sweep) in itertools.product(recommended, sweeps):
        swept = dict(word.split("=") for word in shlex.split(sweep)[2:])
        assert setting["extra"] == 0
        for knob in ("method", "gamma", "granularity", "placement"):
            assert f"{setting[knob]}".lower().removesuffix(".0") in swept[knob].split(",")
    assert len(recommended) == 2


def test_the_front_has_changes_on_the_same_tasks(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "capmoe-eval advise example --ranks 8 --at-least-speedup 1.6 --results results/zoo"
    assert run(command) == 0
    advice = json.loads((place / "advice" / "advice.json").read_text())
    assert f"Accuracy is the mean over {', '.join(advice['tasks'])}." in capsys.readouterr().out
    on_front = [row for row in advice["settings"] if row["is_on_front"]]
    assert len({len(row["tasks"]) for row in on_front}) > 1
    assert all({*row["tasks"]} >= {*advice["tasks"]} for row in on_front)


def test_settings_that_nothing_tells_apart_are_one_row_of_the_front(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("capmoe-eval advise counts.npz --ranks 8 --at-least-speedup 1") == 0
    printed = capsys.readouterr().out
    assert "score γ=0.5 per device " in printed  # counts do not tell methods apart
    assert "order γ=0.5 per device " not in printed


def test_files_of_an_earlier_advice_go(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "capmoe-eval advise example --ranks=8 --at-least-speedup=1.5 --gammas 0.5 1"
    assert run(command) == 0
    out = place / "advice"
    advice = json.loads((out / "advice.json").read_text())
    assert {path.name for path in out.iterdir()} == {"advice.json", *advice["files"]}
    assert f"place experts as {advice['placement']}." in capsys.readouterr().out
    assert run(command.replace("1.5", "1.0")) == 0  # nothing need change
    assert [path.name for path in out.iterdir()] == ["advice.json"]
