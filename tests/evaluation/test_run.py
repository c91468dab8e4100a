"""Runs of cells: the finished is skipped, the failed reported, and what cannot go on is stopped.

Several processes on one directory compute every cell once. There, one name stands for one set of
weights, and one for one set of documents. A forecast writes no record.
"""

import dataclasses
import errno
import gc
import json
import os
import re
import shutil
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import save_file

from capmoe_eval.errors import UnwritableError, UsageError
from capmoe_eval.evaluation import evaluate as evaluation
from capmoe_eval.evaluation import loading
from capmoe_eval.evaluation import run as run_module
from capmoe_eval.evaluation.forecast import forecast, recorded_seconds
from capmoe_eval.evaluation.loading import load_lm, weightless
from capmoe_eval.evaluation.provenance import checkpoint_hash
from capmoe_eval.evaluation.run import check_inputs, run, take_turns, with_documents
from capmoe_eval.evaluation.run_command import execute
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import ModelId
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.datasource import DataSource, data_source
from capmoe_eval.experiment.files import write_text
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.reservations import Reservation, holder_of, reserve
from capmoe_eval.experiment.results import record_paths
from capmoe_eval.routing.registry import create_method
from capmoe_eval.zoo.tiny import tiny_model, tiny_tokenizer
from tests import records


def plan(root: Path, method: str, model: str = "tiny_olmoe") -> CellPlan:
    words = (f"model={model}", f"method={method}", "gamma=1.0", "ep_size=1", "tasks=obqa")
    more = ("limit=2", "batch_size=4", "device=cpu", f"results_dir={root}")
    (each,) = records.planned(*words, *more)
    return each


def grid(root: Path) -> list[CellPlan]:
    return [plan(root, name) for name in ("baseline", "order", "score")]


@pytest.fixture
def wrap(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have something called before ``load_lm`` or ``evaluate``, and with what it returned."""

    def replace(module: Any, name: str, before: Any, after: Any = lambda _: None) -> None:
        plain = getattr(module, name)

        def call(first: Any, *args: object, **kwargs: object) -> object:
            before(first)
            value = plain(first, *args, **kwargs)
            after(value)
            return value

        monkeypatch.setattr(module, name, call)

    return replace


def fail_with(error: Exception, matches: Callable[[Any], bool] = lambda _: True) -> Any:
    def before(cell: Any) -> None:
        if matches(cell):
            raise type(error)(*error.args)  # anew: it would keep the frames that it passed

    return before


def test_failures_stop_no_other_cell_and_keep_no_model(
    tmp_path: Path, wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is loaded once, also if that fails, and is gone before the next."""
    loaded: list[weakref.ref[object]] = []
    tried: list[str] = []

    def alone(model: ModelId) -> None:
        assert [alive() for alive in loaded] == [None] * len(loaded), "in memory twice"
        tried.append(model.name)
        if model.name == "tiny_qwen3_moe":
            raise RuntimeError("no memory")

    def is_bad(plan: CellPlan) -> bool:
        return (plan.cell.model.name, plan.cell.method.name) == ("tiny_mixtral", "baseline")

    wrap(loading, "load_lm", alone, lambda lm: loaded.append(weakref.ref(lm.model)))
    # An error holds the frames that it passed.
    wrap(evaluation, "evaluate", fail_with(RuntimeError("boom\nsecond line"), is_bad))
    families = ("tiny_olmoe", "tiny_mixtral", "tiny_qwen3_moe")
    plans = [plan(tmp_path, name, of) for name in ("baseline", "score") for of in families]
    gc.disable()  # what frees the model is no chance
    try:
        summary = run(plans)
    finally:
        gc.enable()
    assert tried == list(families)
    assert (summary.computed, len(summary.records)) == (3, 3)
    reasons = dict(summary.failures)
    boom = reasons.pop("tiny_mixtral obqa baseline")
    assert re.fullmatch(r"RuntimeError: boom second line \(test_run\.py, line \d+\)", boom)
    assert [reason.partition(" (")[0] for reason in reasons.values()] == [
        "RuntimeError: no memory"
    ] * 2
    monkeypatch.undo()
    # The same command computes what is missing, and keeps the finished as it is.
    assert run(plans).computed == 3
    summary.records[1].path.unlink()
    before = {path: path.stat().st_mtime_ns for path in record_paths(tmp_path)}
    again = run(plans)
    assert (again.computed, len(again.records), again.failures) == (1, 6, [])
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert run([dataclasses.replace(plans[0], overwrite=True)]).computed == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_same_command_computes_failed_cells_alone_unless_it_overwrites(
    tmp_path: Path, wrap: Any, capsys: pytest.CaptureFixture[str], overwrite: bool
) -> None:
    wrap(loading, "load_lm", fail_with(RuntimeError("boom")))
    cell = dataclasses.replace(plan(tmp_path, "score"), overwrite=overwrite)
    assert execute([cell]) == 1
    lines = capsys.readouterr().err
    assert "CAPMOE_DEBUG=1 stops at the first failure" in lines
    assert ("The same command computes the failed cells again" in lines) != overwrite


class UncompletedJobError(RuntimeError):
    """Submitit raises it from a signal's handler; the next cell would run into the limit."""


UncompletedJobError.__module__ = "submitit.core.utils"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (UncompletedJobError("Job not requeued"), UncompletedJobError),
        *(
            (OSError(number, os.strerror(number)), UnwritableError)
            for number in (errno.ENOSPC, errno.EIO)
        ),
    ],
)
def test_the_end_of_a_job_or_of_the_disk_is_no_failed_cell(
    error: Exception, raised: type[Exception], tmp_path: Path, wrap: Any
) -> None:
    evaluated: list[CellPlan] = []
    wrap(evaluation, "evaluate", lambda plan: (evaluated.append(plan), fail_with(error)(plan)))
    with pytest.raises(raised):
        run(grid(tmp_path))
    assert len(evaluated) == 1


