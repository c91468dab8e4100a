"""The command, on records that nothing had to be evaluated for."""

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.names import BITS_PER_BYTE
from capmoe_eval.paper.layout import TABLES
from capmoe_eval.report.tables import command as tables
from capmoe_eval.report.tables import sweep
from capmoe_eval.results.frames import read
from capmoe_eval.routing.registry import create_method
from tests.conftest import Shell
from tests.project import ROOT
from tests.records import cell, planned, record, record_of, write_all
from tests.report.tables import measured
from tests.satellites import NEEDS_METHODS


def graded(cell: Cell) -> list[int]:
    """30 of 40 right; everything wrong under a capacity of 1, a little under another."""
    wrong = {None: 10, 1.0: 40}.get(cell.method.uniform_gamma, 12)
    return [1] * (40 - wrong) + [0] * wrong


@NEEDS_METHODS
def test_the_rows_are_those_of_the_methods_that_the_grid_names(shell: Shell) -> None:
    """Also of one that the paper's table lacks, as is a user's own."""
    finished = "baseline,score,oea"
    words = ("profile=tiny", "grid.model=[tiny_olmoe]", f"grid.method=[{finished},xshare]")
    write_all(planned("experiment=table2", *words[:2], f"grid.method=[{finished}]"), graded)
    _, out, _ = shell("table", "table2", *words, "expert_budget=0.5")
    column = pd.read_csv("reports/tiny/table2.csv").query("column == 'OBQA'")
    assert column["Method"].tolist() == ["Baseline", "Token Drop", "OEA †", "XShare †"]
    assert column["value"].notna().tolist() == [True, True, True, False]
    assert "method=xshare" in out
    assert "expert_budget=0.5" in out
    assert "†: added by the command line" in out
    _, out, _ = shell("table", "table2", "profile=tiny", "grid.model=[tiny_olmoe]")
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
    shell: Shell, name: str, others: list[str], printed: int
) -> None:
    """A γ and a task that the paper's table lacks are there, and no empty column is."""
    words = ("model=custom", "model.name=mine", "model.pretrained=nowhere", "grid.seed=[0]")
    words += ("tasks=[obqa,piqa,gsm8k]", "grid.gamma=[0.5,1.0,1.5,2.0]")
    plans = planned(f"experiment={name}", *words)
    write_all(plans, graded)
    assert shell("table", name, *words)[0] == 0
    table = pd.read_csv(f"reports/custom/mine/{name}.csv")
    assert set(table["column"].str.lower()) == {"obqa", "piqa", "gsm8k", "avg."}
    assert set(table["status"]) == {"measured"}
    methods = table.drop_duplicates("line")["Method"]
    assert len(methods) == 1 + printed + len(others)
    assert methods[methods.str.contains("†")].tolist() == others


@pytest.mark.parametrize("name", ["hub", "mine"])
def test_a_model_of_ones_own_is_described_by_its_records(shell: Shell, name: str) -> None:
    """Its weights, settings and documents are; every command says all of them."""
    Path(name).mkdir()
    model = ["model=custom", "model.name=mine", "results_dir=elsewhere"]
    grid = ["tasks=[obqa,piqa]", "grid.gamma=[0.5,1.0]", "grid.method=[baseline,score]"]
    words = ["model.pretrained=nowhere", "limit=40", f"data.root={name}"]
    write_all(planned("experiment=table1", *model, *words, *grid)[1:], graded)
    status, out, _ = shell("table", "table1", *model, *grid)
    assert status == 0
    column = pd.read_csv("reports/custom/mine/table1.csv").query("column == 'PIQA'")
    assert set(column["status"]) == {"measured"}
    source = "local-hub" if name == "hub" else name
    assert f"Documents are those of {source}, a directory" in out
    settings = f"model.pretrained=nowhere limit=40 data.root=DIRECTORY data.name={source}"
    (missing,) = tables.measured_table("table1", [*model, *grid]).attrs["commands"]
    assert f"{settings} method=baseline tasks=obqa" in missing
    (queries,) = tables.measured_table("table8", model).attrs["commands"]
    assert queries == f"capmoe-eval run experiment=table4 {' '.join(model)} {settings}"


def test_a_table_says_where_the_numbers_of_2k_and_3k_are_of_another_k(shell: Shell) -> None:
    """They are a profile's; a record knows the k of its model, here 2."""
    words = ["model=custom", "model.name=mine", "model.pretrained=nowhere", "tasks=obqa"]
    for m, is_wrong in (("[16,24]", True), ("[4,6]", False)):
        write_all(planned("experiment=table11", *words, f"profile.m={m}"), graded)
        _, out, _ = shell("table", "table11", *words, f"profile.m={m}")
        assert ("But mine has k = 2; set profile.m=" in out) == is_wrong
    assert "On mine, 2k = 4, 3k = 6." in out


