"""A user's own task file of lm-eval on the command line."""

import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.run import check_task
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.composition import for_hydra
from capmoe_eval.experiment.configuration import planned
from capmoe_eval.experiment.datasource import DataSource
from hydra_plugins.capmoe_sweeper import sweep_jobs

COMMON = ["model=tiny_olmoe", "method=score", "gamma=1.0"]
TEXT = """
include: base.yaml
task: {name}
dataset_path: json
dataset_kwargs: {{data_dir: documents, data_files: {{test: [a.jsonl, "more/*.jsonl"]}}}}
doc_to_text: !function words.text
metric_list: [{{metric: acc_norm}}, {{metric: acc, aggregation: !function metrics.good}}]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in ("animals", "plants"):
        Path(f"{name}.yaml").write_text(TEXT.format(name=f"my_{name}"))
    Path("base.yaml").write_text("output_type: multiple_choice\nfilter_list: [{name: strict}]\n")
    Path("words.py").write_text("import prefixes\ndef text(doc): ...\n")
    for name in ("prefixes", "metrics"):
        Path(f"{name}.py").write_text("def good(items): ...\n")
    for name in ("a", "more/b", "documents/deep/c"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{name}.jsonl").write_text("{}")
    yield


def cells(*words: str) -> list[Cell]:
    return [plan.cell for plan in planned([*COMMON, *words])[1]]


def test_a_file_is_a_task_beside_others_and_its_settings_can_be_changed() -> None:
    _, mine = plans = planned([*COMMON, "tasks=[obqa,animals.yaml]"])[1]
    assert [plan.cell.task.name for plan in plans] == ["obqa", "my_animals"]
    task = mine.cell.task
    assert (task.lm_eval, task.dataset, task.metric) == ("my_animals", "json", "acc_norm")
    assert (task.filter, task.fewshot, task.images) == ("strict", None, False)
    assert mine.source.file == Path("animals.yaml").absolute()
    (changed,) = cells(f"tasks={Path('animals.yaml').absolute()}", "tasks.my_animals.fewshot=3")
    assert (changed.task.fewshot, changed.task.file_hash) == (3, task.file_hash)
    assert "file_hash" not in plans[0].cell.task.identity()


def test_each_file_of_a_sweep_is_a_job() -> None:
    jobs = sweep_jobs(for_hydra(["tasks=animals.yaml,plants.yaml", "gamma=1.0,2.0"]))
    assert [words[0] for words in jobs] == [
        f"tasks=my_{n}" for n in ("animals", "plants") for _ in "12"
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("animals.yaml", "base.yaml", "words.py", "prefixes.py", "metrics.py"),
        *("a.jsonl", "more/b.jsonl", "documents/deep/c.jsonl"),
    ],
)
def test_a_change_of_any_file_that_a_task_needs_is_another_cell(name: str) -> None:
    """Of changed documents the old score stood beside that of another method on the new ones."""
    (before,) = cells("tasks=animals.yaml", "limit=1")
    file = Path(name)
    file.write_text(f"{file.read_text()}\n# changed\n")
    (after,) = cells("tasks=animals.yaml", "limit=1")
    assert before.digest != after.digest


def test_contents_that_change_places_are_another_task() -> None:
    Path("more/a.jsonl").write_text("[]")
    files = "{test: a.jsonl, dev: more/a.jsonl}"
    Path("x.yaml").write_text(f"{{task: x, dataset_kwargs: {{data_files: {files}}}}}")
    (before,) = cells("tasks=x.yaml")
    Path("a.jsonl").write_text("[]")
    Path("more/a.jsonl").write_text("{}")
    (after,) = cells("tasks=x.yaml")
    assert before.digest != after.digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"tasks=x\.yaml: no such file: .*x.yaml"),
        ("- a", "it is no mapping"),
        ("group: x\ntask: [a, b]", "declares no task"),
        ("task: obqa", "obqa is a task of the suite"),
        ("task: x\ninclude: none.yaml", "no such file: .*none.yaml"),
        ("task: x\ndoc_to_text: !function none.f", "no such file: .*none.py"),
        ("task: x\ndoc_to_text: !function wrong.f", r"no task file of lm-eval \(.*syntax"),
        ("a: [", "while parsing"),
        ("{task: x, metric_list: [acc]}", r"x\.yaml: metric_list=\['acc'\]: must be a list"),
        ("{task: x, filter_list: 5}", r"x\.yaml: filter_list=5: must be a list of mappings"),
    ],
)
def test_a_file_that_is_no_task_is_refused_in_a_line(text: str | None, message: str) -> None:
    Path("wrong.py").write_text("def f(: ...")
    if text is not None:
        Path("x.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        cells("tasks=x.yaml")


def test_two_files_of_one_task_are_refused() -> None:
    """One of them alone was evaluated, without a word."""
    Path("other").mkdir()
    Path("other/animals.yaml").write_text("task: my_animals")
    with pytest.raises(UsageError, match=r"my_animals is the task of animals\.yaml, too"):
        cells("tasks=[animals.yaml,other/animals.yaml]")


def test_of_two_files_of_one_task_in_a_folder_the_wrong_one_is_never_loaded() -> None:
    """lm-eval loads the first that it meets, whichever was named."""
    Path("data.json").write_text('[{"q": "a robin", "right": 0}]')
    text = (
        "{{task: my_task, dataset_path: json, dataset_kwargs: {{data_files: {{test: data.json}}}},"
        " test_split: test, output_type: multiple_choice, doc_to_text: q, doc_to_target: {},"
        " doc_to_choice: [bird, plant]}}"
    )
    for name, target in (("named.yaml", "right"), ("a.yaml", "'{{1 - right}}'")):
        Path(name).write_text(text.format(target))
    loaded, refused = {}, []
    for name in ("named.yaml", "a.yaml"):
        (plan,) = planned([*COMMON, f"tasks={name}", "data.root=null"])[1]
        try:
            (task,) = TaskLibrary().get("my_task", plan.source)["tasks"].values()
            loaded[name] = str(task.config.doc_to_target)
        except UsageError as error:
            refused.append(str(error))
    assert loaded in ({"named.yaml": "right"}, {"a.yaml": "{{1 - right}}"})
    assert len(refused) == 1
    assert "declares my_task, too; rename one of the tasks" in refused[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("metric_list: [{metric: accuracy}]", "metric=accuracy: choose one of .*acc_norm"),
        ("metric_list: [{metric: acc_nrm, aggregation: mean}]", "acc_nrm: did you mean 'acc_norm'"),
        ("metric_list: [{metric: acc, aggregation: meen}]", "=meen: did you mean 'mean'"),
        (
            "dataset_kwargs: {data_files: {test: data.json}}, test_split: test, doc_to_text: q, "
            "doc_to_target: right, output_type: multiple_choice, doc_to_choice: choises",
            "doc_to_choice must be a column or a list",
        ),
        ("dataset_kwargs: {data_files: {test: none.json}}", r"none\.json"),
        ("dataset_kwargs: {data_files: {test: cut.json}}", r"cut\.json: Expected object or value"),
        ("dataset_kwargs: {data_files: {test: empty.jsonl}}", r"empty\.jsonl is empty"),
        ("dataset_kwargs: {data_files: {test: cut.jsonl}}", r"cut\.jsonl: JSON parse error"),
    ],
)
def test_what_lm_eval_cannot_use_is_named(settings: str, message: str) -> None:
    """Its own errors were ``KeyError: None`` and "malformed node or string", or spoke of a hub."""
    Path("data.json").write_text('[{"q": "a robin", "right": 0}]')
    Path("empty.jsonl").touch()
    Path("cut.json").write_text('[{"q": ')
    Path("cut.jsonl").write_text('{"q": "a robin"}\n\n{"q": a')
    task = re.sub(r"\W+", "_", settings)[:60]  # lm-eval keeps tasks and files by their names
    Path(f"{task}.yaml").write_text(f"{{task: {task}, dataset_path: json, {settings}}}")
    (plan,) = planned([*COMMON, f"tasks={task}.yaml", "data.root=null"])[1]
    with pytest.raises(UsageError, match=rf"^tasks=.*{task}\.yaml: .*{message}") as error:
        TaskLibrary().get(task, plan.source)
    assert "hub" not in str(error.value)


GENERATED = "generate_until, generation_kwargs: {until: ['.']}"
RANKED = "multiple_choice, doc_to_choice: [bird, plant]"


@pytest.mark.parametrize(
    ("output", "metric", "choices"),
    [
        *((GENERATED, metric, "exact_match") for metric in ("bleu", "chrf", "ter", "f1", "acc")),
        *((RANKED, metric, "acc_norm") for metric in ("mcc", "f1", "likelihood", "perplexity")),
        ("loglikelihood_rolling", "word_perplexity", "bits_per_byte"),
        ("loglikelihood_rolling", "byte_perplexity", "bits_per_byte"),
        (GENERATED, "exact_match", ""),
        (RANKED, "exact_match", ""),
        ("loglikelihood_rolling", "bits_per_byte", ""),
        ("loglikelihood", "perplexity", ""),
    ],
)
def test_a_metric_without_a_number_of_each_document_is_refused(
    output: str, metric: str, choices: str
) -> None:
    """It failed after all requests were computed, as a TypeError of float()."""
    Path("one.json").write_text('[{"q": "a robin", "right": "bird"}]')
    name = f"my_{output[:14].partition(',')[0]}_{metric}"
    Path(f"{name}.yaml").write_text(
        f"{{task: {name}, dataset_path: json, dataset_kwargs: {{data_files: {{test: one.json}}}}"
        f", test_split: test, doc_to_text: q, doc_to_target: right, output_type: {output}, "
        f"metric_list: [{{metric: {metric}}}]}}"
    )
    (plan,) = planned([*COMMON, f"tasks={name}.yaml", "data.root=null"])[1]
    with nullcontext() if not choices else pytest.raises(UsageError) as error:
        check_task(TaskLibrary(), plan.cell.task, plan.source)
    if choices:
        assert f"tasks.{name}.metric={metric}: is of all documents" in str(error.value)
        assert choices in str(error.value).partition("choose")[2]


BIRDS = (
    "{task: birds, dataset_path: json, dataset_kwargs: {data_files: {test: birds.json}}, "
    "test_split: test, output_type: multiple_choice, doc_to_text: q, doc_to_target: right, "
    "doc_to_choice: [bird, plant]}"
)
ROWS = '[{"q": "a robin", "right": 0}]'


def source_of(name: str) -> DataSource:
    Path(f"{name}.yaml").write_text(BIRDS.replace("birds", name))
    (plan,) = planned([*COMMON, f"tasks={name}.yaml", "data.root=null"])[1]
    return plan.source


def test_documents_that_change_after_they_were_hashed_are_refused_and_not_kept() -> None:
    """Their record had the digest of the documents from before."""
    Path("robins.json").write_text(ROWS)
    source = source_of("robins")
    Path("robins.json").write_text(ROWS.replace("robin", "dove"))
    with pytest.raises(UsageError, match=r"^tasks=.*robins\.yaml: its files changed while the run"):
        TaskLibrary().get("robins", source)
    Path("robins.json").write_text(ROWS)
    (task,) = TaskLibrary().get("robins", source)["tasks"].values()
    assert [row["q"] for row in task.eval_docs] == ["a robin"]


def test_other_documents_of_the_same_time_are_read() -> None:
    """datasets gave those from before, which it keeps by the file's name and time."""
    for bird in ("robin", "dove"):
        Path("finches.json").write_text(ROWS.replace("robin", bird))
        os.utime("finches.json", (0, 0))
        (task,) = TaskLibrary().get("finches", source_of("finches"))["tasks"].values()
        assert [row["q"] for row in task.eval_docs] == [f"a {bird}"]