def test_a_damaged_record_is_named_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = grid(tmp_path)
    records.record(plans[2].cell, tmp_path).write()
    path = plans[2].path
    path.write_bytes(path.read_bytes()[:-500])
    monkeypatch.setattr(loading, "load_lm", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(UsageError, match=f"^{path}: not a whole record.*; move it away"):
        run(plans)
    assert path.stat().st_size > 0


def test_samples_are_kept_beside_the_record(tmp_path: Path) -> None:
    words = ("model=tiny_olmoe", "tasks=obqa", "limit=2", "log_samples=true")
    (plan,) = records.planned(*words, f"results_dir={tmp_path}")
    (record,) = run([plan]).records
    assert plan.samples is not None
    lines = [json.loads(line) for line in plan.samples.read_text("utf-8").splitlines()]
    (documents,) = record.documents.values()
    assert [line["acc_norm"] for line in lines] == documents.correct
    assert [line["doc_id"] for line in lines] == [0, 1]
    assert lines[0].keys() >= {"task", "doc", "target", "arguments", "resps", "filtered_resps"}
    assert record_paths(tmp_path) == [plan.path], "no reader takes them for a record"
    run([plan])
    plan.samples.unlink()
    missing = records.planned(*words[:1], "tasks=piqa", *words[2:], f"results_dir={tmp_path}")
    line = r"^log_samples=true: .* obqa .* is finished without this file; .*tasks= of the others"
    for plans in ([plan], [plan, *missing]):
        with pytest.raises(UsageError, match=line):
            run(plans)


# Several processes.


def queued(root: Path, models: str = "ab", *, overwrite: bool = False) -> list[CellPlan]:
    source = data_source("miniworld")
    methods = [create_method("random", 1.0, seed=seed) for seed in range(3)]
    return [
        CellPlan(records.cell(method, model), source, root, overwrite=overwrite)
        for method in methods
        for model in models
    ]


def name(plan: CellPlan) -> str:
    return f"{plan.cell.model.name}{plan.cell.method.setting('seed')}"


def drain(turns: Iterable[tuple[CellPlan, bool]]) -> list[str]:
    """Compute all; finished cells are in brackets."""
    names = []
    for plan, is_finished in turns:
        if not is_finished:
            assert reserve(plan.path) is None, "it is reserved"
            write_text(plan.path, "ours")
        names.append(f"({name(plan)})" if is_finished else name(plan))
    return names


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "POLL", 0.0)


