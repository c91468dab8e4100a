import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.paper.layout import Layout, ModelSlot, RowSpec, TaskColumn
from capmoe_eval.paper.tables import find_layout
from capmoe_eval.report.tables.entries import Measured
from capmoe_eval.report.tables.fill import fill
from capmoe_eval.report.tables.table import Entry, Missing, Table

TINY = ModelSlot("tiny_olmoe", "tiny OLMoE (untrained)", 1.25, knobs={"ep_size": 8})


@dataclass(frozen=True)
class Result:
    method: str
    gamma: float | None
    task: str = "obqa"
    value: float = 0.5
    stderr: float | None = 0.02
    seed: int | None = None
    model: str = "tiny_olmoe"
    knobs: Mapping[str, object] = field(default_factory=dict)
    n: int = 500
    data: str = "hub"
    documents: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    @property
    def cell(self) -> SimpleNamespace:
        return SimpleNamespace(data=self.data)


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


def toy(*results: Result) -> Table:
    return fill(LAYOUT, [TINY], Measured(results).row)


def entry(table: Table, row: int, column: int = 0) -> Entry:
    found = table.rows[row].entries[column]
    assert isinstance(found, Entry)
    return found


def test_fractions_become_percent_in_their_row_and_column() -> None:
    table = toy(
        Result("baseline", None, "obqa", 0.456, 0.022),
        Result("score", 1.0, "piqa", 0.801, 0.009, n=1838),
    )
    assert entry(table, BASELINE).value == pytest.approx(45.6)
    assert entry(table, BASELINE).stderr == pytest.approx(2.2)
    assert entry(table, SCORE, 1).value == pytest.approx(80.1)
    assert sum(isinstance(e, Entry) for row in table.rows for e in row.entries) == 2
    assert table.columns == ("OBQA", "PIQA", "Avg.")
    assert table.title == "Toy on tiny OLMoE (untrained)"
    assert table.notes[0] == "Documents: OBQA 500, PIQA 1,838."


def test_gamma_is_named_as_in_print() -> None:
    assert [row.labels for row in toy().rows] == [
        ("Baseline", "+∞"),
        ("Expert Drop", "–"),
        ("Score", "1.0"),
        ("Random", "1.0"),
    ]


@pytest.mark.parametrize(
    "other",
    [
        Result("score", 2.0),
        Result("score", math.inf),
        Result("score", 1.0, model="tiny_mixtral"),
        Result("order", 1.0),
        Result("score", 1.0, "gsm8k"),
    ],
)
def test_only_runs_of_the_row_enter_it(other: Result) -> None:
    assert all(isinstance(e, Missing) for row in toy(other).rows for e in row.entries)


def test_average_is_the_mean_over_the_tasks() -> None:
    table = toy(Result("score", 1.0, "obqa", 0.4, 0.03), Result("score", 1.0, "piqa", 0.7, 0.04))
    assert entry(table, SCORE, 2).value == pytest.approx(55.0)
    assert entry(table, SCORE, 2).stderr == pytest.approx(2.5)  # sqrt(3² + 4²) / 2


def test_average_of_unknown_errors_has_none() -> None:
    table = toy(Result("score", 1.0, "obqa"), Result("score", 1.0, "piqa", stderr=None))
    assert entry(table, SCORE, 2).stderr is None


def test_average_is_missing_where_a_task_is() -> None:
    table = toy(Result("score", 1.0, "obqa"))
    assert isinstance(table.rows[SCORE].entries[2], Missing)


def test_seeds_are_averaged_and_their_errors_kept_honest() -> None:
    table = toy(
        Result("random", 1.0, value=0.42, stderr=0.03, seed=2),
        Result("random", 1.0, value=0.40, stderr=0.03, seed=0),
        Result("random", 1.0, value=0.38, stderr=0.06, seed=1),
    )
    mean = entry(table, RANDOM)
    assert mean.value == pytest.approx(40.0)
    # Documents: (3 + 3 + 6) / 3 = 4. Seeds: a deviation of 2 over three of them.
    assert mean.stderr == pytest.approx(math.hypot(4.0, 2.0 / math.sqrt(3)))
    assert mean.seeds == (0, 1, 2)
    assert mean.documents == 500
    assert "Entries of a random method are means over 3 seeds." in table.notes