def test_records_of_a_model_of_the_suite_tell_their_documents_alone(shell: Shell) -> None:
    """Of one's own model they tell the settings, too, which conf/model/ has for the others."""
    Path("hub").mkdir()
    words = ["model=tiny_olmoe", "results_dir=elsewhere", "tasks=obqa", "grid.method=[baseline]"]
    write_all(planned("experiment=table1", *words, "data.root=hub"), graded)
    _, out, _ = shell("table", "table1", *words)
    assert "Documents are those of local-hub, a directory" in out
    write_all(planned("experiment=table1", *words, "data.root=hub", "limit=4"), graded)
    assert shell("table", "table1", *words)[1] == out


@pytest.mark.parametrize(
    ("weights", "is_copy"), [("copy", True), ("allenai/OLMoE-1B-7B-0924", False)]
)
def test_a_copy_of_the_papers_weights_is_named(shell: Shell, weights: str, is_copy: bool) -> None:
    """Its name is a claim of the user, which no record can prove."""
    Path("copy").mkdir()
    words = ["model=olmoe", f"model.pretrained={weights}", "tasks=obqa", "grid.method=[baseline]"]
    write_all(planned("experiment=table1", *words), graded)
    _, out, _ = shell("table", "table1", *words)
    assert "published:" in out
    assert ("OLMoE is a checkpoint in a directory" in out) == is_copy


def test_missing_cells_of_a_users_task_are_computed_from_its_file(shell: Shell) -> None:
    """The name alone is no task of the suite."""
    Path("mine.yaml").write_text(
        "{task: my_task, dataset_path: json, output_type: multiple_choice}"
    )
    words = ["profile=tiny", "grid.model=[tiny_olmoe]", "tasks=[obqa,mine.yaml]"]
    _, out, _ = shell("table", "table2", *words)
    assert "'tasks=[obqa,mine.yaml]'" in out


def test_what_tasks_share_divides_the_rows_of_a_directory(shell: Shell) -> None:
    """Numbers of two settings stood in one row, and in its mean, if they shared no task."""
    words = ["model=custom", "model.name=mine", "model.pretrained=nowhere", "results_dir=sweeps"]
    words += ["method=score", "gamma=1.0"]
    for task, setting in (("obqa", "ep_size=8"), ("piqa", "ep_size=2"), ("rte", "limit=8")):
        write_all(planned(*words, f"tasks={task}", setting), graded)
    assert shell("table", "sweeps")[0] == 0
    table = pd.read_csv("reports/sweeps/sweep.csv").dropna(subset="value")
    settings = table.groupby("column")["Settings"].first()
    assert settings[["obqa", "piqa", "rte"]].tolist() == ["ep_size=8", "ep_size=2", "ep_size=1"]


def test_a_limit_on_one_task_leaves_its_other_results_in_one_row(shell: Shell) -> None:
    words = ["model=custom", "model.name=mine", "model.pretrained=nowhere", "results_dir=sweeps"]
    for more in ("tasks=[obqa,piqa]", "tasks=obqa limit=8"):
        write_all(planned(*words, "method=baseline", *more.split()), graded)
    shell("table", "sweeps")
    table = pd.read_csv("reports/sweeps/sweep.csv").dropna(subset="value")
    of_rows = table.groupby("line")[["column", "Settings"]].agg(list)
    assert ["Dropped", "Straggler", "obqa", "piqa"] in of_rows["column"].map(sorted).tolist()