def take(plan: CellPlan) -> Callable[[str | None], None]:
    """Reserve a cell as another process; return what writes its record, if any, and frees it."""
    reservation, held = reserve(plan.path), ExitStack()
    assert reservation is not None
    held.enter_context(reservation)

    def end(text: str | None) -> None:
        if text is not None:
            write_text(plan.path, text)
        held.close()

    return end


@pytest.mark.parametrize("text", [None, "theirs"])
def test_a_cell_that_another_computes_is_waited_for(tmp_path: Path, text: str | None) -> None:
    """It is computed if the other one failed to."""
    plans, waited = queued(tmp_path, "a"), []
    end, holder = take(plans[1]), holder_of(plans[1].path)

    def waiting(cells: Counter[str]) -> None:
        waited.append(dict(cells))
        if len(waited) == 3:
            end(text)

    assert drain(take_turns(plans, waiting)) == ["a0", "a2", "(a1)" if text else "a1"]
    assert waited == [{holder: 1}] * 3
    assert plans[1].path.read_text() == (text or "ours")


def test_a_record_that_appeared_before_the_reservation_is_not_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the record and the reservation another wrote it and released it."""

    def late(record: Path) -> Reservation | None:
        write_text(record, "theirs")
        return reserve(record)

    monkeypatch.setattr(run_module, "reserve", late)
    assert drain(take_turns(queued(tmp_path, "a"))) == ["(a0)", "(a1)", "(a2)"]
    assert not list(tmp_path.rglob(".*"))


def test_processes_spread_over_the_models(tmp_path: Path) -> None:
    plans = queued(tmp_path, "abc")
    ends = [take(plans[0])]
    with closing(take_turns(plans)) as turns:
        assert name(next(turns)[0]) == "b0"
        ends.append(take(plans[2]))
        assert name(next(turns)[0]) == "b1", "a loaded model stays"
    with closing(take_turns(plans)) as turns:
        assert name(next(turns)[0]) == "b0", "fewest of b are being computed: none"
    for end in ends:
        end(None)


def test_overwriting_computes_each_once(tmp_path: Path) -> None:
    plans = queued(tmp_path, "a", overwrite=True)
    for plan in plans:
        write_text(plan.path, "old")
    end = take(plans[1])
    computed = drain(take_turns(plans, lambda _: end("theirs")))
    assert computed == ["a0", "a2", "(a1)"], "the other's is as new as ours would be"
    assert [plan.path.read_text() for plan in plans] == ["ours", "theirs", "ours"]
    assert drain(take_turns(plans)) == ["a0", "a1", "a2"], "a later command computes all again"


# Inputs.


INPUTS = {"weights": "a", "tokenizer": "b", "attention": "sdpa", "fingerprint": "d"}
NEW = "new"


def computed(root: Path, method: str, new: str = "", **fields: Any) -> Record:
    """The record of a method's cell, which is not written, computed with a new input or none."""
    inputs = INPUTS | ({new: NEW} if new else {})
    origin = {"data_fingerprint": inputs.pop("fingerprint"), "model": inputs}
    return records.record(
        records.cell(create_method(method, 1.0), **fields), root, provenance=origin
    )


def check(record: Record, root: Path) -> None:
    check_inputs(root, record.cell, record.capmoe["provenance"])


