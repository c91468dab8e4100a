"""Timing in turn, ratios, what a target says, and live bytes."""

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch
from capmoe_eval.evaluation.provenance import described

from capmoe_bench.decision import peak_bytes
from capmoe_bench.rounds import CPU, alternate, finish, measured_on, ratio, timed
from capmoe_bench.timings import Spread, Target, read_evaluation, targets


def test_every_round_runs_every_side_and_begins_with_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran: list[str] = []

    def side(name: str, seconds: float) -> float:
        ran.append(name)
        return seconds * len(ran)

    seconds = alternate(
        {"a": lambda: side("a", 1), "b": lambda: side("b", 10)}, rounds=2, warmup=1, title="it"
    )
    assert "".join(ran) == "abbaab"
    assert capsys.readouterr().err == "".join(f"it: round {n} of 3\n" for n in (1, 2, 3))
    assert seconds == {"a": [4, 5], "b": [30, 60]}  # the round of warming up does not count


def test_a_ratio_is_taken_within_the_rounds() -> None:
    # The machine was three times as slow in the second round: no ratio shows it.
    assert ratio([2, 6, 2], [1, 3, 1]) == Spread(2, 2, 2)
    assert ratio([1, 2, 3, 4, 5], [1, 1, 1, 1, 1]) == Spread(3, 2, 4)


def test_what_is_timed_is_waited_for_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", said.append)
    gpu = torch.device("cuda:1")
    assert timed(lambda: said.append("work"), gpu) >= 0
    assert said == [gpu, "work", gpu]


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("share", 0.12345, "12.35 %"),
        ("share", 0.0, "0.00 %"),
        ("share", 0.00003456, "0.0035 %"),
        ("share", 0.00005, "0.01 %"),
        ("×", 1.23456, "1.235 ×"),
        ("s", 1.23456, "1.23 s"),
        ("", 7.0, "7"),
    ],
)
def test_a_value_has_the_digits_of_its_unit(unit: str, value: float, text: str) -> None:
    target = Target.of("t", "", [value], unit=unit)
    assert target.shown(value).replace("\u00a0", " ") == text


def test_a_miss_is_written_and_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spread = Spread(0.5, 0.4, 0.6)
    written = [Target.of("slow", "a over b", spread, at_least=1.0)]
    written += [Target.of("small", "", spread, at_most=1.0), Target.of("any", "", [0.5])]
    finish(argparse.Namespace(command="forward", out=tmp_path), CPU, written, rounds=3)
    missed, met, *_ = capsys.readouterr().out.splitlines()
    assert missed.endswith("≥ 1.000\u00a0×  MISSED")
    assert met.endswith("≤ 1.000\u00a0×  met")
    content = read_evaluation(tmp_path / "forward.json")
    assert targets(content) == written
    assert (content["command"], content["rounds"]) == ("forward", 3)
    assert content["machine"] == measured_on(CPU)["machine"]
    assert content["machine"]["name"] == described(CPU)["name"]


def test_live_bytes_count_what_is_alive_at_once() -> None:
    inputs = torch.zeros(1000)

    def work() -> None:
        first = inputs + 1  # 4000
        view = first.view(10, 100)[2:]
        del first
        second = view * 2  # 4000 + 3200, the view keeps the first
        del view
        second.add_(1)
        third = torch.zeros(100)  # 3200 + 400
        del second, third

    other = torch.device("meta")  # where no NumPy array counts
    assert peak_bytes(work, other) == 7200
    assert peak_bytes(lambda: inputs.add_(1), other) == 0  # nothing is new
    assert peak_bytes(lambda: [torch.zeros(10) for _ in range(5)], other) == 200
    array_bytes = peak_bytes(lambda: np.zeros(1000) + np.zeros(1000), CPU)
    assert 24_000 <= array_bytes < 40_000  # beside it, Python's own objects
