"""Tasks find what lm-eval finds in all folders, read their documents, and score them."""

import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import lm_eval.evaluator
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from PIL import Image

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.multimodal import prompts, scores
from capmoe_eval.evaluation.passages.task import cut
from capmoe_eval.evaluation.run import check_task
from capmoe_eval.evaluation.tasks import OURS, TaskLibrary, task_manager
from capmoe_eval.experiment.cell import TaskId
from capmoe_eval.experiment.composition import load_option, options
from capmoe_eval.experiment.datasource import DataSource, data_source
from capmoe_eval.zoo.hub import ready
from capmoe_eval.zoo.sets import documents
from tests.evaluation.answering import Answering

NAMES = sorted(
    {
        spec.lm_eval
        for key in options("tasks")
        for spec in [load_option("tasks", key).get(key)]
        if spec
    }
)


@pytest.fixture(scope="module")
def everything() -> TaskManager:
    """lm-eval's own manager, over all of its folders and ours."""
    return TaskManager(include_path=[str(path) for path in OURS])


def parts(manager: TaskManager, name: Any) -> dict[str, Any]:
    """Return the file of a name and of all that it consists of, and what tags stand for."""
    entry = manager.task_index[name]
    members = (entry.cfg or {}).get("task")
    below = [*(members if isinstance(members, list) else [])]
    if entry.yaml_path is None:
        below += entry.tags
    entries = {name: (entry.kind.name, entry.yaml_path)}
    for member in below:
        entries |= parts(manager, member if isinstance(member, str) else member["task"])
    return entries


# Beside ours: a group whose parts lie in other folders, and a tag.
@pytest.mark.nightly
@pytest.mark.parametrize("name", [*NAMES, "openllm", "arithmetic"])
def test_a_task_is_what_lm_eval_finds_in_all_folders(name: str, everything: TaskManager) -> None:
    assert parts(task_manager(name), name) == parts(everything, name)


def of_rows(rows: list[dict[str, Any]]) -> ConfigurableTask:
    """A task of lm-eval about documents that are at hand."""
    config = {
        "task": "mine",
        "test_split": "test",
        "output_type": "multiple_choice",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
        **{"doc_to_text": "{{question}}", "doc_to_choice": "choices", "doc_to_target": "answer"},
    }
    return ConfigurableTask(config=config)