@pytest.mark.parametrize("field", INPUTS)
def test_another_input_under_the_same_name_is_refused(field: str, tmp_path: Path) -> None:
    """Tables mix one's own results with the shipped ones."""
    shipped, mine = tmp_path / "zoo", tmp_path / "local-zoo"
    first = computed(shipped, "baseline")
    first.write()
    for root in (shipped, mine):
        check(computed(root, "score"), root)
        with pytest.raises(UsageError, match=rf"^{shipped}: .*other {field}") as line:
            check(computed(root, "score", field), root)
        key = "data.name" if field == "fingerprint" else "model.name"
        for part in (str(first.path), f"now {NEW}", "another results_dir", key, "delete the old"):
            assert part in str(line.value)
        assert "\n" not in str(line.value)
    again, back = computed(shipped, "baseline", field), computed(shipped, "order")
    check(again, shipped)  # it takes the place of the only record
    again.write()
    with pytest.raises(UsageError, match=f"other {field}"):
        check(back, shipped)
    again.path.unlink()
    check(back, shipped)


def test_backends_have_kernels_of_their_own_and_the_same_weights(tmp_path: Path) -> None:
    computed(tmp_path, "baseline").write()
    engine = {"backend": "vllm", "max_num_batched_tokens": 64}
    check(computed(tmp_path, "score", "attention", **engine), tmp_path)
    with pytest.raises(UsageError, match="has other weights than its results here"):
        check(computed(tmp_path, "score", "weights", **engine), tmp_path)


@pytest.mark.parametrize("field", INPUTS)
def test_a_name_is_of_one_checkpoint_wherever_it_lies(field: str, tmp_path: Path) -> None:
    """Two checkpoints of one name stood in one row of a table, and in its mean."""
    first = computed(tmp_path, "baseline")
    first.write()
    for dtype, is_same in (("float32", True), ("bfloat16", False)):
        model = ModelId(first.cell.model.name, "/elsewhere", dtype=dtype)
        cell = dataclasses.replace(first.cell, model=model, data=field)
        copy = computed(tmp_path, "score").capmoe["provenance"]
        check_inputs(tmp_path, cell, copy)
        other = computed(tmp_path, "score", field).capmoe["provenance"]
        if field == "weights" and is_same:
            with pytest.raises(UsageError, match="model m has other weights than its results here"):
                check_inputs(tmp_path, cell, other)
        else:
            check_inputs(tmp_path, cell, other)


def test_replaced_weights_are_refused_for_other_cells_too(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_tokenizer().save_pretrained(model)

    def save(seed: int) -> None:
        vocabulary = len(tiny_tokenizer())
        tiny_model("mixtral", vocab_size=vocabulary, seed=seed).save_pretrained(model)

    save(0)
    words = ["model=custom", "model.name=mine", f"model.pretrained={model}", "data.root=miniworld"]
    words += ["limit=2", "batch_size=4", "device=cpu", f"results_dir={tmp_path / 'results'}"]
    (first,) = records.planned(*words, "method=baseline", "tasks=obqa")
    (other,) = records.planned(*words, "method=score", "gamma=1.0", "tasks=piqa")
    run([first])
    save(1)
    for asked in ([first], [first, other]):
        with pytest.raises(UsageError, match="computed from other files of "):
            run(asked)
    again = [dataclasses.replace(each, overwrite=True) for each in (first, other)]
    for asked in ([other], again[1:]):
        with pytest.raises(UsageError, match="model mine has other weights than its results here"):
            run(asked)
    assert not other.path.exists()
    assert run(again).computed == 2
    assert run([first, other]).computed == 0


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json"]
)
def test_changed_files_of_a_checkpoint_are_refused(name: str, tmp_path: Path) -> None:
    """Cells of fewer experts a token stood beside those of the configuration from before."""
    model = tmp_path / "model"
    tiny_tokenizer().save_pretrained(model)
    tiny_model("mixtral", vocab_size=len(tiny_tokenizer())).save_pretrained(model)
    words = ["model=custom", "model.name=mine", f"model.pretrained={model}", "data.root=miniworld"]
    words += ["limit=2", "batch_size=4", "device=cpu", f"results_dir={tmp_path / 'results'}"]
    (first,) = records.planned(*words, "method=baseline", "tasks=obqa")
    (other,) = records.planned(*words, "method=score", "gamma=1.0", "tasks=obqa")
    (record,) = run([first]).records
    text = (model / name).read_text() if (model / name).exists() else "{{ messages }}"
    (model / name).write_text(f"{text}\n")
    for asked, line in ((first, "computed from other files of"), (other, "mine has other files")):
        with pytest.raises(UsageError, match=line):
            run([asked])
    record.content["capmoe"]["provenance"].pop("checkpoint")
    record.write()
    assert run([first, other]).computed == 1, "of a record from before this hash nothing is known"


