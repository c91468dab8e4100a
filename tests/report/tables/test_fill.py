import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.layout import Layout, ModelSlot, RowSpec, TaskColumn, find_layout
from capmoe_eval.report.tables.entries import RecordEntries
from capmoe_eval.report.tables.filled import fill
from capmoe_eval.report.tables.formats import to_csv, to_html, to_latex, to_markdown
from capmoe_eval.report.tables.table import Entry, Missing, PrintedNumber, Table
from capmoe_eval.routing.registry import create_method
from tests import records
from tests.records import result

TINY = ModelSlot("tiny_olmoe", "tiny OLMoE (untrained)", 1.25, knobs={"ep_size": 8})


LAYOUT = Layout(
    name="toy",
    version="v2",
    number=1,
    title="Toy on {model}",
    caption="Accuracy (%).",
    labels=(("Method", "{name}"), ("γ", "{gamma}")),
    tasks=(TaskColumn("obqa", "OBQA"), TaskColumn("piqa", "PIQA")),
    blocks=(
        (RowSpec("Baseline", "baseline"), RowSpec("Expert Drop", "expert_drop")),
        (RowSpec("Score", "score", 1.0), RowSpec("Random", "random", 1.0)),
    ),
    paper_models=(),
)
BASELINE, EXPERT_DROP, SCORE, RANDOM = range(4)


def toy(*results: Record) -> Table:
    return fill(LAYOUT, [TINY], RecordEntries(results).row)


def entry(table: Table, row: int, column: int = 0) -> Entry:
    found = table.rows[row].entries[column]
    assert isinstance(found, Entry)
    return found


def test_a_cell_whose_prompts_were_truncated_is_marked_and_counted() -> None:
    results = [
        records.record_of(
            create_method("score", 1.0),
            model="tiny_olmoe",
            task=task,
            parts={"truncated": {"documents": cut, "tokens": 190, "max_length": 16}},
        )
        for task, cut in (("obqa", 3), ("piqa", 0))
    ]
    table = toy(*results)
    row = table.blocks[1].in_words(1)[SCORE - 2]
    assert [cell.cut for cell in row.entries] == ["§", "", "§"], "the average, too"
    assert [note for note in table.notes if "§" in note] == [
        "§ prompts were truncated on the left to fit the model; documents, and the most tokens "
        "that one lost: tiny_olmoe OBQA 3 of 4 (up to 190)."
    ]
    assert "75.0§" in to_markdown(table)
    assert r"75.0\S{}" in to_latex(table)
    assert "75.0§" in to_html(table)
    assert "OBQA truncated" in to_csv(table)
    old = toy(records.record_of(create_method("score", 1.0), model="tiny_olmoe", task="obqa"))
    assert not entry(old, SCORE).truncated


@pytest.mark.parametrize(
    "other",
    [
        result("score", 2.0),
        result("score", 1.0, model="tiny_mixtral"),
        result("order", 1.0),
        result("score", 1.0, "gsm8k"),
    ],
)
def test_only_runs_of_the_row_enter_it(other: Record) -> None:
    assert all(isinstance(e, Missing) for row in toy(other).rows for e in row.entries)


@pytest.mark.parametrize(
    ("results", "row", "column", "value", "stderr"),
    [
        # The average is the mean over the tasks: sqrt(3² + 4²) / 2.
        (
            [result("score", 1.0, "obqa", 0.4, 0.03), result("score", 1.0, "piqa", 0.7, 0.04)],
            *(SCORE, 2, 55.0, 2.5),
        ),
        ([result("score", 1.0), result("score", 1.0, "piqa", stderr=None)], SCORE, 2, 50.0, None),
        # Documents: (3 + 3 + 6) / 3 = 4. Seeds: a deviation of 2 over three of them.
        (
            [
                result("random", 1.0, value=0.42, stderr=0.03, seed=2),
                result("random", 1.0, value=0.40, stderr=0.03, seed=0),
                result("random", 1.0, value=0.38, stderr=0.06, seed=1),
            ],
            *(RANDOM, 0, 40.0, math.hypot(4.0, 2.0 / math.sqrt(3))),
        ),
        ([result("random", 1.0, seed=seed) for seed in range(10)], RANDOM, 0, 50.0, 2.0),
        (
            [result("random", 1.0, seed=0), result("random", 1.0, seed=1, stderr=None)],
            *(RANDOM, 0, 50.0, None),
        ),
    ],
    ids=["average", "unknown error", "seeds", "equal seeds", "seeds of unknown error"],
)
def test_errors_are_kept_honest(
    results: list[Record], row: int, column: int, value: float, stderr: float | None
) -> None:
    mean = entry(toy(*results), row, column)
    assert mean.value == pytest.approx(value)
    assert mean.stderr == (stderr and pytest.approx(stderr))
    assert mean.seeds == tuple(sorted(r.seed for r in results if r.seed is not None))


