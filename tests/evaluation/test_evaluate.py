"""Cells on synthetic and on real documents."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jinja2 import Environment
from lm_eval import utils
from lm_eval.evaluator import evaluate as lm_eval_evaluate
from lm_eval.models.huggingface import HFLM

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.evaluate import _serializable, evaluate, prepare
from capmoe_eval.evaluation.lm import CapmoeLM
from capmoe_eval.evaluation.loading import load_lm
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.experiment.configuration import Placement, load_option, options
from capmoe_eval.experiment.datasource import DataSource, data_source
from capmoe_eval.experiment.record import Record, read_record
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method

SINGLE_TASKS = [name for name in options("tasks") if name in load_option("tasks", name)]
TEN = [
    name
    for name in SINGLE_TASKS
    if name not in ("zero_shot_mix", "banking77_intent", "humaneval", "nq_open", "mts_dialog")
    and not load_option("tasks", name)[name].images
    and (not name.startswith("longicl") or name == "longicl_1")
]
TINY = ModelId("tiny_olmoe", "tiny:olmoe", dtype="float32")


def task(name: str) -> TaskId:
    spec = load_option("tasks", name)[name]
    return TaskId(name, spec.lm_eval, spec.dataset, spec.metric, spec.fewshot, spec.filter)


@pytest.fixture(scope="module")
def lm() -> CapmoeLM:
    return load_lm(TINY, Placement("cpu"), 4)


@pytest.fixture(scope="module")
def library() -> TaskLibrary:
    return TaskLibrary()


def run(
    lm: CapmoeLM,
    library: TaskLibrary,
    source: DataSource,
    name: str,
    method: Method,
    **cell: object,
) -> Record:
    values: dict[str, object] = {"batch_size": 4, "limit": 2, "data": source.name} | cell
    planned = Cell(TINY, method, task(name), **values)  # type: ignore[arg-type]
    return evaluate(planned, lm, library, source, root=Path("unused"))


def test_table_5_shots_and_metrics() -> None:
    """Table 5 of the paper; OBQA … HellaSwag normalised, GSM8K flexible as released."""
    assert {name: (task(name).fewshot, task(name).metric) for name in TEN} == {
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


@pytest.mark.parametrize("name", ["obqa", "gsm8k"])
def test_a_record_is_whole_and_can_be_read_again(
    name: str, lm: CapmoeLM, library: TaskLibrary, hub: Path, tmp_path: Path
) -> None:
    source = DataSource("synthetic", hub)
    record = run(lm, library, source, name, create_method("score", 1.0, ep_size=2))
    record = Record(record.content, record.cell.path(tmp_path))
    record.write()
    again = read_record(record.path)
    assert again.content == record.content
    assert again.cell == record.cell
    assert all(promise.passed for _, promise, _ in again.proofs.given())
    assert again.load.drop_rate > 0
    (documents,) = again.subtasks.values()
    assert documents.batches is not None and len(documents.batches) == 2
    assert 0 in documents.batches
    assert max(documents.batches) < again.load.forwards - again.load.decode_forwards
    assert again.n == 2 and len(again.documents[task(name).lm_eval][1]) == 2
    assert again.provenance.data_fingerprint == source.fingerprint(task(name).dataset)
    assert again.content["results"][task(name).lm_eval]  # lm-eval's own result is there, too
    assert "samples" not in again.content
    text = json.dumps(again.content)
    assert str(hub) not in text and "site-packages" not in text, "a path of this machine"
    assert again.content["configs"][task(name).lm_eval]["dataset_path"] == task(name).dataset


def test_a_bound_on_activated_experts_is_proven_in_the_record(
    lm: CapmoeLM, library: TaskLibrary, hub: Path, tmp_path: Path
) -> None:
    method = create_method("xshare", expert_budget=0.25, decode="only")
    source = DataSource("synthetic", hub)
    record = run(lm, library, source, "gsm8k", method)
    record = Record(record.content, record.cell.path(tmp_path))
    record.write()
    again = read_record(record.path)
    assert again.cell.method == method and again.gamma is None
    assert not again.proofs.broken
    assert again.proofs.bound_holds.passed and again.proofs.pairs_as_defined.passed
    assert again.proofs.best_kept is not None
    load, steps = again.load, again.load.decode
    assert load.activated_before is not None and load.activated_after is not None
    assert load.activated_after < load.activated_before
    assert load.dropped > 0 and load.forwards > load.decode_forwards
    # The forwards under the method are the decode steps.
    assert steps is not None and steps.activated_after == load.activated_after
    assert all(layer.forwards == load.decode_forwards for layer in again.layers)
    assert load.activated_after <= 0.25 * again.layers[0].n_experts
    with pytest.raises(UsageError, match="decode=only: obqa generates nothing"):
        run(lm, library, source, "obqa", method)


def test_a_score_does_not_depend_on_what_ran_before(
    lm: CapmoeLM, library: TaskLibrary, hub: Path
) -> None:
    source = DataSource("synthetic", hub)
    method = create_method("random", 1.0, seed=1)
    first = run(lm, library, source, "winogrande", method)
    for name in ("gsm8k", "mmlu", "winogrande"):
        run(lm, library, source, name, create_method("score", 0.5), limit=1)
    again = run(lm, library, source, "winogrande", method)
    fresh = run(load_lm(TINY, Placement("cpu"), 4), TaskLibrary(), source, "winogrande", method)
    for other in (again, fresh):
        assert other.subtasks == first.subtasks
        assert other.layers == first.layers


def cell(name: str, method: Method, fewshot: int | None = None, **changes: object) -> Cell:
    values: dict[str, object] = {"batch_size": 4, "limit": 2, "data": "synthetic"} | changes
    asked = dataclasses.replace(task(name), fewshot=fewshot)
    return Cell(TINY, method, asked, **values)  # type: ignore[arg-type]


SCORE = create_method("score", 1.0)
# Each leaves something behind that the next could take over: shots, seeds, batches, a batch size.
CELLS = [
    cell("arc_c", SCORE),
    cell("arc_c", SCORE, fewshot=3),
    cell("arc_c", SCORE, fewshot=3, eval_seed=7),
    cell("gsm8k", SCORE, fewshot=1),
    cell("gsm8k", SCORE, limit=1),  # five shots are the task's own
    cell("obqa", create_method("baseline"), batch_size="auto"),
    cell("obqa", SCORE, shuffle=1),
    cell("obqa", SCORE),
    cell("obqa", create_method("random", 1.0, seed=3), batch_size=2),
    cell("zero_shot_mix", SCORE, fewshot=2, limit=1),
    cell("zero_shot_mix", SCORE, limit=1),
]


def content(record: Record) -> dict[str, Any]:
    """What a record says, but for when and how fast."""
    plain: dict[str, Any] = json.loads(json.dumps(record.content))
    for field in ("date", "seconds"):
        del plain["capmoe"]["provenance"][field]
    return plain


@pytest.fixture(scope="module")
def alone(hub: Path) -> dict[str, dict[str, Any]]:
    """Each cell's record where nothing ran before it."""
    source = DataSource("synthetic", hub)
    return {
        one.digest: content(
            evaluate(one, load_lm(TINY, Placement("cpu"), 1), TaskLibrary(), source, root=Path("x"))
        )
        for one in CELLS
    }