@pytest.mark.parametrize("tensor", ["router", "embedding"])
def test_each_tensor_of_a_large_checkpoint_takes_part(tensor: str, tmp_path: Path) -> None:
    model = ModelId("mine", str(tmp_path))
    tensors = {"embedding": torch.zeros(5_000_000), "router": torch.zeros(3000)}
    hashes = set()
    for value in (0, 1):
        tensors[tensor].fill_(value)
        save_file(tensors, tmp_path / "model.safetensors")
        hashes.add(checkpoint_hash(model))
        (tmp_path / "training_args.bin").write_bytes(b"another run")
        hashes.add(checkpoint_hash(model))
    assert len(hashes) == 2
    (tmp_path / "model.safetensors").write_bytes(b"damaged" * 5_000_000)
    assert checkpoint_hash(model) not in hashes


def own_task(*words: str) -> CellPlan:
    """A cell of a user's own task in this directory."""
    rows = [{"q": f"a {bird}", "right": 0} for bird in ("robin", "dove", "tit")]
    Path("birds.json").write_text(json.dumps(rows))
    Path("birds.yaml").write_text(
        "{task: birds, dataset_path: json, dataset_kwargs: {data_files: {test: birds.json}}, "
        "test_split: test, output_type: multiple_choice, doc_to_text: q, doc_to_target: right, "
        "doc_to_choice: [bird, plant]}"
    )
    more = (
        "data.root=null",
        "model=tiny_olmoe",
        "batch_size=4",
        "device=cpu",
        "results_dir=of",
        "limit=2",
    )
    (each,) = records.planned("tasks=birds.yaml", *more, *words)
    return each


def test_other_documents_of_a_users_own_task_are_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their scores stood beside those of another method on the documents from before."""
    monkeypatch.chdir(tmp_path)
    first, other = own_task("method=baseline"), own_task("method=score", "gamma=1.0")
    (record,) = run([first]).records
    birds = record.capmoe["documents"]["birds"]
    assert TaskLibrary().documents(first.cell.task, first.source, 2) == birds["documents"]
    birds["documents"] = "0" * 16
    record.write()
    with monkeypatch.context() as patch, pytest.raises(UsageError) as line:
        patch.delattr(loading, "load_lm")
        run([other])
    assert "task birds has other documents than its results here, such as" in str(line.value)
    assert "choose another results_dir or task name" in str(line.value)
    assert (
        run([dataclasses.replace(other, cell=dataclasses.replace(other.cell, limit=3))]).computed
        == 1
    )


def test_the_commit_of_a_hubs_dataset_is_its_fingerprint(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As datasets keeps what it once read from the hub; that one cannot be reached."""
    commit = "0123456789" * 4
    here = datasets.load_dataset(str(hub / "allenai/openbookqa"), "main", cache_dir=tmp_path / "a")
    kept = Path(here["test"].cache_files[0]["filename"]).parent
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "b")
    shutil.copytree(kept, tmp_path / f"b/allenai___openbookqa/main/0.0.0/{commit}")
    (plan,) = records.planned("tasks=obqa")
    assert TaskLibrary().fingerprint(plan.cell.task, DataSource("hub")) == commit


# Forecasts.


def small(*overrides: str) -> list[CellPlan]:
    return records.planned("model=tiny_olmoe", "batch_size=4", "limit=3", *overrides)


