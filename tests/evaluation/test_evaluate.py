"""Cells on mini-world and on real documents."""

import copy
import dataclasses
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval.evaluator import evaluate as lm_eval_evaluate
from lm_eval.models.huggingface import HFLM

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.evaluate import evaluate, prepare, requests
from capmoe_eval.evaluation.lm import CapmoeLM
from capmoe_eval.evaluation.loading import load_lm
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.experiment.composition import load_option
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.datasource import DataSource, data_source
from capmoe_eval.experiment.record import Record, read_record
from capmoe_eval.paper.pairing import Paired, pair
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from tests.nightly import nightly_but
from tests.records import answered, undated

# Table 5 of the paper; OBQA … HellaSwag normalised, GSM8K flexible as released.
TABLE_5 = {
    "boolq": (0, "acc"),
    "rte": (0, "acc"),
    "obqa": (0, "acc_norm"),
    "piqa": (0, "acc_norm"),
    "mmlu": (5, "acc"),
    "winogrande": (5, "acc"),
    "gsm8k": (5, "exact_match"),
    "hellaswag": (10, "acc_norm"),
    "arc_c": (25, "acc_norm"),
    "longicl_1": (None, "exact_match"),
}
TINY = ModelId("tiny_olmoe", "tiny:olmoe", dtype="float32")
BASELINE, SCORE = create_method("baseline"), create_method("score", 1.0)


def task(name: str) -> TaskId:
    spec = load_option("tasks", name)[name]
    return TaskId(name, spec.lm_eval, spec.dataset, spec.metric, spec.fewshot, spec.filter)


def cell(name: str, method: Method = SCORE, **changes: Any) -> Cell:
    values: dict[str, Any] = {"batch_size": 4, "limit": 2, "data": "miniworld"} | changes
    fewshot = values.pop("fewshot", task(name).fewshot)
    return Cell(TINY, method, dataclasses.replace(task(name), fewshot=fewshot), **values)


@pytest.fixture(scope="module")
def lm() -> CapmoeLM:
    return load_lm(TINY, "cpu", 4)


@pytest.fixture(scope="module")
def library() -> TaskLibrary:
    return TaskLibrary()


@pytest.fixture(scope="module")
def source(hub: Path) -> DataSource:
    return DataSource("miniworld", hub)


@pytest.fixture(scope="module")
def run(lm: CapmoeLM, library: TaskLibrary, source: DataSource) -> Callable[[Cell], Record]:
    return lambda asked: evaluate(CellPlan(asked, source, Path("unused")), lm, library)


def read_again(record: Record, root: Path) -> Record:
    record = Record.of(record.content, record.cell.path(root))
    record.write()
    again = read_record(record.path)
    assert again.content == record.content
    assert again.cell == record.cell
    return again


@pytest.mark.parametrize("name", ["obqa", "gsm8k"])
def test_a_record_is_whole_and_can_be_read_again(
    name: str, run: Any, source: DataSource, tmp_path: Path
) -> None:
    method = create_method("score", 1.0, ep_size=2)
    again = read_again(run(cell(name, method, limit=4)), tmp_path)
    assert all(invariant.passed for _, invariant, _ in again.proofs.recorded())
    assert again.load.drop_rate > 0
    (documents,) = again.documents.values()
    assert len(documents.batches or ()) == len(documents.correct) == again.n == 4
    assert 0 in documents.batches
    assert max(documents.batches) < again.load.forwards - again.load.decode_forwards
    assert again.provenance.data_fingerprint == source.fingerprint(task(name).dataset)
    value, of_lm_eval = again.value, again.content["results"][task(name).lm_eval]
    error = f"{task(name).metric}_stderr,{task(name).filter}"
    assert again.stderr == of_lm_eval[error] == pytest.approx((value * (1 - value) / 3) ** 0.5)
    assert (0 < value < 1) == (name == "obqa"), "an error that is not 0"
    assert "samples" not in again.content
    text = json.dumps(again.content)
    assert str(source.root) not in text, "a path of this machine"
    assert "site-packages" not in text
    assert again.content["configs"][task(name).lm_eval]["dataset_path"] == task(name).dataset


