"""Grids and their parts."""

import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.run_command import usage
from capmoe_eval.experiment import datasource
from capmoe_eval.experiment.composition import composed, load_option, options
from capmoe_eval.experiment.configuration import expand_parts, plans
from capmoe_eval.experiment.datasource import DataSource
from capmoe_eval.experiment.observation import observer_options
from capmoe_eval.experiment.settings import keys
from capmoe_eval.routing.registry import knobs
from tests.records import planned


def expand(config: DictConfig) -> list[dict[str, Any]]:
    return [point for points in expand_parts(config).values() for point in points()]


def test_parts_are_expanded_one_after_the_other_with_the_grid() -> None:
    words = ["grid.method=[order,score]", "parts.low.gamma=[0.5]"]
    points = expand(composed([*words, "+parts.high={gamma: [1.0, 2.0], seed: [3]}"]))
    assert [(point["method"], point["gamma"], point["seed"]) for point in points] == [
        *(("order", 0.5, 0), ("score", 0.5, 0)),
        *(("order", 1.0, 3), ("order", 2.0, 3), ("score", 1.0, 3), ("score", 2.0, 3)),
    ]


def test_an_interpolation_sees_the_model_of_a_point() -> None:
    models = {"zoo_olmoe": 8, "zoo_qwen2_moe": 6}
    points = expand(composed([f"+grid.model=[{','.join(models)}]", "+grid.gamma=[1.0]"]))
    assert {point["model"]["name"]: point["ep_size"] for point in points} == models


def test_a_model_file_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text("name: my_moe\npretrained: tiny:mixtral\n")
    words = ["model=mine", f"hydra.searchpath=[file://{tmp_path}]", "tasks=obqa"]
    with pytest.raises(UsageError, match=r"^model=my_moe: .*'model\.\w+'.* defaults: \[custom, "):
        planned(*words)


def test_a_cell_of_two_parts_is_one_plan() -> None:
    words = ["tasks=obqa", "+parts.a.gamma=[1.0,2.0]", "+parts.b.gamma=[2.0]"]
    assert [plan.cell.method.factor.uniform for plan in planned(*words)] == [1.0, 2.0]


@pytest.mark.parametrize("key", ["obqa", "arc_c", "mts_dialog", "gsm8k"])
def test_lm_evals_names_of_tasks_will_do(key: str) -> None:
    """The record says our key."""
    name = load_option("tasks", key)[key].lm_eval
    assert [plan.cell.task.name for plan in planned(f"tasks={name}")] == [key]
    assert planned(f"tasks=[rte,{name}]")[-1].cell == planned(f"tasks=[rte,{key}]")[-1].cell
    (plan,) = planned(f"tasks={key}", f"+grid.tasks=[{name}]")
    assert plan.cell == planned(f"tasks={key}")[0].cell


@pytest.mark.parametrize("name", [name for name in options("model") if name != "custom"])
def test_every_shipped_model_has_all_fields_and_can_be_planned(name: str) -> None:
    """Also the paper's checkpoints, which cannot be loaded here."""
    config = composed([f"model={name}", "gamma=2.0"])
    assert load_option("model", name) == config.model
    assert list(config.model) == list(load_option("model", "custom"))
    cells = [plan.cell for plan in plans(config)]
    assert [cell.model.name for cell in cells] == [name] * 9
    is_made_here = name.startswith(("zoo", "tiny", "banking77"))
    assert (cells[0].data != "hub") == is_made_here


def test_a_part_may_take_some_of_the_tasks() -> None:
    words = ["tasks=[obqa,rte]", "+parts.a={tasks: [rte], gamma: [1.0]}", "+parts.b.gamma=[2.0]"]
    found = [(plan.cell.task.name, plan.cell.method.factor.uniform) for plan in planned(*words)]
    assert found == [("rte", 1.0), ("obqa", 2.0), ("rte", 2.0)]


def test_a_task_may_have_documents_of_its_own(tmp_path: Path) -> None:
    first, second = planned("model=zoo_llava_olmoe", "tasks=[mme,easy_vqa]")
    assert (first.source.name, second.source.name) == ("pictures", "easy_vqa")
    assert second.cell.data == "easy_vqa"
    words = ["tasks=[easy_vqa,obqa]", f"data.root={tmp_path}", "data.name=mine"]
    assert [plan.cell.data for plan in planned(*words)] == ["easy_vqa", "mine"]
    words = ["tasks=easy_vqa", "tasks.easy_vqa.data_root=null", "data.root=miniworld"]
    assert planned(*words)[0].cell.data == "miniworld"


# Every knob is described where users look: in ``--help`` and in the documentation's table.


def test_the_help_names_every_key_and_every_option() -> None:
    lines = usage("all").splitlines()
    assert max(map(len, lines)) <= 100
    first = [line.split()[0] for line in lines if re.match(r"  \w", line)]
    paragraphs = knobs().keys() | observer_options().keys()
    assert paragraphs <= {line.partition("=")[0] for line in lines}
    keys_of_runs = (keys().keys() - paragraphs) | {"data.root", "data.name"}
    assert keys_of_runs - set(first) == set()
    words = set(re.findall(r"\w+", usage("all")))
    for group in ("model", "tasks", "experiment", "profile", "variant"):
        assert group in first
        assert set(options(group)) <= words


# The fingerprint of a dataset: of the documents that are read, wherever they lie.


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash anew each time: within one process a hash is kept."""
    monkeypatch.setattr(datasource, "_hash_files", datasource._hash_files.__wrapped__)


def dataset(root: Path, text: str = "old") -> Path:
    home = root / "org/data"
    (home / "main").mkdir(parents=True)
    (home / "README.md").write_text("---\nconfigs: []\n---\n")
    (home / "main/test.parquet").write_text(text)
    return home


@pytest.mark.parametrize("linked", ["org/data", "org/data/main/test.parquet"])
def test_what_a_link_leads_to_is_hashed(tmp_path: Path, linked: str, fresh: None) -> None:
    plain, root = tmp_path / "plain", tmp_path / "root"
    dataset(plain)
    dataset(root)
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / Path(linked).name
    (root / linked).rename(moved)
    (root / linked).symlink_to(moved)
    before = DataSource("mine", root).fingerprint("org/data")
    assert before == DataSource("mine", plain).fingerprint("org/data")
    (root / "org/data/main/test.parquet").write_text("new")
    assert DataSource("mine", root).fingerprint("org/data") != before