@pytest.mark.parametrize(
    "order",
    [CELLS, CELLS[::-1], random.Random(0).sample(CELLS, len(CELLS))],
    ids=["forwards", "backwards", "shuffled"],
)
def test_records_are_those_of_cells_computed_alone_in_any_order(
    order: list[Cell],
    lm: CapmoeLM,
    library: TaskLibrary,
    hub: Path,
    alone: dict[str, dict[str, Any]],
) -> None:
    source = DataSource("synthetic", hub)
    for one in order:
        record = evaluate(one, lm, library, source, root=Path("x"))
        assert content(record) == alone[one.digest], str(one)


def test_shots_that_a_cell_leaves_unset_are_the_tasks_own(
    alone: dict[str, dict[str, Any]],
) -> None:
    shots = [
        {n for n in alone[c.digest]["n-shot"].values() if not isinstance(n, dict)} for c in CELLS
    ]
    assert shots == [{0}, {3}, {3}, {1}, {5}, {0}, {0}, {0}, {0}, {2}, {0}]


def test_the_seed_of_an_evaluation_draws_its_shots(alone: dict[str, dict[str, Any]]) -> None:
    """The same cell but for ``eval_seed``: other examples, and so other routing."""
    one, other = (alone[c.digest] for c in CELLS[1:3])
    assert one["capmoe"]["layers"] != other["capmoe"]["layers"]
    assert [r["capmoe"]["provenance"]["seeds"]["eval"] for r in (one, other)] == [1234, 7]