@pytest.mark.parametrize(
    ("before", "now", "rows", "note"),
    [
        ("eval_seed=1", "eval_seed=2", ["eval_seed=1", "eval_seed=2"], ""),
        ("limit=8", "limit=null", ["limit=8", ""], ""),
        ("tasks.obqa.metric=acc", "tasks.obqa.metric=acc_norm", ["task.metric=acc"] * 2, ""),
        ("system_instruction=null", "system_instruction=Hi", ["", "system_instruction=Hi"], ""),
        ("batch_size=4", "batch_size=8", ["batch_size=4", "batch_size=8"], ""),
        ("model.dtype=float32", "model.dtype=bfloat16", ["model.dtype=float32"] * 2, ""),
        ("model.revision=old", "model.revision=new", ["model.revision=old"] * 2, ""),
        ("", "", ["documents="] * 2, "Other documents, so that results do not compare: obqa."),
    ],
)
def test_what_differs_between_methods_is_in_their_rows(
    shell: Shell, before: str, now: str, rows: list[str], note: str
) -> None:
    """Old numbers of the baseline stood beside new ones of Token Drop without a word."""
    words = ["model=custom", "model.name=mine", "model.pretrained=nowhere", "tasks=obqa"]
    for method, setting in (("baseline", before), ("score", now)):
        (plan,) = planned(*words, f"method={method}", "gamma=1.0", *filter(None, [setting]))
        documents = method if not setting else "hash"
        record(plan.cell, Path("sweeps"), [1, 0, 1, 1], documents=documents).write()
    out = shell("table", "sweeps")[1]
    assert note in out
    table = pd.read_csv("reports/sweeps/sweep.csv", keep_default_na=False)
    settings = table.query("column == 'obqa'")["Settings"].tolist()
    assert settings[0] != settings[1]
    names = [row.partition("=")[0] for row in rows]
    assert [text.partition("=")[0] for text in settings] == names
    assert settings[0].startswith(rows[0])


def test_directories_and_models_of_one_last_name_have_reports_of_their_own(shell: Shell) -> None:
    """They overwrote each other's tables and pictures."""
    roots = ["r2", "z/r2", "results/r2", "results/z/r3", "../r2", "."]
    folders = [r"reports/r2-\w{6}/", "reports/z/r2/", "reports/r2/", "reports/z/r3/"]
    folders += [r"reports/r2-\w{6}/", r"reports/.*-\w{6}/"]
    for root in roots:
        record_of(create_method("baseline"), root=Path(root)).write()
    paths = []
    for root, folder in zip(roots, folders, strict=True):
        for command, more in (("table", []), ("figure", ["--formats="])):
            out = shell(command, f"{Path(root).resolve()}", *more)[1]
            paths.append(out.rpartition("written: ")[2].partition(",")[0])
            assert re.match(folder, paths[-1]), paths
    assert len({*paths}) == len(paths)
    for name in ("mine", "yours"):
        words = ["model=custom", f"model.name={name}", "model.pretrained=nowhere"]
        write_all(planned(*words, "method=baseline", "tasks=obqa"), graded)
        assert f"written: reports/custom/{name}/table1.md" in shell("table", "table1", *words)[1]


def test_the_usual_settings_of_other_models_and_methods_are_a_note(shell: Shell) -> None:
    """What differs between models and methods alone was nowhere."""
    words = ["model=custom", "model.pretrained=nowhere", "tasks=obqa", "results_dir=sweeps"]
    for model, size, ranks in (("one", 16, 2), ("two", 16, 2), ("three", 64, 6)):
        for method in ("baseline", "score", "order"):
            more = [f"model.name={model}", f"method={method}", f"batch_size={size}"]
            write_all(planned(*words, *more, "gamma=1.0", f"ep_size={ranks}"), graded)
    note = "Unless a row says otherwise: ep_size=2, batch_size=16."
    text = shell("table", "sweeps")[1].replace("\\", "")
    assert note in text
    assert text.count("| ep_size=6 batch_size=64 |") == 2, "an empty text would stand for none"
    table = pd.read_csv("reports/sweeps/sweep.csv").query("column == 'obqa'")
    of_models = table.groupby("model")["Settings"].agg(list)
    assert of_models["three"] == ["batch_size=64", *["ep_size=6 batch_size=64"] * 2]
    assert table.query("model != 'three'")["Settings"].isna().all()
    assert shell("figure", "sweeps", "--formats=")[0] == 0
    about = json.loads(Path("reports/sweeps/figures/sweep.json").read_text())
    assert "Unless a row says otherwise: ep_size=2, batch_size=16." in about["notes"]
    lines = pd.read_csv("reports/sweeps/figures/sweep.csv").query("model == 'three'")["line"]
    of_ranks = {f"{method}, ep_size=6 batch_size=64" for method in ("Token Drop", "Order")}
    assert set(lines) == {"Baseline, batch_size=64", *of_ranks}


def test_the_metric_says_whether_a_number_is_in_percent(shell: Shell) -> None:
    """Bits per byte below 1 were multiplied by 100."""
    words = ["model=custom", "model.name=mine", "model.pretrained=nowhere", "method=baseline"]
    for task, metric in (("obqa", "acc"), ("piqa", "bits_per_byte"), ("rte", "f1")):
        (plan,) = planned(*words, f"tasks={task}", f"tasks.{task}.metric={metric}")
        record(plan.cell, Path("sweeps"), [0.75, 0.75]).write()
    out = shell("table", "sweeps")[1]
    values = pd.read_csv("reports/sweeps/sweep.csv").set_index("column")["value"]
    assert values[["obqa", "piqa", "rte"]].tolist() == [75, 0.75, 0.75]
    assert "0.7500" in out
    assert shell("figure", "sweeps", "--formats=")[0] == 0
    scores = pd.read_csv("reports/sweeps/figures/sweep.csv").set_index("unit")["score"]
    assert scores.to_dict() == {"score (%)": 75, "bits per byte": 0.75, "f1": 0.75}