def test_equal_seeds_do_not_shrink_the_sampling_error() -> None:
    table = toy(*(Result("random", 1.0, seed=seed, stderr=0.02) for seed in range(10)))
    assert entry(table, RANDOM).stderr == pytest.approx(2.0)


def test_one_seed_is_said_to_hide_the_spread() -> None:
    table = toy(Result("random", 1.0, seed=3))
    assert entry(table, RANDOM).stderr == pytest.approx(2.0)
    assert table.notes[0].startswith("Entries of a random method are means over 1 seed. With one")


def test_seeds_of_unknown_error_have_none() -> None:
    table = toy(Result("random", 1.0, seed=0), Result("random", 1.0, seed=1, stderr=None))
    assert entry(table, RANDOM).stderr is None


@pytest.mark.parametrize(("first", "second"), [(None, None), (1, 1), (None, 1), (1, None)])
def test_two_results_for_one_entry_are_refused_by_name(
    first: int | None, second: int | None
) -> None:
    pair = [
        Result("random", 1.0, value=0.25, seed=first),
        Result("random", 1.0, value=0.75, seed=second),
    ]
    with pytest.raises(UsageError) as error:
        toy(*pair)
    for result in pair:
        assert f"task=obqa seed={result.seed}: {result.value:.4f}" in str(error.value)
    assert str(error.value).count("model=tiny_olmoe method=random gamma=1.0") == 2


def test_seeds_over_different_documents_are_refused() -> None:
    with pytest.raises(UsageError, match=r"n=500\].*n=100\].*same limit"):
        toy(Result("random", 1.0, seed=0), Result("random", 1.0, seed=1, n=100))


@pytest.mark.parametrize("broken", [{"value": math.nan}, {"stderr": math.nan}])
def test_result_that_is_no_number_is_refused_by_name(broken: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"not a number: \[model=tiny_olmoe method=score"):
        toy(dataclasses.replace(Result("score", 1.0), **broken))


def test_differing_document_counts_of_a_column_are_told() -> None:
    table = toy(Result("baseline", None), Result("score", 1.0, n=100))
    assert table.notes[0] == "Documents: OBQA 100 or 500."


def commands(table: Table) -> list[str]:
    return [c.removeprefix("python -m capmoe_eval ") for c in table.missing_commands]


def test_a_row_is_filled_by_one_command() -> None:
    table = fill(
        LAYOUT,
        [TINY],
        Measured(
            [Result("score", 1.0, "obqa")],
            overrides=["+experiment=tiny"],
            seeds=(0, 1),
        ).row,
    )
    start = "+experiment=tiny model=tiny_olmoe"
    assert commands(table) == [
        f"{start} method=baseline 'tasks=[obqa,piqa]'",
        f"{start} method=expert_drop 'tasks=[obqa,piqa]'",
        f"{start} method=score gamma=1.0 tasks=piqa",
        f"-m {start} method=random gamma=1.0 'tasks=[obqa,piqa]' seed=0,1",
    ]
    row = table.rows[SCORE].entries
    assert row[1] == row[2] == Missing(table.missing_commands[2])


DEVICE = RowSpec("Device", "score", 1.0, {"granularity": "device"})
RANKED = {"candidates": "ranked"}
TWO_M = RowSpec("2k", "expanded_drop", 1.0, {**RANKED, "m": "2k", "max_k": True})


def of_row(spec: RowSpec, *results: Result, symbols: Mapping[str, int] | None = None) -> Table:
    layout = dataclasses.replace(LAYOUT, blocks=((spec,),), tasks=LAYOUT.tasks[:1])
    slot = dataclasses.replace(TINY, symbols=symbols or {})
    return fill(layout, [slot], Measured(results).row)


def test_knobs_of_a_row_are_asked_for_by_name() -> None:
    expert = Result("score", 1.0, knobs={"granularity": "expert", "ep_size": 8})
    assert commands(of_row(DEVICE, expert)) == [
        "model=tiny_olmoe method=score gamma=1.0 granularity=device tasks=obqa"
    ]


def test_knobs_of_a_row_find_its_runs_alone() -> None:
    expert = Result("score", 1.0, knobs={"granularity": "expert", "ep_size": 8}, value=0.1)
    device = Result("score", 1.0, knobs={"granularity": "device", "ep_size": 8}, value=0.2)
    assert entry(of_row(DEVICE, expert, device), 0).value == pytest.approx(20.0)