def test_the_standard_error_is_lm_evals(lm: CapmoeLM, library: TaskLibrary, hub: Path) -> None:
    record = run(lm, library, DataSource("synthetic", hub), "obqa", SCORE, limit=4)
    n, p = 4, record.value
    assert record.stderr == record.content["results"]["openbookqa"]["acc_norm_stderr,none"]
    assert record.stderr == pytest.approx((p * (1 - p) / (n - 1)) ** 0.5)
    assert 0 < p < 1, "a value whose standard error is not 0"


def test_functions_of_a_task_are_recorded_by_name(
    lm: CapmoeLM, library: TaskLibrary, hub: Path
) -> None:
    record = run(lm, library, DataSource("synthetic", hub), "winogrande", create_method("baseline"))
    config = record.content["configs"]["winogrande"]
    assert config["doc_to_text"] == "lm_eval.tasks.winogrande.preprocess_winogrande.doc_to_text"
    assert " at 0x" not in json.dumps(record.content)
    assert _serializable(functools.partial(task, "obqa")) == "tests.evaluation.test_evaluate.task"


def test_value_is_the_mean_over_the_documents(
    lm: CapmoeLM, library: TaskLibrary, hub: Path
) -> None:
    record = run(lm, library, DataSource("synthetic", hub), "mmlu", create_method("baseline"))
    assert len(record.documents) == 57
    correct = [score for part in record.subtasks.values() for score in part.correct]
    assert record.n == len(correct) == 57 * 2
    assert record.value == pytest.approx(sum(correct) / len(correct))


def test_two_roots_with_the_same_layout_are_not_confused(
    lm: CapmoeLM, library: TaskLibrary, hub: Path, tmp_path: Path
) -> None:
    """datasets keys its cache by names alone and would give one root's rows for the other's."""
    sources = []
    for name in ("one", "two"):
        dataset = tmp_path / name / "baber/piqa"
        shutil.copytree(hub / "baber/piqa", dataset)
        (file,) = dataset.glob("default/validation*.parquet")
        rows = pq.read_table(file).to_pylist()
        for row in rows:
            row["goal"] = f"{name}: {row['goal']}"
        pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(file)), file)
        sources.append(data_source(str(tmp_path / name)))
    goals = [library.get("piqa", s)["tasks"]["piqa"].eval_docs[0]["goal"][:5] for s in sources]
    assert goals == ["one: ", "two: "]
    assert sources[0].fingerprint("baber/piqa") != sources[1].fingerprint("baber/piqa")


def test_a_dataset_that_is_not_in_the_root_gives_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no dataset 'openai/gsm8k'") as error:
        TaskLibrary().get("gsm8k", data_source(str(tmp_path)))
    assert "\n" not in str(error.value)


def test_an_unreachable_hub_gives_one_line(library: TaskLibrary) -> None:
    with pytest.raises(UsageError, match=r"task=piqa: .*set data\.root=DIR") as error:
        library.get("piqa", DataSource("hub"))
    assert "\n" not in str(error.value)


def test_an_unknown_metric_or_task_is_refused_by_name(
    lm: CapmoeLM, library: TaskLibrary, hub: Path
) -> None:
    source = DataSource("synthetic", hub)
    with pytest.raises(UsageError, match="did you mean 'openbookqa'"):
        library.get("openbokqa", source)
    wrong = TaskId("obqa", "openbookqa", "allenai/openbookqa", "acc_nrm", 0)
    cell = Cell(TINY, create_method("baseline"), wrong, 4, 1, "synthetic")
    with pytest.raises(UsageError, match="did you mean 'acc_norm,none'"):
        evaluate(cell, lm, library, source, root=Path("unused"))


