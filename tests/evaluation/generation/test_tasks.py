"""Generation tasks: their prompts, what stops an answer, and how it is scored.

HumanEval asks as lm-eval's task does and runs nothing that was not allowed. MTS-Dialog is scored as
ROUGE and BERTScore are defined. LongICL is held against a miniature of its protocol by hand.
"""

import dataclasses
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import lm_eval.evaluator
import lm_eval.tasks
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from transformers import BertConfig, BertModel, BertTokenizerFast

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.generation import programs
from capmoe_eval.evaluation.generation.mts_dialog import METRICS, BertScore, MtsDialog
from capmoe_eval.evaluation.longicl import protocol as longicl
from capmoe_eval.evaluation.progress import Progress
from capmoe_eval.evaluation.run import check_task, run
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import TaskId
from capmoe_eval.experiment.composition import load_option
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.datasource import data_source
from capmoe_eval.experiment.record import read_record
from capmoe_eval.zoo.hub import ready
from tests.evaluation.answering import Answering
from tests.records import planned

# HumanEval.


SPEC = load_option("tasks", "humaneval")["humaneval"]
TASK = TaskId("humaneval", SPEC.lm_eval, SPEC.dataset, SPEC.metric, SPEC.fewshot, SPEC.filter)
ALLOWED = "allow_code_execution=true"


def plan(root: Path, *words: str) -> CellPlan:
    more = ("batch_size=4", "limit=4", "threads=1", f"results_dir={root}", *words)
    (each,) = planned("model=zoo_olmoe", "tasks=humaneval", "method=baseline", *more)
    return each


@pytest.fixture(scope="module")
def library() -> TaskLibrary:
    return TaskLibrary()


@pytest.fixture(name="sandbox")
def tried() -> dict[str, Any]:
    """What a record says of the sandbox."""
    try:
        return programs.sandbox()[1]
    except UsageError as error:
        pytest.skip(str(error))


def test_prompts_stops_and_lengths_are_lm_evals() -> None:
    folder = Path(lm_eval.tasks.__file__).parent
    theirs = load_yaml(folder / "humaneval/humaneval.yaml", resolve_func=False)
    ours = load_yaml(Path(programs.__file__).with_name("humaneval.yaml"), resolve_func=False)
    differing = {key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)}
    keys = {"task", "class", "process_results", "metric_list", "filter_list", "repeats"}
    assert differing == keys
    assert theirs["repeats"] == 1  # lm-eval's default
    assert load_option("tasks", "capmoe_humaneval") == load_option("tasks", "humaneval")
    assert TASK.lm_eval != "humaneval"  # which would be lm-eval's own


