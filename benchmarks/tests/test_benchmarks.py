"""The benchmarks as commands, as small as they can be, and what they refuse; no time is tested."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from bench_runs import bench
from capmoe_bench.benchmarks import main
from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.provenance import weights_hash
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.datasource import DataSource
from capmoe_eval.zoo.checkpoints import trained_model
from capmoe_eval.zoo.hub import ready
from lm_eval.tasks import TaskManager
from tests.bad_input import refusal
from transformers import AutoModelForCausalLM, OlmoeForCausalLM

from capmoe_benchmarks import suite
from capmoe_benchmarks.wrapper import FORWARD, GENERATE


def targets(content: dict[str, Any]) -> dict[str, float | None]:
    return {target["name"]: target["target"] for target in content["targets"]}


def test_forward(tmp_path: Path) -> None:
    small = ["--shape", "small", "--prompt", "16", "--rounds", "2", "--warmup", "0"]
    status, content = bench(tmp_path, "forward", *small)
    assert status == 0
    assert list(targets(content).values()) == [0.98, 0.98, 1.05, 0.95, 0.95]
    assert set(content["seconds"]) == {"stock", *FORWARD}
    dropped = content["dropped_share"]
    assert dropped.pop("baseline") == dropped.pop("score, γ=1000") == 0
    assert min(dropped.values()) > 0.15
    assert content["peaks"] == pytest.approx([4], rel=0.1)
    for target, name in zip(content["targets"], FORWARD, strict=True):
        spent = content["seconds"][name]
        assert target["name"] == f"{name} over stock"
        ratios = [a / b for a, b in zip(content["seconds"]["stock"], spent, strict=True)]
        assert min(ratios) <= target["ratio"]["median"] <= max(ratios)
    # No speedup is asked of a router that drops little.
    flat = ["--shape", "small", "--prompt", "64", "--peak", "1.2", "--rounds", "1", "--warmup", "0"]
    _, content = bench(tmp_path, "forward", *flat)
    assert content["dropped_share"]["score, γ=1"] < 0.15
    assert targets(content)["score, γ=1 over stock"] is None


def test_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every side makes equally many tokens, whatever the model says."""
    made: list[int] = []
    stock = OlmoeForCausalLM.generate

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = stock(self, *args, **kwargs | {"eos_token_id": list(range(500))})
        made.append(tokens.numel())
        return tokens

    monkeypatch.setattr(OlmoeForCausalLM, "generate", counted)
    few = ["--prompt", "16", "--new", "3", "--rounds", "1", "--warmup", "0"]
    status, content = bench(tmp_path, "generate", "--shapes", "small", "zoo:olmoe", *few)
    assert status == 0
    names = [f"{model}: {side} over stock" for model in content["shapes"] for side in GENERATE]
    assert targets(content) == dict.fromkeys(names, 0.95)
    for model in ("small", "zoo:olmoe"):
        assert set(content["seconds"][model]) == {"stock", *GENERATE}
        dropped = content["dropped_share"][model]
        shares = [dropped[f"score, γ={gamma}"] for gamma in ("0.5", "1", "1.5", "2", "1000")]
        assert shares == sorted(set(shares), reverse=True)
        assert shares[-1] == dropped["baseline"] == 0
    assert set(made) == {8 * (16 + 3)}


@pytest.mark.nightly
def test_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are not started here: the two sides are looked at as they would be."""
    ran: list[tuple[str, ...]] = []

    def process(module: str, *words: str) -> float:
        ran.append((module, *words))
        if module == "lm_eval":
            check_plain(dict(zip(words[::2], words[1::2], strict=True)))
        return {"lm_eval": 3.0, "capmoe_eval": 2.0}[module]

    monkeypatch.setattr(suite, "seconds_of", process)
    few = ["--tasks", "obqa", "boolq", "--rounds", "1", "--limit", "4"]
    status, content = bench(tmp_path, "suite", *few)
    assert status == 0
    ratios = [target["ratio"]["median"] for target in content["targets"]]
    assert ratios == [8 * 2 * 3.0 / 2.0, 3.0 / 2.0]
    # Two rounds, the first to warm up: two tasks for the grid and one for the single cell.
    assert sum(words[0] == "lm_eval" for words in ran) == 2 * 3
    ours = [words for words in ran if words[0] == "capmoe_eval" and "-m" in words]
    assert len({words[-1] for words in ours}) == len(ours) == 2  # no run finds the other's results
    assert all("device=cpu" in words for words in ours)  # as plain lm-eval's


def test_a_command_that_fails_has_no_time() -> None:
    assert suite.seconds_of("timeit", "-n1", "-r1", "import time; time.sleep(0.1)") > 0.1
    with pytest.raises(UsageError, match="timeit: said 'SystemError: no'"):
        suite.seconds_of("timeit", "raise SystemError('no')")


def check_plain(given: dict[str, str]) -> None:
    """Plain lm-eval gets the same weights and the same documents."""
    loaded = AutoModelForCausalLM.from_pretrained(
        given["--model_args"].split(",")[0].removeprefix("pretrained=")
    )
    assert weights_hash(loaded) == weights_hash(trained_model("olmoe").float())
    name = given["--tasks"]
    manager = TaskManager(include_path=given["--include_path"], include_defaults=False)
    (task,) = manager.load([name])["tasks"].values()
    hub = DataSource("miniworld", Path("miniworld"))
    lm_eval_name = {"plain_obqa": "openbookqa", "plain_boolq": "boolq"}[name]
    (own,) = TaskLibrary().get(lm_eval_name, ready(hub))["tasks"].values()
    assert [doc for doc, _ in zip(task.eval_docs, range(5), strict=False)] == [
        doc for doc, _ in zip(own.eval_docs, range(5), strict=False)
    ]
    assert task.doc_to_text(task.eval_docs[0]) == own.doc_to_text(own.eval_docs[0])


REFUSED = {
    **{
        f"forward --{option} {word}": f"--{option}={word}: must be"
        for option in ("layers", "batch", "prompt", "rounds")
        for word in ("0", "-1", "x")
    },
    **{f"forward --peak {word}": "peak=" for word in ("nan", "inf", "-1", "0", "100", "x")},
    "forward --warmup -1": "--warmup=-1",
    "forward --layers 5000": "--layers=5000: must be a whole number from 1 to 4096",
    "forward --batch 7": "batch=7: must be a multiple",
    "forward --shape olmo": "did you mean 'olmoe'",
    "forward --device qpu": "device=qpu",
    "suite --limit 0": "--limit=0",
    "suite --model nope": "--model=nope",
    "suite --tasks obqq": "did you mean 'obqa'",
    "generate --shapes zoo:olmo": "did you mean 'olmoe'",
    "generate --shapes zoo_olmoe": "shapes=zoo_olmoe: ",
    "generate --shapes real:nobody": "`make real` writes it",
    "generate --batch 3": "batch=3: must be a multiple of 8",
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_one_line_and_status_2(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert REFUSED[words] in refusal(main, shlex.split(words), tmp_path, capsys)
