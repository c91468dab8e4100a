"""The command, on records that nothing had to be evaluated for."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from capmoe_eval.experiment.cell import Cell
from capmoe_eval.paper.layout import TABLES, find_layout
from capmoe_eval.report.tables import command as tables
from capmoe_eval.report.tables import filled
from capmoe_eval.report.tables.table import commands
from capmoe_eval.routing.registry import create_method
from tests.records import of_images, planned, record, record_of, write_all
from tests.report.tables import measured
from tests.satellites import NEEDS_METHODS

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """Runs the command in an empty directory: status, output, errors."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as done:
            tables.main(words)
        out, err = capsys.readouterr()
        return int(done.value.code or 0), out, err

    return run


def graded(cell: Cell) -> list[int]:
    """30 of 40 right; everything wrong under a capacity of 1, a little under another."""
    wrong = {None: 10, 1.0: 40}.get(cell.method.uniform_gamma, 12)
    return [1] * (40 - wrong) + [0] * wrong


def keep(monkeypatch: pytest.MonkeyPatch, *keys: str) -> None:
    """Make "all" mean a few tables, to save time."""
    few = tuple(table for table in TABLES if table.key in keys)
    monkeypatch.setattr(tables, "TABLES", few)


@pytest.mark.parametrize(
    ("name", "profile", "words"),
    [
        ("table1_v1", "paper", ["grid.seed=[0]"]),
        ("table2_v1", "paper", ["grid.model=[olmoe_instruct]"]),
        ("table3", "paper", []),
        ("table6", "tiny", []),
        ("table11", "paper", []),
        ("table4", "zoo", []),
    ],
)
def test_every_record_of_an_experiment_has_its_place(
    command: Command, name: str, profile: str, words: list[str]
) -> None:
    words = [f"profile={profile}", *words]
    found = planned(f"experiment={name}", *words)
    write_all(found, graded)
    table = tables.measured_table(name, words)
    assert table.attrs["folder"] == profile
    assert not commands(table)
    metrics = len({column.metric for column in find_layout(name).tasks})  # of one record
    lines = table["line"].nunique()
    averages = lines if metrics == 1 else (metrics - 1) * lines
    places = sum(max(1, len(seeds.split(","))) for seeds in table["seeds"]) - averages
    baseline_alone = len([p for p in found if p.cell.method.name == "baseline"])
    # Table 11 has no row for the baseline that its entries are tested against.
    assert places == len(found) - (baseline_alone if name == "table11" else 0)
    assert (table["untested"] == "").all()
    assert table["p"].notna().equals(table["method"] != "baseline")
    assert set(table["published"].notna()) == {profile == "paper"}


def test_marks_say_what_a_capacity_did(command: Command) -> None:
    words = ("grid.gamma=[2.0,1.0]", "grid.seed=[0]")
    write_all(planned("experiment=table1", *words), graded)
    _, out, _ = command("table1", *words)
    scores = [line.split(" | ")[2] for line in out.splitlines() if line.startswith("| Score ")]
    # γ = 2: 2 of 40 lost; γ = 1: 30 of 40 lost.
    assert [score.split(" ±")[0].replace("**", "") for score in scores] == ["70.0", "0.0▼"]
    assert "Holm-corrected for the 72 tests" in out
    table = pd.read_csv("reports/zoo/table1.csv")
    last = table[(table["Method"] == "Score") & (table["gamma"] == 1)].iloc[0]
    assert (last.column, last.effect) == ("OBQA", -75.0)
    assert last.p == pytest.approx(2 / 2**30)
    assert last.corrected > last.p