@pytest.mark.parametrize("name", ["tiny_olmoe", "zoo_mixtral"])
def test_a_forecast_has_the_documents_and_the_weights_of_what_is_missing(
    name: str, tmp_path: Path
) -> None:
    """Of a limit, every subtask has as many documents; no weights are loaded."""
    words = f"model={name}", "limit=3", "grid.gamma=[1.0,2.0]", f"results_dir={tmp_path}"
    plans = with_documents(records.planned(*words, "tasks=[obqa,zero_shot_mix]"))
    cell, source = plans[0].cell, plans[0].source  # of obqa
    origin = {"data_fingerprint": source.fingerprint(cell.task.dataset)}
    records.record(cell, tmp_path, provenance=origin).write()
    text = forecast(plans)
    rows = {line.split()[1]: line.split() for line in text.splitlines() if line.startswith(name)}
    assert text.startswith("Missing cells: 3 of 4. None was computed now")
    assert rows["obqa"][2:4] == ["1", "3"]
    assert rows["zero_shot_mix"][2:4] == ["2", str(2 * 3 * 4)]
    assert all(weight.is_meta for weight in weightless(cell.model).parameters())
    loaded = load_lm(cell.model, "cpu", 1).model
    size = sum(p.numel() * p.element_size() for p in loaded.parameters()) / 2**30
    assert f"{name}: {size:.2f} GiB of weights" in text
    assert text.splitlines()[-1].startswith("The time is not known; a cell of few documents")


def test_its_times_are_of_like_records_alone(tmp_path: Path) -> None:
    (plan,) = small("tasks=obqa", "gamma=1.0", f"results_dir={tmp_path}")
    (record,) = run([plan]).records
    assert recorded_seconds(plan) == [record.provenance.seconds / 3]
    for change in (
        {"batch_size": 2},
        {"model": dataclasses.replace(plan.cell.model, dtype="bfloat16")},
    ):
        other = dataclasses.replace(plan, cell=dataclasses.replace(plan.cell, **change))
        assert recorded_seconds(other) == []
    assert recorded_seconds(dataclasses.replace(plan, threads=7)) == []
    plan.path.with_name("damaged.json").write_text("{")  # another cell's, which no run reads
    assert len(recorded_seconds(plan)) == 1
    text = forecast(small("tasks=[obqa,piqa]", "gamma=2.0", f"results_dir={tmp_path}"))
    assert ["tiny_olmoe", "obqa", "1", "3"] in [line.split()[:4] for line in text.splitlines()]
    assert "for 1 of 2 rows; a cell of few documents (limit=N)" in text


def test_it_refuses_what_a_run_would_refuse(tmp_path: Path) -> None:
    """Of several cells the others are planned; a model of the hub may be elsewhere."""
    words = "gamma=1.0", "method=score", f"results_dir={tmp_path}"
    for bad, line in (
        (("tasks=obqa", "ep_size=3"), "ep_size=3: 32 experts cannot be spread evenly"),
        (("tasks=obqa", "layer_gammas=[1.0,1.0]"), "layer_gammas: 2 capacity factors for 3 MoE"),
        (("tasks=humaneval",), "allow it with allow_code_execution=true"),
        (("tasks=obqa", "tasks.obqa.fewshot=5000"), "fewshot=5000: openbookqa has 64 examples"),
        (("tasks=obqa", "decode=only"), "decode=only: obqa generates nothing"),
    ):
        for refuses in (run, forecast):
            with pytest.raises(UsageError, match=line):
                refuses(small(*words, *bad))
    text = forecast(small("tasks=obqa", "grid.ep_size=[2,3]", *words))
    assert text.startswith("Missing cells: 2 of 2.")
    assert ["tiny_olmoe", "obqa", "1", "3"] in [line.split()[:4] for line in text.splitlines()]
    assert "1 of these cells cannot be computed: ep_size=3: 32 experts cannot be" in text
    text = forecast(small("tasks=[obqa,gsm8k]", "decode=only", *words))
    assert ["tiny_olmoe", "gsm8k", "1", "3"] in [line.split()[:4] for line in text.splitlines()]
    assert "1 of these cells cannot be computed: decode=only: obqa generates" in text
    of_hub = "model=custom", "model.name=m", "model.pretrained=capmoe/none", "tasks=obqa"
    text = forecast(records.planned(*of_hub, "data.root=miniworld", *words))
    assert "m: its memory is not known" in text