def test_dropped_and_straggler_are_means_over_tasks_that_count_equally(shell: Shell) -> None:
    """A task of several seeds weighed as many times."""
    for task, seeds, share in (("obqa", (0, 1, 2), 0.4), ("piqa", (0,), 0.2)):
        for seed in seeds:
            of = cell(create_method("random", 1.0, seed=seed), task=task)
            load = {"drop_rate": share, "mean_peak_after": 10 * share}
            record(of, Path("sweeps"), load=load).write()
    assert shell("table", "sweeps")[0] == 0
    numbers = pd.read_csv("reports/sweeps/sweep.csv").set_index("column")["value"]
    assert numbers[["Dropped", "Straggler"]].tolist() == pytest.approx([30, 3])


def test_records_of_ones_own_model_that_a_table_leaves_out_are_counted(shell: Shell) -> None:
    """It showed one of several settings without a word."""
    words = ["model=custom", "model.name=mine", "model.pretrained=nowhere", "results_dir=sweeps"]
    grid = ["tasks=obqa", "grid.method=[baseline,score]"]
    for setting in ("ep_size=2", "ep_size=4", "limit=8"):
        write_all(planned("experiment=table2", *words, *grid, setting), graded)
    write_all(planned(*words, "tasks=obqa", "method=order", "gamma=1.0", "ep_size=8"), graded)
    _, out, _ = shell("table", "table2", *words, *grid, "ep_size=2")
    assert "Left out: 3 of other settings;" in out  # of two methods, and one baseline


def test_a_directory_of_any_records_is_a_table(shell: Shell) -> None:
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
    damaged = Path("sweeps/mine/mine/obqa/damaged.json")
    damaged.parent.mkdir(parents=True, exist_ok=True)
    damaged.write_text("{")
    status, out, err = shell("table", "sweeps/mine")
    assert status == 0
    assert err.startswith(f"left out: {damaged}: not a whole record")
    assert err.count("\n") == 1
    assert "granularity=device" in out
    assert "Missing cells" not in out
    table = pd.read_csv("reports/sweeps/mine/sweep.csv", keep_default_na=False, na_values=[""])
    obqa, sst2 = (table[table["column"] == task].reset_index() for task in ("obqa", "sst2"))
    assert obqa["value"].tolist() == [100.0, 75.0, 25.0, 50.0]
    assert sst2["value"].fillna(-1).tolist() == [100.0, 75.0, -1, 50.0]
    knob = "granularity="
    assert obqa["Settings"].fillna("").tolist() == ["", "", f"{knob}device", f"{knob}expert"]
    assert obqa["gamma"].tolist() == [math.inf, 1, 0.5, 0.5]
    assert ((obqa["low"] > 0) & (obqa["low"] < obqa["high"]) & (obqa["high"] <= 100)).all()
    assert obqa["low"][0] == pytest.approx(91.24, abs=0.01)  # Wilson's of 40 of 40
    assert not table["best"].any(), "a metric may be the better the lower it is"
    assert set(table["status"]) == {"measured", "empty"}, "nothing was planned that is missing"
    Path("empty").mkdir()
    assert shell("table", "empty")[2].startswith("error: empty: has no whole record")
    assert "leave out limit=4" in shell("table", "sweeps/mine", "limit=4")[2]


def test_a_model_of_a_directory_of_ones_own_is_found_as_by_run(shell: Shell) -> None:
    """``--config-dir``, which ``run`` takes from Hydra, was refused."""
    Path("myconf/model").mkdir(parents=True)
    text = "defaults: [custom, _self_]\nname: mine\npretrained: tiny:mixtral\n"
    Path("myconf/model/own.yaml").write_text(text)
    out = shell("table", "table3", "--config-dir", "myconf", "model=own")[1]
    words = shlex.split(re.findall("^capmoe-eval run (.*)", out, re.MULTILINE)[0])
    assert words[:2] == ["model=own", f"hydra.searchpath=[file://{Path('myconf').resolve()}]"]
    assert planned(*words)[0].cell.model.pretrained == "tiny:mixtral"
    assert "--config-dir=no: no such directory" in shell("table", "table3", "--config-dir", "no")[2]