@NEEDS_METHODS
def test_the_rows_are_those_of_the_methods_that_the_grid_names(command: Command) -> None:
    """Also of one that the paper's table lacks, as is a user's own."""
    finished = "baseline,score,oea"
    words = ("profile=tiny", "grid.model=[tiny_olmoe]", f"grid.method=[{finished},xshare]")
    write_all(planned("experiment=table2", *words[:2], f"grid.method=[{finished}]"), graded)
    _, out, _ = command("table2", *words, "expert_budget=0.5")
    column = pd.read_csv("reports/tiny/table2.csv").query("column == 'OBQA'")
    assert column["Method"].tolist() == ["Baseline", "Token Drop", "OEA †", "XShare †"]
    assert column["value"].notna().tolist() == [True, True, True, False]
    assert "method=xshare" in out
    assert "expert_budget=0.5" in out
    assert "†: added by the command line" in out
    _, out, _ = command("table2", "profile=tiny", "grid.model=[tiny_olmoe]")
    assert "†" not in out
    assert "Expanded Drop" in out


@pytest.mark.parametrize(
    ("name", "others", "printed"),
    [
        ("table1", ["Order †", "Reverse Order †", "Random †", "Score †"], 12),
        (
            "table2",
            [f"{m} γ={g:g} †" for m in ("Token Drop", "Expanded Drop") for g in (0.5, 1.5, 2)],
            3,
        ),
    ],
)
def test_a_grid_of_ones_own_has_rows_and_columns_of_what_it_names(
    command: Command, name: str, others: list[str], printed: int
) -> None:
    """A γ and a task that the paper's table lacks are there, and no empty column is."""
    words = ("model=custom", "model.name=mine", "model.pretrained=nowhere", "grid.seed=[0]")
    words += ("tasks=[obqa,piqa,gsm8k]", "grid.gamma=[0.5,1.0,1.5,2.0]")
    plans = planned(f"experiment={name}", *words)
    write_all(plans, graded)
    assert command(name, *words)[0] == 0
    table = pd.read_csv(f"reports/custom/{name}.csv")
    assert set(table["column"].str.lower()) == {"obqa", "piqa", "gsm8k", "avg."}
    assert set(table["status"]) == {"measured"}
    methods = table.drop_duplicates("line")["Method"]
    assert len(methods) == 1 + printed + len(others)
    assert methods[methods.str.contains("†")].tolist() == others


def test_a_directory_of_any_records_is_a_table(command: Command) -> None:
    """Seeds are averaged; a knob that differs within a method is said, and intervals are shown."""
    base, score, device = (
        create_method("baseline"),
        create_method("score", 0.5, ep_size=2),
        create_method("score", 0.5, ep_size=2, granularity="device"),
    )
    seeds = [create_method("random", 1.0, ep_size=2, seed=seed) for seed in (0, 1)]
    right = {base: [1] * 40, score: [1, 0] * 20, device: [0, 0, 0, 1] * 10}
    right |= {seeds[0]: [1, 0] * 20, seeds[1]: [1] * 40}
    for method, correct in right.items():
        for task in ("obqa", "sst2")[: 1 if method == device else 2]:
            record_of(
                method, list(map(float, correct)), task=task, root=Path("sweeps/mine")
            ).write()
    status, out, _ = command("sweeps/mine")
    assert status == 0
    assert "granularity=device" in out
    assert "Missing cells" not in out
    table = pd.read_csv("reports/mine/sweep.csv", keep_default_na=False, na_values=[""])
    obqa, sst2 = (table[table["column"] == task].reset_index() for task in ("obqa", "sst2"))
    assert obqa["value"].tolist() == [100.0, 75.0, 25.0, 50.0]
    assert sst2["value"].fillna(-1).tolist() == [100.0, 75.0, -1, 50.0]
    knob = "granularity="
    assert obqa["Settings"].fillna("").tolist() == ["", "", f"{knob}device", f"{knob}expert"]
    assert obqa["gamma"].tolist() == [math.inf, 1, 0.5, 0.5]
    assert ((obqa["low"] > 0) & (obqa["low"] < obqa["high"]) & (obqa["high"] <= 100)).all()
    assert obqa["low"][0] == pytest.approx(91.24, abs=0.01)  # Wilson's of 40 of 40
    assert not table["best"].any(), "a metric may be the better the lower it is"
    Path("empty").mkdir()
    assert command("empty")[2].startswith("error: empty: has no whole record")
    assert "leave out limit=4" in command("sweeps/mine", "limit=4")[2]