def test_bits_per_byte_are_those_of_all_texts_together(
    run: Any, lm: CapmoeLM, library: TaskLibrary, source: DataSource, tmp_path: Path
) -> None:
    bits = {}
    for gamma in (math.inf, 0.25):
        again = read_again(run(cell("passages_512", create_method("score", gamma))), tmp_path)
        (answers,) = again.documents.values()
        (documents,) = library.parts(again.cell.task, source).values()
        texts = [row["text"] for row in documents.eval_docs][:2]
        assert answers.bytes == [len(text.encode()) for text in texts]
        assert all(1900 < size <= 2048 for size in answers.bytes)
        assert len(answers.batches) == len(answers.correct) == again.n == 2
        assert again.value == again.content["results"]["passages_512"]["bits_per_byte,none"]
        assert again.load.tokens == sum(len(lm.tok_encode(text)) for text in texts)
        bits[gamma] = answers
    content = copy.deepcopy(again.content)
    content["capmoe"]["documents"]["passages_512"]["correct"][0] *= 1.001
    with pytest.raises(ValueError, match=r"value is .*, and its documents have"):
        Record.of(content, again.path)
    first, second = bits.values()
    paired = pair([answered({"t": first})], [answered({"t": second})])
    assert isinstance(paired, Paired)
    texts = zip(first.correct, second.correct, first.bytes, strict=True)
    lost = sum((a - b) * size for a, b, size in texts)
    assert paired.differences.mean() == pytest.approx(lost / sum(first.bytes), rel=1e-9)


# Each leaves something behind that the next could take over: shots, seeds, batches, a batch size.
CELLS = [
    cell("arc_c"),
    cell("arc_c", fewshot=3),
    cell("arc_c", fewshot=3, eval_seed=7),
    cell("gsm8k", fewshot=1),
    cell("gsm8k", fewshot=None, limit=1),  # five shots are the task's own
    cell("obqa", BASELINE, fewshot=None),
    cell("obqa", shuffle=1),
    cell("obqa"),
    cell("obqa", create_method("random", 1.0, seed=3), batch_size=2),
    cell("zero_shot_mix", fewshot=2, limit=1),
    cell("zero_shot_mix", fewshot=None, limit=1),
]
SHOTS = [25, 3, 3, 1, 5, 0, 0, 0, 0, 2, 0]


def test_records_are_those_of_cells_computed_alone_in_any_order(
    run: Any, source: DataSource
) -> None:
    records = []
    for asked in CELLS:  # where nothing ran before it
        lm = load_lm(TINY, "cpu", 1)
        record = evaluate(CellPlan(asked, source, Path("x")), lm, TaskLibrary())
        records.append(undated(record.content))
    for number in random.Random(0).sample(range(len(CELLS)), len(CELLS)):
        assert undated(run(CELLS[number]).content) == records[number], str(CELLS[number])
    # Shots and their seed are the cell's, and else the task's own.
    shots = [{n for n in r["n-shot"].values() if not isinstance(n, dict)} for r in records]
    assert shots == [{n} for n in SHOTS]
    assert {name: (task(name).fewshot, task(name).metric) for name in TABLE_5} == TABLE_5
    # The same cell but for ``eval_seed``: other examples, and so other routing.
    parts = [record["capmoe"] for record in records[1:3]]
    assert parts[0]["layers"] != parts[1]["layers"]
    assert [part["provenance"]["seeds"]["eval"] for part in parts] == [1234, 7]


TEMPLATE = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}"