@pytest.mark.parametrize(("choices", "answer"), [(["Tea", ""], 0), (["Tea", "Iron"], 2)])
def test_a_first_document_that_lm_eval_does_not_take_is_told(
    choices: list[str], answer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question": "Which?", "choices": choices, "answer": answer}]
    monkeypatch.setattr(TaskManager, "load", lambda *_: of_rows(rows))
    with pytest.raises(UsageError, match=r"^task=\S+: its first document has an empty choice, or"):
        TaskLibrary().get("banking77_intent", DataSource("mine", None))


WORDS = st.lists(st.text("aé漢", min_size=1, max_size=6), min_size=2, max_size=30).map(" ".join)


@given(st.lists(WORDS, max_size=8), st.integers(40, 90))
def test_documents_are_the_text_in_order_and_end_before_a_word(
    passages: list[str], size: int
) -> None:
    text = "\n\n".join(dict.fromkeys(passages))
    documents = cut(passages, size)
    whole = " ".join(documents)
    assert text.startswith(whole)
    assert len(text.encode()) - len(whole.encode()) <= size + 1, "the rest is shorter"
    for document in documents:
        # The next word would not have fitted; one of at most 18 bytes, or two and a blank line.
        assert size - 38 <= len(document.encode()) <= size


# Tasks with images: a model that is right scores full.


@pytest.fixture(scope="module")
def library() -> TaskLibrary:
    return TaskLibrary()


def evaluated(
    library: TaskLibrary, name: str, answer: Callable[[Any], str], limit: int | None = None
) -> tuple[list[Any], dict[str, Any]]:
    """Return the requests of a task, and the values of a model that gives these answers."""
    source = data_source("easy_vqa" if name == "easy_vqa" else "pictures")
    model, tasks = Answering(answer), library.get(name, ready(source))
    result = lm_eval.evaluator.evaluate(lm=model, task_dict=tasks, limit=limit)["results"][name]
    return model.requests, {key.removesuffix(",none"): value for key, value in result.items()}


@pytest.mark.slow
def test_right_answers_score_full_and_the_errors_are_metrics(library: TaskLibrary) -> None:
    full: dict[str, dict[str, float]] = {
        "mme": {"perception": 2000, "cognition": 800, "perception_stderr": 0, "acc": 1},
        "mmbench": dict.fromkeys(["circular", *scores.CAPABILITIES.values()], 1),
        "seedbench": dict.fromkeys(scores.DIMENSIONS.values(), 1),
    }
    for task, expected in full.items():
        _, values = evaluated(library, task, lambda doc: doc["answer"])
        assert {name: values[name] for name in expected} == expected


def test_a_task_reads_the_data_set_that_is_named(library: TaskLibrary, tmp_path: Path) -> None:
    source = ready(data_source("pictures"))
    shutil.copytree(source.root / "lmms-lab/MME", tmp_path / "lmms-lab-encoder/MME")
    moved = data_source(str(tmp_path))
    built = library.get("mme", moved, "lmms-lab-encoder/MME")["tasks"]["mme"]
    assert built.config.dataset_path == str(tmp_path / "lmms-lab-encoder/MME")
    assert len(built.eval_docs) == len(documents("pictures")["lmms-lab/MME"]["default"]["test"])
    asked = TaskId("mme", "mme", "lmms-lab-encoder/MME", "acc", images=True)
    check_task(library, asked, moved)  # reads no other
    with pytest.raises(UsageError, match="no dataset 'lmms-lab/MME'"):
        library.get("mme", moved)


def test_a_data_set_that_changes_after_it_was_hashed_is_refused(tmp_path: Path) -> None:
    """Its records would have the fingerprint of the documents from before."""
    of_world = ready(data_source("miniworld")).directory("allenai/openbookqa")
    shutil.copytree(of_world, tmp_path / "allenai/openbookqa")
    source = data_source(str(tmp_path))
    source.fingerprint("allenai/openbookqa")
    with (tmp_path / "allenai/openbookqa/README.md").open("a") as card:
        card.write("\n")
    with pytest.raises(UsageError, match="task=openbookqa: its files changed while "):
        TaskLibrary().get("openbookqa", source)


def test_videos_are_left_out() -> None:
    rows = {"data_type": ["image", "video"], "image": [[], []], "question": ["a", "b"]}
    text = datasets.Value("string")
    features = {"data_type": text, "image": [datasets.Image()], "question": text}
    of_both = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    assert prompts.of_pictures(of_both)["question"] == ["a"]


QUESTIONS = [
    ("what shape is present?", "circle", 0),
    ("is there a circle?", "no", 1),
    ("what color is the shape?", "red", 1),
    ("is no red shape present?", "yes", 1),
]


def test_easy_vqa_is_read_from_its_package_and_scored_by_first_words(
    library: TaskLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in has the functions of the package, and four questions about two pictures."""
    paths = {number: str(tmp_path / f"{number}.png") for number in (0, 1)}
    for number, path in paths.items():
        Image.new("RGB", (64, 64), (200 * number, 0, 0)).save(path)
    package = SimpleNamespace(
        get_test_questions=lambda: tuple(map(list, zip(*QUESTIONS, strict=True))),
        get_test_image_paths=lambda: paths,
    )
    monkeypatch.setitem(sys.modules, "easy_vqa", package)
    answer = {"red": "Red or no"}
    requests, values = evaluated(library, "easy_vqa", lambda doc: answer.get(doc["answer"], " No."))
    expected = {"acc": 0.5, "color": 1, "shape": 0, "yes_no": 0.5}
    assert {name: values[name] for name in expected} == expected
    text, _, visual = requests[0]
    assert text == "<image>\nwhat shape is present?\nAnswer:"
    assert visual["visual"][0].size == (64, 64)
    assert requests[1][2]["visual"][0].getpixel((0, 0)) == (200, 0, 0)


def test_the_package_easy_vqa_has_what_is_read_of_it(library: TaskLibrary) -> None:
    pytest.importorskip("easy_vqa", reason="needs pip install -e '.[easy-vqa]'")
    assert evaluated(library, "easy_vqa", lambda doc: doc["answer"], limit=200)[1]["acc"] == 1
    rows = documents("easy_vqa")["vzhou842/easy-VQA"]["default"]["test"]
    kinds = Counter(row["kind"] for row in rows)
    assert kinds == {"yes_no": 7136, "shape": 1257, "color": 1280}