def test_symbols_stand_for_the_models_own_numbers() -> None:
    runs = [
        Result("expanded_drop", 1.0, knobs={**RANKED, "m": m, "max_k": limited}, value=m / 100)
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
        Result("baseline", None, value=0.1),
        Result("score", 1.0, knobs={"granularity": "expert", "rounding": "ceil"}, value=0.2),
        Result("score", 0.0, knobs={"granularity": "expert", "rounding": "ceil"}, value=0.4),
    ]
    (cell,) = of_row(RowSpec("row", method, gamma, knobs), *runs).rows[0].entries[:1]
    assert (cell.value if isinstance(cell, Entry) else None) == (
        None if found is None else pytest.approx(100 * found)
    )


def test_the_baseline_in_other_words_is_not_tested_against_itself() -> None:
    table = of_row(RowSpec("row", "score", math.inf), graded("baseline", "1101"))
    assert entry(table, 0).test is None and entry(table, 0).untested == ""


def test_two_settings_of_a_knob_that_no_row_names_are_refused_by_name() -> None:
    pair = [Result("score", 1.0, knobs={"ep_size": size}) for size in (1, 8)]
    with pytest.raises(UsageError, match=r"two results.*with ep_size=1 and .*with ep_size=8;"):
        toy(*pair)


def test_seeds_of_different_settings_are_not_averaged() -> None:
    pair = [Result("random", 1.0, seed=size, knobs={"ep_size": size}) for size in (1, 8)]
    with pytest.raises(UsageError, match=r"different settings.*with ep_size=1.*with ep_size=8;"):
        toy(*pair)


def test_table2_takes_each_models_own_gamma_and_says_so() -> None:
    slots = [TINY, ModelSlot("tiny_mixtral", "tiny Mixtral", 1.5)]
    results = [
        Result("score", 1.25, model="tiny_olmoe", value=0.1),
        Result("score", 1.5, model="tiny_olmoe", value=0.2),
        Result("score", 1.5, model="tiny_mixtral", value=0.3),
    ]
    table = fill(find_layout("table2"), slots, Measured(results).row)
    assert [len(block.rows) for block in table.blocks] == [4, 4]
    measured = {
        row.labels: [e.value for e in row.entries if isinstance(e, Entry)] for row in table.rows
    }
    assert measured["tiny OLMoE (untrained)", "Token Drop"] == pytest.approx([10.0])
    assert measured["tiny Mixtral", "Token Drop"] == pytest.approx([30.0])
    assert table.notes[0] == "γ: tiny OLMoE (untrained) 1.25, tiny Mixtral 1.5."


def test_model_without_its_own_gamma_is_refused() -> None:
    with pytest.raises(UsageError, match="Token Drop on tiny takes the model's own γ"):
        fill(find_layout("table2"), [ModelSlot("tiny", "Tiny")], Measured([]).row)


@pytest.mark.parametrize("slots", [[], [TINY, TINY]])
def test_table_of_one_model_refuses_others(slots: list[ModelSlot]) -> None:
    with pytest.raises(UsageError, match=f"table1 is a table of one model, got {len(slots)}"):
        fill(find_layout("table1"), slots, Measured([]).row)


def test_table_without_average() -> None:
    table = fill(dataclasses.replace(LAYOUT, average=None), [TINY], Measured([]).row)
    assert table.columns == ("OBQA", "PIQA")


# Paired tests against the baseline.


def graded(method: str, scores: str, **given: object) -> Result:
    """A run whose documents are right ("1") or wrong ("0")."""
    correct = [float(score) for score in scores]
    gamma = None if method == "baseline" else 1.0
    given = {
        "documents": {"t": ("hash", correct, (), ())},
        "value": sum(correct) / len(correct),
    } | given
    return Result(method, gamma, n=len(correct), **given)  # type: ignore[arg-type]