def test_a_chat_has_the_instruction_and_its_examples_as_turns(
    lm: CapmoeLM, library: TaskLibrary, source: DataSource, tmp_path: Path
) -> None:
    """The prompts are those that lm-eval makes of its own options of the same names."""
    chat = {"apply_chat_template": True, "system_instruction": "Be brief."}
    asked = cell("gsm8k", fewshot=2, **chat)
    plan = CellPlan(asked, source, tmp_path)
    with pytest.raises(UsageError, match="the tokenizer of tiny_olmoe has no chat template"):
        evaluate(plan, lm, library)
    lm.tokenizer.chat_template = TEMPLATE
    try:
        kept = tmp_path / "kept.jsonl"
        record = evaluate(plan, lm, library, samples=kept)
        prompts = [json.loads(line)["arguments"] for line in kept.read_text("utf-8").splitlines()]
        parts = library.parts(asked.task, source)
        of_plan = requests(parts, asked, 2, lm.apply_chat_template)
        prepare(parts, asked)
        lm_eval_evaluate(
            lm,
            {"tasks": parts, "groups": {}, "group_map": {}},
            limit=2,
            fewshot_as_multiturn=True,
            **chat,
        )
    finally:
        lm.tokenizer.chat_template = None  # the tokenizer is kept for other models
    expected = [request.args[0] for task in parts.values() for request in task.instances]
    assert [request.args[0] for request in of_plan] == expected
    assert {request[0][0] for request in prompts} == set(expected)
    assert all(
        re.fullmatch("<system>Be brief.(<user>[^<]*<assistant>[^<]*){2}<user>[^<]*", text)
        for text in expected
    )
    assert read_again(record, tmp_path).cell == asked
    parts_of_chat = [cell("gsm8k", fewshot=2, **{key: value}) for key, value in chat.items()]
    cells = (asked, *parts_of_chat, cell("gsm8k", fewshot=2))
    assert len({each.digest for each in cells}) == 4


@pytest.fixture(scope="module")
def real(real_hub: Path, real_tokenizer: Path) -> tuple[CapmoeLM, HFLM, DataSource]:
    """A tiny OLMoE with OLMoE's tokenizer, as ours and as lm-eval's."""
    model = dataclasses.replace(TINY, tokenizer=str(real_tokenizer), max_length=3072)
    ours = load_lm(model, "cpu", 4)
    stock = HFLM(ours.model, tokenizer=ours.tokenizer, batch_size=4, max_length=3072)
    return ours, stock, data_source(str(real_hub))


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("name", nightly_but(("obqa", "gsm8k"), TABLE_5))
def test_real_documents(
    name: str, real: tuple[CapmoeLM, HFLM, DataSource], library: TaskLibrary
) -> None:
    """All ten tasks run on real data; the baseline answers exactly as lm-eval's own model does."""
    ours, stock, source = real
    limit = 1 if name in ("mmlu", "longicl_1") else 2
    asked = cell(name, BASELINE, limit=limit, data=source.name)
    baseline = evaluate(CellPlan(asked, source, Path("unused")), ours, library)
    tasks = library.get(asked.task.lm_eval, source, asked.task.dataset)
    prepare(tasks["tasks"], asked)
    expected = lm_eval_evaluate(stock, tasks, limit=limit, bootstrap_iters=0)
    key = f"{asked.task.metric},{asked.task.filter}"
    assert baseline.value == expected["results"][asked.task.lm_eval][key]
    under = dataclasses.replace(asked, method=create_method("score", 1.0, ep_size=2))
    dropped = evaluate(CellPlan(under, source, Path("unused")), ours, library)
    assert dropped.load.drop_rate > 0.01
    assert dropped.n == baseline.n == (57 if name == "mmlu" else limit)
    assert all(invariant.passed for _, invariant, _ in dropped.proofs.recorded())


def test_a_mixture_pools_the_requests_of_its_tasks(run: Any) -> None:
    method = create_method("score", 0.5)
    record = run(cell("zero_shot_mix", method, batch_size=8, shuffle=0))
    assert set(record.documents) == {"openbookqa", "piqa", "rte", "boolq"}
    correct = [part.correct for part in record.documents.values()]
    assert record.value == pytest.approx(sum(map(sum, correct)) / 8)
    assert record.load.forwards < 2 * len(correct)
    batches = [set(part.batches or []) for part in record.documents.values()]
    assert set().union(*batches) == set(range(record.load.forwards))
    assert any(part & other for part in batches for other in batches if part is not other)
    assert (record.provenance.data_fingerprint or "").count("+") == 3