def test_average_is_missing_where_a_task_is() -> None:
    assert isinstance(toy(result("score", 1.0)).rows[SCORE].entries[2], Missing)


def test_one_seed_is_said_to_hide_the_spread() -> None:
    table = toy(result("random", 1.0, seed=3))
    assert entry(table, RANDOM).stderr == pytest.approx(2.0)
    assert table.notes[0].startswith("Entries of a random method are means over 1 seed. With one")


def test_seeds_of_unknown_error_have_none() -> None:
    table = toy(result("random", 1.0, seed=0), result("random", 1.0, seed=1, stderr=None))
    assert entry(table, RANDOM).stderr is None


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (
            [result("random", 1.0, seed=0), result("random", 1.0, seed=1, n=100)],
            r"n=500\].*n=100\].*same limit",
        ),
        (
            [result("score", 1.0, knobs={"ep_size": size}) for size in (1, 8)],
            "two results.*with ep_size=1 and .*with ep_size=8;",
        ),
        (
            [result("random", 1.0, seed=size, knobs={"ep_size": size}) for size in (1, 8)],
            "different settings.*with ep_size=1.*with ep_size=8;",
        ),
    ],
)
def test_results_that_are_no_entry_are_refused_by_name(results: list[Record], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        toy(*results)


def commands(table: Table) -> list[str]:
    return [c.removeprefix("capmoe-eval ").removeprefix("run ") for c in table.missing_commands]


def test_a_row_is_filled_by_one_command() -> None:
    table = fill(
        LAYOUT,
        [TINY],
        RecordEntries(
            [result("score", 1.0, "obqa")],
            overrides=["+experiment=tiny"],
            seeds=(0, 1),
        ).row,
    )
    start = "+experiment=tiny model=tiny_olmoe"
    assert commands(table) == [
        f"{start} method=baseline 'tasks=[obqa,piqa]'",
        f"{start} method=expert_drop 'tasks=[obqa,piqa]'",
        f"{start} method=score gamma=1.0 tasks=piqa",
        f"sweep {start} method=random gamma=1.0 'tasks=[obqa,piqa]' seed=0,1",
    ]
    row = table.rows[SCORE].entries
    assert row[1] == row[2] == Missing(table.missing_commands[2])


DEVICE = RowSpec("Device", "score", 1.0, {"granularity": "device"})
RANKED = {"candidates": "ranked"}
TWO_M = RowSpec("2k", "expanded_drop", 1.0, {**RANKED, "m": "2k", "max_k": True})


def of_row(spec: RowSpec, *results: Record, symbols: Mapping[str, int] | None = None) -> Table:
    layout = dataclasses.replace(LAYOUT, blocks=((spec,),), tasks=LAYOUT.tasks[:1])
    slot = dataclasses.replace(TINY, symbols=symbols or {})
    return fill(layout, [slot], RecordEntries(results).row)


def test_knobs_of_a_row_find_its_runs_alone() -> None:
    expert = result("score", 1.0, knobs={"granularity": "expert", "ep_size": 8}, value=0.1)
    device = result("score", 1.0, knobs={"granularity": "device", "ep_size": 8}, value=0.2)
    assert entry(of_row(DEVICE, expert, device), 0).value == pytest.approx(20.0)


def test_symbols_stand_for_the_models_own_numbers() -> None:
    runs = [
        result("expanded_drop", 1.0, knobs={**RANKED, "m": m, "max_k": limited}, value=m / 100)
        for m in (8, 12)
        for limited in (True, False)
        if (m, limited) != (12, True)
    ]
    table = of_row(TWO_M, *runs, symbols={"2k": 8, "3k": 12})
    assert entry(table, 0).value == pytest.approx(8.0)
    assert "On tiny OLMoE (untrained), 2k = 8." in table.notes
    missing = of_row(TWO_M, *runs, symbols={"2k": 12, "3k": 18}).missing_commands
    assert "m=12 max_k=true" in missing[0]


@pytest.mark.parametrize(
    ("method", "gamma", "knobs", "found"),
    [
        ("token_reroute", 1.0, {"rounds": 1}, 0.2),
        ("token_reroute", 1.0, {"rounds": 2}, None),
        ("score", math.inf, {}, 0.1),
        ("random", math.inf, {"count_padding": True}, 0.1),
        ("device_drop", 8.0, {}, 0.1),  # γ = R: a device has room for all
        ("device_drop", 8.0, {"ep_size": 16}, None),
        ("order", 0.0, {"rounding": "floor"}, 0.4),
    ],
)
def test_a_row_finds_what_is_the_same_computation(
    method: str, gamma: float, knobs: dict[str, object], found: float | None
) -> None:
    runs = [
        result("baseline", None, value=0.1),
        result("score", 1.0, knobs={"granularity": "expert", "rounding": "ceil"}, value=0.2),
        result("score", 0.0, knobs={"granularity": "expert", "rounding": "ceil"}, value=0.4),
    ]
    (cell,) = of_row(RowSpec("row", method, gamma, knobs), *runs).rows[0].entries[:1]
    assert (cell.value if isinstance(cell, Entry) else None) == (
        None if found is None else pytest.approx(100 * found)
    )


@pytest.mark.parametrize(
    ("key", "slots", "message"),
    [
        ("table2", [ModelSlot("tiny", "Tiny")], "Token Drop on tiny takes the model's own γ"),
        ("table1", [], "table1 is a table of one model, got 0"),
        ("table1", [TINY, TINY], "table1 is a table of one model, got 2"),
    ],
)
def test_models_that_do_not_fit_are_refused(key: str, slots: list[ModelSlot], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fill(find_layout(key), slots, RecordEntries([]).row)  # type: ignore[arg-type]


# Paired tests against the baseline.


def graded(method: str, scores: str, subtask: str = "t", **given: Any) -> Record:
    """A run whose documents are right ("1") or wrong ("0")."""
    correct = [float(score) for score in scores]
    gamma = None if method == "baseline" else 1.0
    given = {"value": sum(correct) / len(correct), "documents": "hash"} | given
    return result(method, gamma, correct={subtask: correct}, **given)


@pytest.mark.parametrize(
    ("baseline", "score", "p", "effect", "verdict"),
    [
        # Ten lost and none gained: McNemar's p is 2 / 2¹⁰.
        ("1" * 12 + "0", "0" * 10 + "110", 2 / 2**10, 100 * -10 / 13, "worse"),
        ("0" * 10, "1" * 10, 2 / 2**10, 100.0, "better"),
        ("1" * 9, "0" * 5 + "1" * 4, 2 / 2**5, 100 * -5 / 9, None),
    ],
)
def test_documents_are_paired_with_the_baselines(
    baseline: str, score: str, p: float, effect: float, verdict: str | None
) -> None:
    table = toy(graded("baseline", baseline), graded("score", score))
    test = entry(table, SCORE).test
    assert test is not None
    assert (test.p, test.corrected, test.verdict) == (p, p, verdict)
    assert test.effect == pytest.approx(effect)
    assert entry(table, BASELINE).test is None


def test_tests_are_corrected_for_their_number() -> None:
    """Holm: the smallest of three p counts three times, the next twice; never less than before.

    On one task 7 documents are lost (p = 2/2⁷), on the other 6 (2/2⁶); their average is the third
    test.
    """
    table = toy(
        graded("baseline", "1" * 10),
        graded("baseline", "1" * 10, task="piqa"),
        graded("score", "0" * 7 + "111"),
        graded("score", "0" * 6 + "1111", task="piqa"),
    )
    first, second, both = (entry(table, SCORE, column).test for column in range(3))
    assert first
    assert second
    assert both
    assert (first.p, second.p) == (2 / 2**7, 2 / 2**6)
    assert both.effect == pytest.approx(-65.0)
    assert both.p == pytest.approx(2 / 2**13, abs=1e-3)
    corrected = [first.corrected, second.corrected, both.corrected]
    assert corrected == pytest.approx([2 * 2 / 2**7, 2 * 2 / 2**7, 3 * both.p])
    (note,) = (note for note in table.notes if note.startswith("▼ worse, ▲ better"))
    assert "for the 3 tests of this table" in note


@pytest.mark.parametrize(("lost", "verdict"), [(7, "worse"), (6, None)])
def test_a_verdict_is_that_of_the_corrected_p(lost: int, verdict: str | None) -> None:
    """Of two tests 2/2⁷ counts twice: 0.031; so does 2/2⁶: 0.0625, which alone would do."""
    table = toy(
        graded("baseline", "1" * 10),
        graded("score", "0" * lost + "1" * (10 - lost)),
        graded("random", "1" * 10, seed=0),
    )
    test = entry(table, SCORE).test
    assert test is not None
    assert test.verdict == verdict


def test_seeds_are_averaged_by_document_before_they_are_tested() -> None:
    """Every document is lost under one of two seeds: ten differences of −½, all of one sign."""
    table = toy(
        graded("baseline", "1" * 10),
        graded("random", "0" * 5 + "1" * 5, seed=0),
        graded("random", "1" * 5 + "0" * 5, seed=1),
    )
    test = entry(table, RANDOM).test
    assert test is not None
    assert test.effect == pytest.approx(-50.0)
    assert test.p == pytest.approx(2 / 2**10, abs=1.5e-3)


@pytest.mark.parametrize(
    ("baseline", "reason"),
    [
        ([], "the baseline is missing"),
        ([graded("baseline", "1111", documents="other")], "other documents"),
        ([graded("baseline", "1111", subtask="u")], "other subtasks: t, u"),
        ([graded("baseline", "111")], "4 and 3 scores for the same documents of t"),
        ([graded("baseline", "1111", model="tiny_mixtral")], "the baseline is missing"),
    ],
)
def test_only_the_same_documents_are_paired(baseline: list[Record], reason: str) -> None:
    table = toy(*baseline, graded("score", "1111"))
    assert entry(table, SCORE).test is None
    assert reason in entry(table, SCORE).untested
    assert "1 entry has no paired test: no baseline on the same documents." in table.notes


def test_average_is_tested_where_every_task_is() -> None:
    table = toy(
        graded("baseline", "1" * 10),
        graded("score", "0" * 10),
        graded("score", "0" * 10, task="piqa"),
    )
    assert entry(table, SCORE, 0).test is not None
    assert [entry(table, SCORE, column).test for column in (1, 2)] == [None, None]


def test_tasks_of_the_same_documents_are_one_sample() -> None:
    """Ten documents lost in both tasks are ten and not twenty; errors do not shrink."""
    layout = dataclasses.replace(LAYOUT, same_documents=True)
    results = [
        graded(method, score * 10, task=task, stderr=error)
        for method, score in (("baseline", "1"), ("score", "0"))
        for task, error in (("obqa", 0.03), ("piqa", 0.05))
    ]
    average = entry(fill(layout, [TINY], RecordEntries(results).row), SCORE, 2)
    assert average.stderr == pytest.approx(4.0)
    assert average.test is not None
    assert average.test.p == 2 / 2**10
    assert average.test.effect == pytest.approx(-100.0)


# Published numbers beside ours.


PAPER = ModelSlot("olmoe", "OLMoE")
PUBLISHED_LAYOUT = dataclasses.replace(
    LAYOUT,
    tasks=(TaskColumn("obqa", "OBQA"), TaskColumn("rte", "RTE")),
    blocks=((RowSpec("Baseline", "baseline"), RowSpec("Score", "score", 1.0)),),
    paper_models=(PAPER,),
    average=None,
)


def beside(*results: Record, slot: ModelSlot = PAPER, layout: Layout = PUBLISHED_LAYOUT) -> Table:
    return fill(layout, [slot], RecordEntries(results).row)


def test_published_numbers_stand_beside_ours() -> None:
    """Table 1 prints 45.6 for the baseline on OBQA; we have 43.6 ± 2.2 on 500 documents."""
    table = beside(result("baseline", None, value=0.436, stderr=0.022, model="olmoe"))
    published = entry(table, 0).published
    assert published is not None
    assert published.value == 45.6
    assert published.difference == pytest.approx(-2.0)
    sampling = 100 * math.sqrt(0.456 * 0.544 / 500)
    assert published.z == pytest.approx(-2.0 / math.sqrt(2.2**2 + sampling**2))
    assert any(note.startswith("published: ") for note in table.notes)
    no_error = beside(result("baseline", None, value=0.436, stderr=None, model="olmoe"))
    assert entry(no_error, 0).published == PrintedNumber(45.6, pytest.approx(-2.0), None)


def test_published_average_has_the_sampling_errors_of_its_tasks() -> None:
    layout = find_layout("table1")
    results = [
        result("baseline", None, task.task, 0.65, 0.02, model="olmoe") for task in layout.tasks
    ]
    published = entry(beside(*results, layout=layout), 0, 8).published
    assert published is not None
    shares = (0.456, 0.801, 0.537, 0.712, 0.747, 0.545, 0.794, 0.525)
    sampling = 100 * math.sqrt(sum(p * (1 - p) / 500 for p in shares)) / 8
    assert published.z == pytest.approx(1.0 / math.hypot(sampling, 2.0 / math.sqrt(8)))


@pytest.mark.parametrize(
    "table",
    [
        beside(result("baseline", None), slot=TINY),
        beside(result("baseline", None, model="olmoe", data="miniworld")),
        beside(
            result("score", 1.25, model="olmoe"),
            layout=dataclasses.replace(
                PUBLISHED_LAYOUT, blocks=((RowSpec("Score", "score", 1.25),),)
            ),
        ),
    ],
    ids=["another model", "other documents", "another γ"],
)
def test_what_was_not_published_has_nothing_beside_it(table: Table) -> None:
    (found,) = [e for row in table.rows for e in row.entries if isinstance(e, Entry)]
    assert found.published is None
    assert not any(note.startswith("published: ") for note in table.notes)