def test_documents_are_paired_with_the_baselines() -> None:
    """Ten lost and none gained: McNemar's p is 2 / 2¹⁰."""
    table = toy(graded("baseline", "1" * 12 + "0"), graded("score", "0" * 10 + "110"))
    test = entry(table, SCORE).test
    assert test is not None
    assert test.p == test.corrected == 2 / 2**10
    assert test.effect == pytest.approx(100 * -10 / 13)
    assert test.verdict == "worse"
    assert entry(table, BASELINE).test is None


def test_gains_are_better_and_small_differences_are_nothing() -> None:
    better = toy(graded("baseline", "0" * 10), graded("score", "1" * 10))
    assert entry(better, SCORE).test.verdict == "better"  # type: ignore[union-attr]
    # Five lost: p = 2 / 2⁵ = 0.0625.
    same = toy(graded("baseline", "1" * 9), graded("score", "0" * 5 + "1" * 4))
    assert entry(same, SCORE).test.verdict is None  # type: ignore[union-attr]


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
    tests = [entry(table, SCORE, column).test for column in range(3)]
    assert [test.p for test in tests[:2]] == [2 / 2**7, 2 / 2**6]  # type: ignore[union-attr]
    both = tests[2]
    assert both is not None
    assert both.effect == pytest.approx(-65.0)
    assert both.p == pytest.approx(2 / 2**13, abs=1e-3)
    assert tests[0].corrected == pytest.approx(2 * 2 / 2**7)  # type: ignore[union-attr]
    assert tests[1].corrected == pytest.approx(2 * 2 / 2**7)  # type: ignore[union-attr]
    assert both.corrected == pytest.approx(3 * both.p)
    note = next(note for note in table.notes if note.startswith("▼ worse, ▲ better"))
    assert "for the 3 tests of this table" in note


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
        ([graded("baseline", "1111", documents={"t": ("other", [1.0] * 4)})], "other documents"),
        (
            [graded("baseline", "1111", documents={"u": ("hash", [1.0] * 4, (), ())})],
            "other subtasks: t, u",
        ),
        ([graded("baseline", "111")], "4 and 3 scores for the same documents of t"),
        ([graded("baseline", "1111", documents={})], "scores by document are not known"),
        ([graded("baseline", "1111", model="tiny_mixtral")], "the baseline is missing"),
    ],
)
def test_only_the_same_documents_are_paired(baseline: list[Result], reason: str) -> None:
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
    average = entry(fill(layout, [TINY], Measured(results).row), SCORE, 2)
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


def beside(*results: Result, slot: ModelSlot = PAPER, layout: Layout = PUBLISHED_LAYOUT) -> Table:
    return fill(layout, [slot], Measured(results).row)


def test_published_numbers_stand_beside_ours() -> None:
    """Table 1 prints 45.6 for the baseline on OBQA; we have 43.6 ± 2.2 on 500 documents."""
    table = beside(Result("baseline", None, value=0.436, stderr=0.022, model="olmoe"))
    published = entry(table, 0).published
    assert published is not None
    assert published.value == 45.6
    assert published.difference == pytest.approx(-2.0)
    sampling = 100 * math.sqrt(0.456 * 0.544 / 500)
    assert published.z == pytest.approx(-2.0 / math.sqrt(2.2**2 + sampling**2))
    assert any(note.startswith("published: ") for note in table.notes)


def test_published_average_has_the_sampling_errors_of_its_tasks() -> None:
    layout = find_layout("table1")
    results = [
        Result("baseline", None, task.task, 0.65, 0.02, model="olmoe") for task in layout.tasks
    ]
    published = entry(beside(*results, layout=layout), 0, 8).published
    assert published is not None
    shares = (0.456, 0.801, 0.537, 0.712, 0.747, 0.545, 0.794, 0.525)
    sampling = 100 * math.sqrt(sum(p * (1 - p) / 500 for p in shares)) / 8
    assert published.z == pytest.approx(1.0 / math.hypot(sampling, 2.0 / math.sqrt(8)))


def test_without_an_error_there_is_a_difference_and_no_z() -> None:
    table = beside(Result("baseline", None, value=0.436, stderr=None, model="olmoe"))
    published = entry(table, 0).published
    assert published is not None and published.z is None


@pytest.mark.parametrize(
    "table",
    [
        beside(Result("baseline", None), slot=TINY),
        beside(Result("baseline", None, model="olmoe", data="synthetic")),
        beside(
            Result("score", 1.25, model="olmoe"),
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
