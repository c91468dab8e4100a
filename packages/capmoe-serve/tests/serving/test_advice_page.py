"""The command of an advice: what it prints, writes and shows; and every command of its page."""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import re
import shlex
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from textwrap import fill

import numpy as np
import pytest
import yaml
from capmoe_eval.__main__ import main
from matplotlib.axes import Axes
from tests.records import planned

from capmoe_serve.advice import Advice, Budget, Recommendation
from capmoe_serve.advising import ServingDeployment, advise_on_trace
from capmoe_serve.exports import SERVER_FILES, SGLANG, TENSORRT_LLM, VLLM
from capmoe_serve.page import content, front_names, text, to_html
from capmoe_serve.picture import draw_front
from capmoe_serve.settings import cost, with_front
from capmoe_serve.trace import Trace
from capmoe_serve.trace_file import load_trace, save_trace
from serving.test_front import skewed
from serving.test_readers import completion, generated, lines

ROOT = Path(__file__).parents[4]
PAGES = [
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in (
        "how-to/record_traffic.md",
        "how-to/choose_a_setting.md",
        "explanation/adaptive_gamma.md",
    )
]
COMMANDS = sorted(set(re.findall(r"^    (capmoe-eval .*)$", "\n".join(PAGES), re.MULTILINE)))
HEADING = "## Counts or ids in arrays of your own"
OWN_ARRAYS = PAGES[0].partition(HEADING)[2].split("```")[1][7:]
"""The example that makes traces of arrays."""


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
    torch.save(recorded, tmp_path / "expert_distribution_recorder_1.pt")
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


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    _, subcommand, *words = shlex.split(command)
    if subcommand in (
        "run",
        "sweep",
    ):  # it would take minutes: its cells are planned
        keys = [word.split("=", 1) for word in words]
        sweep = [[f"{key}={value}" for value in values.split(",")] for key, values in keys]
        return 0 if all(planned(*each) for each in itertools.product(*sweep)) else 1
    with pytest.raises(SystemExit) as done:
        main([subcommand, *words])
    return int(done.value.code or 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_pages_runs(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = command.replace("/tmp/expert", "expert").replace("*", "1")
    assert run(command, monkeypatch) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    if "advise" in command:
        advice = Advice.model_validate_json((place / "advice" / "advice.json").read_text())
        assert advice.recommendation.sentence in printed
        assert all((place / "advice" / name).is_file() for name in advice.files)


def test_arrays_of_a_users_own_become_traces(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = load_trace(place / "counts.npz")
    np.testing.assert_array_equal(counts.loads(), np.load("counts.npy"))
    ids = load_trace(place / "ids.npz")
    assert ids.expert_TLK is not None
    assert (ids.n_experts, ids.top_k) == (128, 8)
    np.testing.assert_array_equal(ids.expert_TLK[:, 1], np.load("layer1.npy"))
    assert HEADING in PAGES[0]
    with pytest.raises(SystemExit):
        main(["loads", "counts.npy"])
    assert "for counts or ids in arrays of your own see" in capsys.readouterr().err


def test_there_are_commands_of_each_kind() -> None:
    assert {shlex.split(command)[1] for command in COMMANDS} == {"run", "sweep", "loads", "advise"}
    assert len(COMMANDS) >= 7


class Tags(HTMLParser):
    """Collects what a page would load from elsewhere, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_besides(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "capmoe-eval advise example --ranks=8 --at-least-speedup=1.5 --gammas 0.5 1"
    assert run(command, monkeypatch) == 0
    out = place / "advice"
    assert {path.name for path in out.iterdir()} >= {SGLANG, TENSORRT_LLM, VLLM}
    advice = Advice.model_validate_json((out / "advice.json").read_text())
    page = (out / "advice.html").read_text()
    assert page == to_html(advice)
    alone = Tags(page)
    assert [link.partition(",")[0] for link in alone.loaded] == ["data:image/svg+xml;base64"]
    for said in (advice.recommendation.sentence, *advice.unknown, "score γ=0.5 per device"):
        assert said in alone.text
    balanced = yaml.safe_load((out / TENSORRT_LLM).read_text())["num_slots"]
    assert json.loads((out / VLLM).read_text()) == {"num_redundant_experts": balanced - 64}
    # What an earlier advice wrote and this one does not is gone.
    again = command.replace("--at-least-speedup=1.5", "--at-least-speedup=1.0")
    assert run(again, monkeypatch) == 0
    assert not any((out / name).exists() for name in SERVER_FILES)
    capsys.readouterr()


def test_the_front_names_who_is_kept_once_and_the_page_has_what_it_leaves_out() -> None:
    asked = Budget(at_least_speedup=1.2)
    one_step = dataclasses.replace(skewed(), load_SLE=skewed().load_SLE[:1])  # type: ignore[index]
    lines = text(
        advise_on_trace(one_step, (0.5, 1.0), ServingDeployment(4), asked).advice
    ).splitlines()
    ties = [line.split("  ")[0] for line in lines if "γ=0.5 per device" in line]
    assert ties == ["score, order, random γ=0.5 per device"]
    deployment = ServingDeployment(4, expert_bytes=3_000_000)
    advice = advise_on_trace(skewed(), (0.5, 1.0), deployment, asked).advice
    assert advice.activation
    assert advice.activation in text(advice).splitlines()
    shown = content(advice)
    headings = [name for name, _ in shown["headings"]]  # type: ignore[attr-defined]
    place = headings.index("weights sent once in a layer, MB") - 1
    cells = {one.title: own for _, one, own in shown["rows"]}  # type: ignore[attr-defined]
    placed = next(one for one in advice.settings if one.placement == "EPLB+4")
    assert cells[placed.title][place] == (f"{placed.set_up * 3:.3g}", placed.set_up)
    assert placed.set_up > 0
    assert placed.title in to_html(advice)
    layered = next(one for one in advice.settings if one.layer_gammas is not None)
    assert f"γ {', '.join(map(str, layered.layer_gammas or ()))}" in to_html(advice)


def drawn(advice: Advice) -> Axes:
    """The axes of the picture on the page, whose legend is the figure's."""
    (axes,) = draw_front(advice, front_names(advice)).axes
    return axes


def legend(axes: Axes) -> list[str]:
    return [text.get_text().replace("\n", " ") for text in axes.figure.legends[0].get_texts()]


def advised(budget: Budget) -> Advice:
    return advise_on_trace(skewed(), (0.5, 1.0), ServingDeployment(4), budget).advice


def test_the_picture_names_the_front_and_marks_the_recommended_setting() -> None:
    advice = advised(Budget(at_least_speedup=1.2))
    names = front_names(advice)
    assert len(names) >= 2
    axes = drawn(advice)
    recommended = advice.settings[advice.recommendation.setting or 0]
    assert set(legend(axes)) >= {*names, f"recommended: {recommended.title}"}
    (star,) = (line for line in axes.get_lines() if line.get_marker() == "*")
    lost = 100 * (cost(recommended, advice.axis) or 0.0)
    assert star.get_xydata().tolist() == [[recommended.reached, pytest.approx(lost)]]
    # Every number of the legend is beside the point of its name.
    marks = {line.get_label(): line.get_marker() for line in axes.get_lines()}
    points = [(s.reached, 100 * (cost(s, advice.axis) or 0.0)) for s in names.values()]
    numbers = [str(number) for number in range(1, len(names) + 1)]
    assert [marks[fill(name, 50)] for name in names] == [f"${number}$" for number in numbers]
    written = {
        place: text.get_text() for text in axes.texts for place in text.get_text().split(", ")
    }
    assert sorted(written, key=int) == numbers
    for first, label in written.items():
        if label.startswith(first):
            (words,) = (words for words in axes.texts if words.get_text() == label)
            assert words.xy == pytest.approx(points[int(first) - 1])
    assert axes.get_xlabel() == "speedup of the expert step, at most (×)"
    assert axes.get_ylabel() == "the dropped share of the pairs, %"


def test_the_page_shows_the_picture_and_says_it_in_words() -> None:
    advice = advised(Budget(at_least_speedup=1.2))
    page = to_html(advice)
    assert page == to_html(advice)
    svg = b64decode(page.partition("data:image/svg+xml;base64,")[2].partition('"')[0]).decode()
    texts = [html.unescape(text) for text in re.findall("<!-- (.*?) -->", svg)]
    words = page.partition(' alt="')[2].partition('"')[0]
    recommended = advice.settings[advice.recommendation.setting or 0].title
    assert f"recommended: {recommended}" in texts
    assert f"Recommended: {recommended}, " in words
    for number, name in enumerate(front_names(advice), start=1):
        assert name in texts
        assert f"{number}: {name}, " in words


def test_without_a_recommendation_nothing_is_marked() -> None:
    axes = drawn(advised(Budget(at_least_speedup=1e6)))
    assert not any(text.startswith("recommended") for text in legend(axes))
    assert "*" not in {line.get_marker() for line in axes.get_lines()}


def test_a_recommended_setting_of_unknown_cost_is_a_line_at_its_speedup() -> None:
    advice = advised(Budget(at_least_speedup=1.2))
    place = next(n for n, s in enumerate(advice.settings) if not s.is_lossless and s.speedup)
    recommendation = Recommendation(kind="capacity", setting=place, sentence="This.")
    settings = with_front(advice.settings, "points")
    update = {"axis": "points", "settings": settings, "recommendation": recommendation}
    axes = drawn(advice.model_copy(update=update))
    chosen = advice.settings[place]
    (upright,) = (line for line in axes.get_lines() if line.get_linestyle() == ":")
    assert (upright.get_xdata()[0], f"recommended: {chosen.title}") == (
        chosen.reached,
        str(upright.get_label()).replace("\n", " "),
    )


def test_near_points_of_the_front_share_a_label() -> None:
    advice = advised(Budget(at_least_speedup=1.2))
    first, second = list(front_names(advice).values())[:2]
    twin = first.model_copy(update={"speedup": first.reached + 1e-6})
    front = {"first": first, "twin": twin, "second": second}
    settings = (*advice.settings, twin)
    (axes,) = draw_front(advice.model_copy(update={"settings": settings}), front).axes
    labels = [text.get_text() for text in axes.texts]
    assert labels == ["1, 2", "3"]