def test_each_document_has_the_verdict_on_its_own_program(
    library: TaskLibrary, sandbox: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (task,) = library.get(TASK.lm_eval, ready(data_source("miniworld")))["tasks"].values()
    task.build_all_requests(limit=6)
    for instance in task.instances:
        right = instance.doc_id in (1, 4)
        instance.resps = [instance.doc["canonical_solution"] if right else "    return None\n"]
    counts: list[tuple[str, int, int]] = []
    monkeypatch.setattr(task, "on_progress", lambda *progress: counts.append(progress))
    task.apply_filters()
    scores = {
        each.doc_id: task.process_results(each.doc, [each.filtered_resps["none"]])
        for each in task.instances
    }
    assert scores == {number: {"pass@1": float(number in (1, 4))} for number in range(6)}
    assert task.verdicts == {"passed": 2, "failed": 4}
    assert counts[-1] == ("programs", 6, 6)


def test_a_task_that_runs_programs_without_a_sandbox_is_refused(
    library: TaskLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsafe = SimpleNamespace(
        UNSAFE_CODE=True, aggregation=lambda: {"pass@1": None}, get_config=lambda _: None
    )
    monkeypatch.setattr(library, "get", lambda *_: {"tasks": {"mbpp": unsafe}})
    mbpp = dataclasses.replace(TASK, name="mbpp", lm_eval="mbpp")
    with pytest.raises(UsageError, match=r"tasks.mbpp.lm_eval=mbpp: .* without a sandbox"):
        check_task(library, mbpp, data_source("miniworld"))


def test_a_record_says_what_was_executed(tmp_path: Path, sandbox: dict[str, Any]) -> None:
    allowed = plan(tmp_path, ALLOWED)
    assert allowed.path == plan(tmp_path).path
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    (record,) = run([allowed], Progress(1, stream)).records
    assert "4 of 4 programs, 00:00 left" in stream.getvalue()
    executed = read_record(record.path, tmp_path).capmoe["executed"]
    verdicts = executed.pop("verdicts")
    assert executed == {**sandbox, "at_once": programs.at_once()}
    (part,) = record.documents.values()
    assert sum(part.correct) == verdicts.get("passed", 0)
    assert sum(verdicts.values()) == len(part.correct) == 4
    assert record.value == sum(part.correct) / 4
    # A finished cell needs no permission.
    assert run([plan(tmp_path)]).computed == 0


# MTS-Dialog.


NAME = "capmoe_mts_dialog"


def built(root: str, name: str | None = None) -> MtsDialog:
    task = TaskLibrary().get(NAME, ready(data_source(root, name)))["tasks"][NAME]
    assert isinstance(task, MtsDialog)
    return task


def evaluated(task: MtsDialog, answer: Any, limit: int | None = None) -> tuple[Answering, Any]:
    model = Answering(answer)
    tasks = {"tasks": {NAME: task}, "groups": {}}
    return model, lm_eval.evaluator.evaluate(lm=model, task_dict=tasks, limit=limit)


@pytest.mark.real_data
def test_the_real_set_is_asked_for_the_note_of_a_dialogue(real_hub: Path) -> None:
    task = built(str(real_hub), "real")
    model, _ = evaluated(task, lambda doc: "", limit=2)
    assert len(task.eval_docs) == 200
    first = task.eval_docs[0]
    prompt, arguments = model.requests[0]
    assert prompt == f"{first['dialogue']}\nNote:"
    assert (arguments["until"], arguments["max_gen_toks"]) == (["\n\n"], 256)
    assert task.doc_to_target(first) == first["section_text"]


WORDS = ["the", "a", "cat", "dog", "sat", "on", "mat", "is", "of", "size", "old", ".", ","]
LAYER = 2


@pytest.fixture(scope="module", name="encoder")
def random_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of random weights, large enough that words differ."""
    pytest.importorskip("bert_score", reason="needs pip install 'capmoe-eval[bertscore]'")
    directory = tmp_path_factory.mktemp("bert")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (directory / "vocab.txt").write_text("\n".join([*special, *WORDS]))
    tokenizer = BertTokenizerFast(vocab_file=str(directory / "vocab.txt"), model_max_length=64)
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(special) + len(WORDS),
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=1.0,
    )
    BertModel(config).save_pretrained(directory)
    return directory


def test_bertscore_is_that_of_its_package(encoder: Path) -> None:
    import bert_score

    pairs = [
        ("the cat sat on the mat .", "a dog is old"),
        ("a dog", "the old dog of size , on a mat"),
        ("the cat sat", "the cat sat"),
    ]
    references, answers = map(list, zip(*pairs, strict=True))
    expected = torch.stack(bert_score.score(answers, references, str(encoder), num_layers=LAYER))
    score = BertScore(str(encoder), LAYER, rescale=False).score
    scores = [list(score(*pair).values()) for pair in pairs]
    assert list(score(*pairs[0])) == [f"bertscore_{n}" for n in ("precision", "recall", "f1")]
    precision, recall, _ = scores[1]
    assert precision != recall
    assert scores == [pytest.approx(row, abs=1e-5) for row in expected.T.tolist()]


def test_an_empty_answer_scores_none_and_all_is_recorded(encoder: Path) -> None:
    score = BertScore(str(encoder), LAYER, rescale=False)
    assert score.score("the cat", " ") == dict.fromkeys(METRICS, 0.0)
    identity = score.identity()
    expected = {"encoder": str(encoder), "layer": LAYER, "rescale": False}
    assert {name: identity[name] for name in expected} == expected
    assert len(identity["weights"]) == 16
    assert identity["bert-score"]


# LongICL.


TRAIN = [
    {"text": text, "label_text": {"a": "Alpha", "b": "beta", "c": "gamma"}[text[0]]}
    for text in ("b one", "b two", "a one", "b three", "c one", "a two", "c two")
]


def texts(rows):
    return [row["text"] for row in rows]


def test_each_pass_takes_the_next_row_of_each_label_in_order_of_first_appearance():
    passes = ["b one", "a one", "c one", "b two", "a two", "c two"]
    assert texts(longicl.demonstrations(TRAIN, 2)) == passes
    assert texts(longicl.test_documents(TRAIN, passes=2, limit=4)) == passes[:4]
    # Labels that are used up are left out of further passes.
    assert texts(longicl.test_documents(TRAIN, passes=7, limit=None)) == [*passes, "b three"]


def test_the_prompt_to_the_letter():
    assert longicl.prompt(longicl.demonstrations(TRAIN, 1), "\nwho am I?") == (
        "Given a customer service query, please predict the intent of the query. The predict "
        "answer must come from the demonstration examples with the exact format. The examples "
        "are as follows: \n"
        "service query: b one\nintent category: beta\n"
        "service query: a one\nintent category: Alpha\n"
        "service query: c one\nintent category: gamma\n"
        "service query: \nwho am I?\nintent category: "
    )


RIGHT = [
    "card_lost",
    " card_lost \n",
    "CARD_lost\nservice query: and so on",
    "card_lostservice query: and so on",
    "\n\n card_lost\nmore",
    "card_lost service query card_lost",
]
WRONG = [
    "",
    "card_lost.",
    "the intent is card_lost",
    "card lost",
    "other\ncard_lost",
    "service query: card_lost",
    "\nservice query\ncard_lost",
]


@pytest.mark.parametrize("continuation", [*RIGHT, *WRONG])
def test_scoring(continuation):
    assert longicl.score(continuation, "Card_lost") is (continuation in RIGHT)


@pytest.mark.real_data
def test_the_real_data_have_the_shots_and_lengths_of_table_6(real_hub, tmp_path):
    data = datasets.load_dataset(str(real_hub / "mteb/banking77"), cache_dir=str(tmp_path))
    train, test = data["train"].to_list(), data["test"].to_list()
    documents = longicl.test_documents(test)
    every = longicl.test_documents(test, limit=None)
    assert (len(documents), len(every)) == (100, 7 * 77)
    assert every[:100] == documents
    for shots, characters in enumerate((8777, 16703, 25569, 33971, 42478), 1):
        examples = longicl.demonstrations(train, shots)
        labels = [row["label_text"] for row in examples]
        assert labels == labels[:77] * shots
        assert len(set(labels)) == 77
        assert {row["label_text"] for row in documents} <= set(labels)
        assert len(longicl.prompt(examples, "")) == characters
        assert examples[0]["text"] == "I am still waiting on my card?"
        assert labels[0] == "card_arrival"
        assert "Refund_not_showing_up" in labels


@pytest.fixture(scope="module")
def manager():
    return TaskManager(include_path=Path(longicl.__file__).parent, include_defaults=False)


@pytest.fixture(scope="module")
def rows(hub, tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("rows"))
    data = datasets.load_dataset(str(hub / "mteb/banking77"), cache_dir=cache)
    return {split: data[split].to_list() for split in ("train", "test")}


def evaluate(manager, root, lm, *shots, **keywords):
    """Return the results of the tasks of these numbers of shots."""
    names = [f"longicl_banking77_{each}shot" for each in shots]
    configs = [load_yaml(manager.task_index[name].yaml_path) for name in names]
    for config in configs:
        config["dataset_path"] = str(root / config["dataset_path"])
    result = simple_evaluate(model=lm, tasks=configs, task_manager=manager, **keywords)
    return [result["results"][name] for name in names]


def test_prompts_are_those_of_the_protocol(manager, hub, rows):
    lm = Answering(lambda doc: "")
    # A number of shots from outside must not add lm-eval's own demonstrations.
    evaluate(manager, hub, lm, *range(1, 6), num_fewshot=3)
    documents = longicl.test_documents(rows["test"])
    prompts, settings = zip(*lm.requests, strict=True)
    assert list(prompts) == [
        longicl.prompt(longicl.demonstrations(rows["train"], shots), doc["text"])
        for shots in range(1, 6)
        for doc in documents
    ]
    greedy = {"do_sample": False, "temperature": 0.0, "max_gen_toks": 100}
    assert all(of == {"until": [longicl.NEXT_QUERY], **greedy} for of in settings)


def test_a_mixture_of_answers_scores_its_mean(manager, hub, rows):
    labels = {row["text"]: row["label_text"] for row in rows["test"]}
    documents = longicl.test_documents(rows["test"])
    right = {row["text"] for row in documents[:4]}

    def answer(doc):
        return f"\n {labels[doc['text']].upper()}\nmore" if doc["text"] in right else "none"

    (result,) = evaluate(manager, hub, Answering(answer), 1)
    share, n = 4 / len(documents), len(documents)
    assert result["exact_match,none"] == share
    assert result["exact_match_stderr,none"] == pytest.approx(
        (share * (1 - share) / (n - 1)) ** 0.5
    )