@NEEDS_METHODS
def test_a_table_of_one_method_takes_no_other(command: Command) -> None:
    status, _, error = command("table11", "profile=tiny", "parts.baseline.method=[xshare]")
    assert status == 2
    assert error.startswith("error: table11: its rows are of one method")
    assert error.count("\n") == 1


def test_the_command_of_an_entry_computes_the_entry(command: Command) -> None:
    _, out, _ = command("table2", "profile=tiny", "plan=true", "limit=4")
    assert "capmoe-eval run limit=4 model=" in out
    assert "plan=" not in out


def test_the_tokens_of_a_query_are_those_of_table_4s_baseline(command: Command) -> None:
    status, out, _ = command("table8")
    assert status == 0
    assert "capmoe-eval run experiment=table4" in out
    write_all(planned("experiment=table4"), graded)
    table = tables.measured_table("table8")
    # 10 tokens of each modality in 40 queries.
    assert measured(table)["value"].tolist() == [0.25, 50.0, 0.25, 50.0, 0.5, 100.0]
    assert [text for text in table["text"] if text] == ["576", "31", "607"]
    assert table.attrs["notes"] == ["zoo_llava_olmoe: the mean over 40 queries of mme."]


def test_a_column_of_a_metric_tests_its_own_documents(command: Command) -> None:
    """Every second document is of perception; only these go wrong, both of an image at once."""
    write_all(planned("experiment=table4"), lambda _: [1] * 40)
    (plan,) = [
        plan
        for plan in planned("experiment=table4")
        if plan.cell.method.name == "score" and plan.cell.method.modality == "text_first"
    ]
    of_images(record(plan.cell, plan.root, [0, 1] * 20)).write()
    table = tables.measured_table("table4")
    drop = table[table["Method"] == "Token Drop"].set_index(["Strategy", "column"])
    rows = drop.loc["Text First"]
    assert rows[["effect", "p"]].values.tolist() == [[-100.0, 2 / 2**20], [0.0, 1.0]]
    assert (drop.loc["Uniform"]["effect"] == 0).all()


def test_all_tables_are_rendered_by_one_command(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(monkeypatch, "table3", "table5", "table6", "table2_v1")
    write_all(planned("experiment=table3"), graded)
    status, out, _ = command("all")
    assert command("all", "--out", "two")[0] == status == 0
    for path in Path("reports/zoo").iterdir():
        assert path.read_bytes() == (Path("two/zoo") / path.name).read_bytes()
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    rendered = ["table3", "table5", "table6", "table2_v1"]
    assert list(lines) == rendered
    assert lines["table3"] == "30 of 30 entries: reports/zoo/table3.md"
    assert lines["table5"] == "settings: reports/zoo/table5.md"
    assert lines["table6"] == "0 of 18 entries: reports/zoo/table6.md"
    written = sorted(path.name for path in Path("reports/zoo").iterdir())
    assert written == sorted(f"{t}.{s}" for t in rendered for s in ("md", "tex", "csv", "html"))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda path: path.write_text(path.read_text()[:99]), "not a whole record"),
        (lambda path: path.unlink(), ""),
    ],
)
def test_what_is_wrong_with_a_record_is_said_and_breaks_nothing(
    command: Command, damage: Callable[[Path], object], told: str
) -> None:
    paths = write_all(planned("experiment=table3"), graded)
    damage(paths[-1])
    table = tables.measured_table("table3")
    # The hole, and the average over it.
    assert len(measured(table)) == 28
    summary = tables._summary(table)
    assert summary == f"table3: 28 of 30 entries{', 1 record left out' if told else ''}"
    assert told in "".join(table.attrs["notes"])
    assert command("table3")[0] == 0


