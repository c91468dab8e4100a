"""What is said of adaptive γ, against the committed records of its trial."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from capmoe_eval.experiment.selection import finished
from capmoe_eval.report.adaptive import main
from capmoe_eval.serving.trial import (
    Interval,
    Outcome,
    by_model,
    mean_interval,
    outcomes,
    primary,
    verdicts,
)

ROOT = Path(__file__).parents[2]


def words(page: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return " ".join(word for word in text.split() if word != ">")  # whatever its lines


def signed(numbers: Interval, digits: int = 3) -> str:
    mean, low, high = (f"{number:+.{digits}f}".replace("-", "−") for number in numbers)
    return f"{mean} [{low}, {high}]"


@pytest.fixture(scope="module")
def trial() -> list[Outcome]:
    found = finished(["experiment=adaptive", "profile=zoo", f"results_dir={ROOT}/results/zoo"])
    assert len(found.records) == len(found.plans) and not found.broken
    return outcomes(found.records)


def test_every_setting_is_compared(trial: list[Outcome]) -> None:
    assert len({(one.model, one.task, one.factor) for one in trial}) == len(trial) == 4 * 3 * 6 * 2
    assert all(one.static_straggler is not None for one in trial), "the grid of static γ is wide"
    assert all(one.scores is not None and one.static_least is not None for one in trial)


def test_pages_say_the_verdict_and_no_other(
    trial: list[Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    last = primary(verdicts(trial))
    assert last is not None and last.cells == 12
    with pytest.raises(SystemExit) as done:
        main(["profile=zoo", f"results_dir={ROOT}/results/zoo"])
    said = capsys.readouterr().out
    assert done.value.code == 0
    assert f"0 of 348 evaluations are missing\nVerdict: {last}\n" in said
    for page in ("README.md", "docs/serving.md"):
        assert str(last) in words(page), f"{page}: say {last}"


def test_the_numbers_beside_the_verdict(trial: list[Outcome]) -> None:
    own = [one for one in trial if one.budget_of == "pairs"]
    models = by_model(own, lambda one: one.gain)
    gains = [f"{models[f'zoo_{m}']:+.3f}" for m in ("olmoe", "qwen2_moe", "deepseek_v2", "mixtral")]
    each = "{}, {}, {} and {}".format(*gains).replace("-", "−")
    last = primary(verdicts(trial))
    assert last is not None and last.straggler_most is not None
    cells: dict[tuple[str, str], list[float]] = {}
    for one in own:
        cells.setdefault((one.model, one.task), []).append(one.gain or 0.0)
    alone = mean_interval([float(np.mean(values)) for values in cells.values()])
    (scores,) = (v for v in verdicts(trial) if (v.budget_of, v.budget) == ("scores", None))
    assert alone is not None and scores.straggler is not None
    apart = [100 * (one.apart or 0.0) for one in own]
    beyond = [100 * abs(one.drop_rate - one.budget) for one in own]
    text = words("docs/serving.md")
    for claim in (
        f"By model it is {each}:",
        f"the first would be {signed(alone).partition(' ')[2]}:",
        f"lie {np.median(apart):.1f} points of drops apart (median; {max(apart):.1f} at most)",
        f"At worst the change is {last.straggler_most:+.3f}.".replace("-", "−"),
        f"at equal drops by {signed(scores.straggler)}:",
        f"budget of pairs by {np.mean(beyond):.1f} points in the mean, and by {max(beyond):.1f} at",
    ):
        assert claim in text, claim
    most = gains[2].replace("-", "−")
    assert f"DeepSeek-V2 gains most: {most}." in words("README.md")
    assert min(models, key=models.__getitem__) == "zoo_deepseek_v2"
    at_budget = {
        budget: by_model([one for one in own if one.budget == budget], lambda one: one.gain)
        for budget in {one.budget for one in own}
    }
    largest = sorted(at_budget, key=lambda budget: at_budget[budget]["zoo_deepseek_v2"])[:2]
    assert sorted(largest) == [0.02, 0.05]
