"""Records are read whole, unchanged and in their place, or refused in one line by every reader."""

import dataclasses
import functools
import operator
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import capmoe_eval
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.configuration import finished
from capmoe_eval.experiment.packs import sealed
from capmoe_eval.experiment.record import SCHEMA, Record, read_record
from capmoe_eval.experiment.results import read_results, record_paths
from capmoe_eval.results.frames import results_of
from capmoe_eval.routing.registry import create_method
from tests.records import (
    SERVER,
    broken,
    cell,
    forge,
    of_images,
    planned,
    plausible,
    record,
    record_of,
    write_all,
)

Content = dict[str, Any]


@pytest.fixture
def whole(tmp_path: Path) -> Record:
    made = plausible(cell(create_method("score", 1.0, ep_size=2)), tmp_path / "results", experts=8)
    made.write()
    return made


def test_what_is_written_is_what_is_read(whole: Record) -> None:
    copy = read_record(whole.path, whole.path.parents[2])
    assert (copy.content, copy.path) == (whole.content, whole.path)
    assert copy.value == copy.capmoe["value"]
    assert copy.layers[0].n_experts == 8
    assert copy.path.read_bytes() == sealed(copy.content)


def test_no_flipped_bit_is_taken(whole: Record) -> None:
    data = whole.path.read_bytes()
    draw = random.Random(0)
    for _ in range(400):
        place = draw.randrange(8 * len(data))
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        whole.path.write_bytes(flipped)
        with pytest.raises(UsageError) as error:
            read_record(whole.path)
        assert str(whole.path) in str(error.value)
        assert "\n" not in str(error.value)


DEEP = "[" * 10**5


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: text[:-9], "not a whole record"),
        (lambda text: DEEP, "not a whole record"),
        (lambda text: text.replace('"n": 400', '"n": NaN'), "not a whole record"),
        (
            lambda text: text.replace('"seconds": 1.5', '"seconds": 1e999'),
            "capmoe.provenance.seconds'",
        ),
        (lambda text: text.replace('"n": 400', '"n":  400'), "changed after"),
        (lambda text: text.replace('"checksum": "', '"checksum": "0'), "capmoe.checksum'"),
        (lambda text: text.replace('"checksum"', '"check"'), "changed after"),
        (lambda text: '{"capmoe": []}', "no record of this suite"),
    ],
)
def test_a_damaged_file_is_refused(whole: Record, damage: Callable[[str], str], told: str) -> None:
    whole.path.write_text(damage(whole.path.read_text()))
    with pytest.raises(UsageError, match=told) as error:
        read_record(whole.path)
    assert str(error.value).startswith(f"{whole.path}: ")
    assert len(str(error.value)) < 500


ABSENT = object()


def put(*places: str | int, value: object = ABSENT) -> Callable[[Content], None]:
    """A change of one value of the part that is ours; without another, it is taken away."""

    def change(part: Content) -> None:
        *parents, last = places
        at: Any = functools.reduce(operator.getitem, parents, part)
        if value is ABSENT:
            del at[last]
        else:
            at[last] = value

    return change