def test_a_table_that_cannot_be_rendered_takes_no_other_with_it(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(monkeypatch, "table2", "table5", "table6")
    status, out, err = command("all", "grid.model=[zoo_olmoe,zoo_mixtral]")
    assert status == 2
    assert "table6 is a table of one model, got 2" in err
    assert "table2: 0 of 80 entries" in out
    assert "table5: settings" in out
    assert not Path("reports/zoo/table6.md").exists()


def test_a_profile_without_a_model_for_a_table_has_the_others(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(monkeypatch, "table4", "table5")
    status, out, _ = command("all", "profile=paper", "profile.images=[]")
    assert status == 0
    assert "table4: profile=paper: has no model" in out
    assert "table5: settings" in out


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("all", "--published", "v1"), ["table1_published_v1", "table2_published_v1"]),
        (
            ("all", "--published", "v2"),
            [f"table{number}_published_v2" for number in range(1, 12)],
        ),
        (("table1", "--published", "all"), ["table1_published_v2", "table1_published_v1"]),
    ],
)
def test_all_published_tables_are_rendered_by_one_command(
    command: Command, words: tuple[str, ...], names: list[str]
) -> None:
    status, out, _ = command(*words)
    assert status == 0
    written = {path.stem for path in Path("reports/published").iterdir()}
    assert written == set(names)
    assert all(name in out for name in names)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("tabel3",), "did you mean 'table3'"),
        (("table3_v1",), "choose one of"),
        (("table4", "profile.images=[]"), "profile=zoo: has no model for this experiment; choose"),
        (("table3", "--published", "v1"), "version=v1: choose one of v2"),
        (("tabel3", "--published", "all"), "did you mean 'table3'"),
        (("all", "--published", "v3"), "--published=v3: choose one of v1, v2, all"),
        (("table5", "profile=tinny"), "did you mean 'tiny'"),
        (("table5", "gama=1"), "did you mean 'gamma'"),
    ],
)
def test_what_cannot_be_is_one_line_each(
    command: Command, words: tuple[str, ...], line: str
) -> None:
    status, _, err = command(*words)
    assert status == 2
    assert line in err
    assert err.count("\n") == 1


def test_a_table_of_other_factors_needs_none_of_the_models_own(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = OmegaConf.create({"name": "zoo_olmoe", "title": "Mine", "gamma": None, "ep_size": 8})
    monkeypatch.setattr(filled, "load_option", lambda group, name: model)
    table = tables.measured_table("table1")
    assert table.attrs["title"].endswith("on Mine")
    assert (table["status"] == "missing").sum() == 13 * 9


@pytest.mark.parametrize(
    ("name", "words", "row", "method"),
    [
        ("table2_v1", ("rounds=1",), "Token Reroute", "score"),
        ("table2", ("granularity=device", "ep_size=1"), "Token Drop", "baseline"),
        ("table1", ("grid.gamma=[2.0,1.5,1.0]", "granularity=device", "ep_size=1"), "Score", None),
    ],
)
def test_a_row_shows_the_record_of_the_same_computation(
    command: Command, name: str, words: tuple[str, ...], row: str, method: str | None
) -> None:
    """One round is Token Drop; one device of all experts drops nothing from γ=1 on."""
    words = ("profile=zoo", "grid.model=[zoo_olmoe]", *words)
    plans = planned(f"experiment={name}", *words)
    write_all(plans, lambda cell: [1, 0, 1, 1] if cell.method.name == "baseline" else [1, 0, 0, 0])
    assert command(name, *words)[0] == 0
    table = tables.measured_table(name, words)
    assert not commands(table)
    rows = table[table["Method"] == row]
    assert set(rows["value"]) == {25.0 if method == "score" else 75.0}
    assert rows["p"].isna().any() == (method != "score")