def test_bits_per_byte_are_shown_in_the_digits_in_which_methods_differ(shell: Shell) -> None:
    output = shell("table", str(ROOT / "results" / "real"))[1]
    assert "| 1.1260 | 1.1611 | 1.1155 | 61.8 (59.6–64.0) |" in output


def test_bits_per_byte_below_one_are_no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    results = read(ROOT / "results" / "real")
    are_bits = results.cells["task.metric"] == BITS_PER_BYTE
    halved = results.cells["value"].mask(are_bits, results.cells["value"] / 2)
    cells = results.cells.assign(value=halved)
    monkeypatch.setattr(sweep, "read", lambda _: results._replace(cells=cells))
    table = sweep.sweep_table(ROOT)
    of_bits = table[table["column"].isin(set(cells["task"][are_bits]))]["value"].dropna()
    assert len(of_bits) > 0
    assert of_bits.max() < 1


def test_an_empty_table_names_the_records_of_other_settings(shell: Shell) -> None:
    write_all(planned("experiment=table3", "eval_seed=7"), graded)
    out = shell("table", "table3")[1]
    assert "has records of other settings" in out
    assert "records of other settings" not in shell("table", "table3", "eval_seed=7")[1]
    Path("hub").mkdir()
    out = shell("table", "table3", "data.root=hub", "eval_seed=7", "--out=other")[1]
    assert "has records of other documents (data.root=miniworld); " in out


def test_one_command_renders_all_tables(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = ["table3", "table5", "table6", "table2_v1"]
    few = tuple(table for table in TABLES if table.key in rendered)
    monkeypatch.setattr(tables, "TABLES", few)  # to save time
    write_all(planned("experiment=table3"), graded)
    status, out, _ = shell("table", "all")
    assert shell("table", "all", "--out", "two")[0] == status == 0
    for path in Path("reports/zoo").iterdir():
        assert path.read_bytes() == (Path("two/zoo") / path.name).read_bytes()
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    assert list(lines) == rendered
    assert lines["table3"] == "30 of 30 entries: reports/zoo/table3.md"
    assert lines["table5"] == "settings: reports/zoo/table5.md"
    assert lines["table6"] == "0 of 18 entries: reports/zoo/table6.md"
    written = sorted(path.name for path in Path("reports/zoo").iterdir())
    assert written == sorted(f"{t}.{s}" for t in rendered for s in ("md", "tex", "csv"))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda path: path.write_text(path.read_text()[:99]), "not a whole record"),
        (lambda path: path.unlink(), ""),
    ],
)
def test_what_is_wrong_with_a_record_is_said_and_breaks_nothing(
    shell: Shell, damage: Callable[[Path], object], told: str
) -> None:
    plans = planned("experiment=table3")
    damage(write_all(plans, graded)[-1])
    table = tables.measured_table("table3")
    # The hole, and the average over it.
    assert len(measured(table)) == 28
    summary = tables._summary(table)
    assert summary == f"table3: 28 of 30 entries{', records left out: 1' if told else ''}"
    assert told in "".join(table.attrs["notes"])
    (missing,) = table.attrs["commands"]
    assert [p.cell for p in planned(*shlex.split(missing)[2:])] == [plans[-1].cell]
    assert shell("table", "table3")[0] == 0


@pytest.mark.parametrize(
    ("name", "words", "row", "method"),
    [
        ("table2_v1", ("rounds=1",), "Token Reroute", "score"),
        ("table2", ("granularity=device", "ep_size=1"), "Token Drop", "baseline"),
        ("table1", ("grid.gamma=[2.0,1.5,1.0]", "granularity=device", "ep_size=1"), "Score", None),
    ],
)
def test_a_row_shows_the_record_of_the_same_computation(
    shell: Shell, name: str, words: tuple[str, ...], row: str, method: str | None
) -> None:
    """One round is Token Drop; one device of all experts drops nothing from γ=1 on."""
    words = ("profile=zoo", "grid.model=[zoo_olmoe]", *words)
    plans = planned(f"experiment={name}", *words)
    write_all(plans, lambda cell: [1, 0, 1, 1] if cell.method.name == "baseline" else [1, 0, 0, 0])
    assert shell("table", name, *words)[0] == 0
    table = tables.measured_table(name, words)
    assert not table.attrs["commands"]
    rows = table[table["Method"] == row]
    assert set(rows["value"]) == {25.0 if method == "score" else 75.0}
    assert rows["p"].isna().any() == (method != "score")