NAN, INFINITE, HUGE = float("nan"), float("inf"), 10**400


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (put("value", value=NAN), "not a whole record"),
        (put("stderr", value=INFINITE), "not a whole record"),
        (put("value", value=1.5), "value is 1.5, and acc is a share"),
        (put("n", value=0), "capmoe.n'"),
        (put("documents", "obqa", "correct", -1), "n is 400, and documents has 399 scores"),
        (put("documents", "obqa", "correct", value=[]), "capmoe.documents.obqa.correct'"),
        (put("documents", "obqa", "batches", value=[0]), "documents.obqa': 1 batches for 400"),
        (put("documents", "obqa", "images", value=[0, 0]), "2 images for 400 scores"),
        (put("documents", "obqa", "metrics", value={"f1": [400]}), "f1 has a place beyond 400 sco"),
        (put("documents", "obqa", "correct", 3, value="1"), r"documents.obqa.correct\[3\]'"),
        (put("layers", 1, "n_experts", value=9), r"capmoe.layers\[1\]': load_before has 8"),
        (put("layers", 0, "score_by_rank", value=[0.5]), "score_by_rank has 1 numbers"),
        (put("layers", 0, "grid", "drop_rate", value=[0.1]), r"layers\[0\].grid': gamma,"),
        (put("layers", 0, "grid", "effective_gamma", value=[0.1]), "gamma and effective_gamma"),
        (put("provenance", "data_fingerprint"), "provenance.data_fingerprint' is missing"),
        (put("server", value=SERVER), "server is of backend=vllm, and of no other"),
        (put("schema", value=SCHEMA - 1), f"schema {SCHEMA - 1}, this version reads {SCHEMA}"),
        (put("digest", value="0123456789"), "its cell has digest"),
        (put("cell", "limit", value=8), "its cell has digest"),
        (put("cell", "model", "name", value=3), "capmoe.cell': cannot be read .model.name=3"),
        (put("cell", "model", "revision"), "cannot be read .a field is missing"),
        (put("cell", "more", value=3), "cannot be read .a field is missing or has no effect"),
        (put("cell", "method", "seeed", value=3), "seeed is not registered"),
        (put("cell", "method", "gamma", value="x"), "gamma=x is not registered"),
        (put("cell", "method", "gamma", value=HUGE), "capmoe.cell': cannot be read"),
    ],
)
def test_what_no_reader_could_use_is_neither_written_nor_read(
    whole: Record, change: Callable[[Content], None], told: str
) -> None:
    before = whole.path.read_bytes()
    change(whole.capmoe)
    if whole.capmoe["schema"] == SCHEMA:
        with pytest.raises(UsageError, match="not written: "):
            whole.write()
    assert whole.path.read_bytes() == before
    forge(whole)  # with the right checksum, as a faulty writer would
    with pytest.raises(UsageError, match=told) as error:
        read_record(whole.path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_a_metric_that_is_no_share_may_be_any_number(tmp_path: Path) -> None:
    of = cell(create_method("baseline"))
    object.__setattr__(of.task, "metric", "word_perplexity")
    made = record(of, tmp_path, [12.5, 8.0], stderr=None)
    made.write()
    assert read_record(made.path, tmp_path).value == 10.25


def test_a_record_lies_where_its_cell_does(whole: Record) -> None:
    root = whole.path.parents[2]
    other = record(cell(create_method("score", 2.0, ep_size=2)), root)
    for path in (
        other.path,
        whole.path.with_name("copy.json"),
        root / "other" / "obqa" / whole.path.name,
        root / "m" / "piqa" / whole.path.name,
        root / whole.path.name,
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(whole.path, path)
        with pytest.raises(UsageError, match="the record of another cell, whose place is m/obqa/s"):
            read_record(path, root)
    # Where the directory is not known, the file name must be right.
    assert read_record(root / whole.path.name).cell == whole.cell
    with pytest.raises(UsageError, match="another cell"):
        read_record(whole.path.with_name("copy.json"))


def test_only_files_of_cells_are_looked_at(whole: Record) -> None:
    root = whole.path.parents[2]
    for place in ("inputs.json", "m/note.json", "m/obqa/old/x.json", "m/obqa/.x.json.1.tmp"):
        (root / place).parent.mkdir(exist_ok=True)
        (root / place).write_text("{}")
    (root / "m/obqa/.hidden.json").write_text("{}")
    assert record_paths(root) == [whole.path]
    lines: list[str] = []
    assert [record.content for record in read_results(root, lines)] == [whole.content]
    assert lines == []
    assert record_paths(root / "nowhere") == []


def test_all_readers_refuse_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = Path("results/local-zoo")
    words = ["tasks=obqa", "grid.method=[baseline,score]", "limit=2"]
    plans = planned(*words)
    write_all(plans, lambda _: [1, 0, 1, 1])
    baseline = next(plan for plan in plans if plan.cell.method.name == "baseline")
    made = record(baseline.cell, root)
    made.capmoe["documents"] = {}
    forge(made)
    with pytest.raises(UsageError) as error:
        read_record(baseline.path, root)
    line = str(error.value)
    assert line == (
        f"{baseline.path}: field 'capmoe.documents': Dictionary should have at least 1 item after "
        "validation, not 0; move it away, or delete it to compute it anew"
    )
    assert broken(root) == [line]
    assert finished(plans)[1][-1] == f"left out: {line}"
    with pytest.warns(UserWarning) as warnings:
        frame = capmoe_eval.load_frame(root)
    assert [str(warning.message) for warning in warnings] == [f"left out: {line}"]
    assert len(frame) == len(plans) - 1


@pytest.mark.parametrize(
    ("metric", "scores", "words"),
    [
        ("acc", [1.0, 0.0], ("50.0", "50.0", "%")),
        ("bertscore_f1", [-0.2, 0.1], ("-5.0", "0.0", "%")),  # rescaled, it may be below 0
        ("word_perplexity", [12.5, 12.5], ("12.5000", "0.0000", "word_perplexity")),
    ],
)
def test_a_score_that_is_no_share_is_not_printed_in_percent(
    metric: str, scores: list[float], words: tuple[str, str, str]
) -> None:
    of = cell(create_method("baseline"))
    of = dataclasses.replace(of, task=dataclasses.replace(of.task, metric=metric))
    assert record(of, correct=scores).score_in_words == words


def test_a_metric_has_its_own_documents() -> None:
    pictures = of_images(record_of(create_method("baseline"), (1, 0, 1, 1), task="mme"))
    assert pictures.score("cognition") == (280.0, 5.6, 2)
    documents = results_of([pictures], {"mme": ["cognition"]}).documents
    assert documents[["document", "unit", "correct"]].values.tolist() == [[1, 0, 0], [3, 1, 1]]
    with pytest.raises(UsageError, match="has no metric wisdom; run it again with limit=null"):
        pictures.score("wisdom")


def test_what_lm_eval_could_not_compute_is_null(tmp_path: Path) -> None:
    made = record(cell(create_method("baseline")), tmp_path)
    made.content["results"] = {"obqa": {"acc,none": 0.75, "f1,none": NAN, "all": [INFINITE]}}
    made.write()
    results = read_record(made.path, tmp_path).content["results"]["obqa"]
    assert results == {"acc,none": 0.75, "f1,none": None, "all": [None]}