@pytest.fixture(scope="module")
def real(real_hub: Path, real_tokenizer: Path) -> tuple[CapmoeLM, HFLM, DataSource]:
    """A tiny OLMoE with OLMoE's tokenizer, as ours and as lm-eval's."""
    model = ModelId(
        "tiny_olmoe", "tiny:olmoe", dtype="float32", tokenizer=str(real_tokenizer), max_length=3072
    )
    ours = load_lm(model, Placement("cpu"), 4)
    stock = HFLM(ours.model, tokenizer=ours.tokenizer, batch_size=4, max_length=3072)
    return ours, stock, data_source(str(real_hub))


@pytest.mark.real_data
@pytest.mark.parametrize("name", TEN)
def test_real_documents(
    name: str, real: tuple[CapmoeLM, HFLM, DataSource], library: TaskLibrary
) -> None:
    """All ten tasks run on real data; the baseline answers exactly as lm-eval's own model does."""
    ours, stock, source = real
    limit = 1 if name in ("mmlu", "longicl_1") else 2
    baseline = run(ours, library, source, name, create_method("baseline"), limit=limit)
    cell = baseline.cell
    tasks = library.get(cell.task.lm_eval, source, cell.task.dataset)
    prepare(tasks, cell)
    expected = lm_eval_evaluate(stock, tasks, limit=limit, bootstrap_iters=0)
    key = f"{cell.task.metric},{cell.task.filter}"
    assert baseline.value == expected["results"][cell.task.lm_eval][key]
    dropped = run(ours, library, source, name, create_method("score", 1.0, ep_size=2), limit=limit)
    assert dropped.load.drop_rate > 0.01
    assert dropped.n == baseline.n == (57 if name == "mmlu" else limit)
    assert all(promise.passed for _, promise, _ in dropped.proofs.given())


@pytest.mark.real_data
@pytest.mark.parametrize("name", ["piqa", "mmlu", "arc_c"])
def test_real_log_likelihoods_are_those_of_lm_eval(
    name: str, real: tuple[CapmoeLM, HFLM, DataSource], library: TaskLibrary
) -> None:
    ours, stock, source = real
    cell = Cell(TINY, create_method("baseline"), task(name), 4)
    tasks = library.get(cell.task.lm_eval, source, cell.task.dataset)
    prepare(tasks, cell)
    built = next(iter(tasks["tasks"].values()))
    built.build_all_requests(limit=4)
    ours.route(cell.method)
    ours.batch_size_per_gpu = 4
    try:
        assert ours.loglikelihood(built.instances) == stock.loglikelihood(
            built.instances, disable_tqdm=True
        )
    finally:
        ours.release()


def test_a_template_is_compiled_once_and_says_the_same(library: TaskLibrary, hub: Path) -> None:
    library.get("arc_challenge", DataSource("synthetic", hub))
    kept = utils.env.from_string
    before = kept.cache_info().misses
    docs = [{"a": n} for n in range(5)]
    said = [utils.apply_template("{{a}} and {{a + 1}}", doc) for doc in docs]
    assert said == ["0 and 1", "1 and 2", "2 and 3", "3 and 4", "4 and 5"]
    assert kept.cache_info().misses == before + 1
    plain = Environment.from_string(utils.env, "{{a}} and {{a + 1}}")
    assert said == [plain.render(**doc) for doc in docs]


def test_a_mixture_pools_the_requests_of_its_tasks(
    lm: CapmoeLM, library: TaskLibrary, hub: Path
) -> None:
    source = DataSource("synthetic", hub)
    method = create_method("score", 0.5)
    record = run(lm, library, source, "zero_shot_mix", method, batch_size=8, shuffle=0)
    assert set(record.documents) == {"openbookqa", "piqa", "rte", "boolq"}
    correct = [part.correct for part in record.subtasks.values()]
    assert record.value == pytest.approx(sum(map(sum, correct)) / 8)
    singly = [run(lm, library, source, name, method, batch_size=8) for name in ("obqa", "rte")]
    assert record.load.forwards < 2 * len(correct)
    batches = [part.batches or [] for part in record.subtasks.values()]
    assert {number for part in batches for number in part} == set(range(record.load.forwards))
    assert any(set(part) & set(other) for part in batches for other in batches if part is not other)
    assert record.cell.shuffle == 0 and record.cell.digest != singly[0].cell.digest
    assert (record.provenance.data_fingerprint or "").count("+") == 3
