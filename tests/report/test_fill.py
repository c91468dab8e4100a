import dataclasses
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.report import (
    Entry,
    Layout,
    Measured,
    Missing,
    ModelSlot,
    RowSpec,
    Table,
    TaskColumn,
    fill,
    get_layout,
)

TINY = ModelSlot("tiny_olmoe", "tiny OLMoE (untrained)", 1.25)


@dataclass(frozen=True)
class Result:
    method: str
    gamma: float | None
    task: str = "obqa"
    value: float = 0.5
    stderr: float | None = 0.02
    seed: int | None = None
    model: str = "tiny_olmoe"
    variant: str = ""
    n: int = 500


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
    return fill(LAYOUT, [TINY], Measured(results))


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
    assert table.notes == ("Documents: OBQA 500, PIQA 1,838.",)


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
        Result("score", 1.0, variant="ep_size=1"),
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
    assert table.notes == ("Documents: OBQA 100 or 500.",)


def commands(table: Table) -> Iterator[list[str]]:
    yield from (shlex.split(command) for command in table.missing_commands)


def test_a_row_is_filled_by_one_command() -> None:
    table = fill(
        LAYOUT,
        [TINY],
        Measured(
            [Result("score", 1.0, "obqa")],
            command="capmoe-eval",
            overrides=["+experiment=tiny"],
            seeds=(0, 1),
        ),
    )
    assert list(commands(table)) == [
        [
            "capmoe-eval",
            "+experiment=tiny",
            "model=tiny_olmoe",
            "method=baseline",
            "tasks=[obqa,piqa]",
        ],
        [
            "capmoe-eval",
            "+experiment=tiny",
            "model=tiny_olmoe",
            "method=expert_drop",
            "tasks=[obqa,piqa]",
        ],
        [
            "capmoe-eval",
            "+experiment=tiny",
            "model=tiny_olmoe",
            "method=score",
            "gamma=1.0",
            "tasks=piqa",
        ],
        [
            "capmoe-eval",
            "-m",
            "+experiment=tiny",
            "model=tiny_olmoe",
            "method=random",
            "gamma=1.0",
            "tasks=[obqa,piqa]",
            "seed=0,1",
        ],
    ]
    row = table.rows[SCORE].entries
    assert row[1] == row[2] == Missing(table.missing_commands[2])


def test_variants_are_asked_for_by_their_overrides() -> None:
    spec = RowSpec("Device", "score", 1.0, "granularity=device", overrides=("granularity=device",))
    layout = dataclasses.replace(LAYOUT, blocks=((spec,),), tasks=LAYOUT.tasks[:1])
    default, device = Result("score", 1.0), Result("score", 1.0, variant="granularity=device")
    assert list(commands(fill(layout, [TINY], Measured([default])))) == [
        shlex.split(
            "python -m capmoe_eval model=tiny_olmoe method=score gamma=1.0 granularity=device "
            "tasks=obqa"
        )
    ]
    assert not list(commands(fill(layout, [TINY], Measured([device]))))


def test_table2_takes_each_models_own_gamma_and_says_so() -> None:
    slots = [TINY, ModelSlot("tiny_mixtral", "tiny Mixtral", 1.5)]
    results = [
        Result("score", 1.25, model="tiny_olmoe", value=0.1),
        Result("score", 1.5, model="tiny_olmoe", value=0.2),
        Result("score", 1.5, model="tiny_mixtral", value=0.3),
    ]
    table = fill(get_layout("table2"), slots, Measured(results))
    assert [len(block.rows) for block in table.blocks] == [4, 4]
    measured = {
        row.labels: [e.value for e in row.entries if isinstance(e, Entry)] for row in table.rows
    }
    assert measured["tiny OLMoE (untrained)", "Token Drop"] == pytest.approx([10.0])
    assert measured["tiny Mixtral", "Token Drop"] == pytest.approx([30.0])
    assert table.notes[0] == "γ: tiny OLMoE (untrained) 1.25, tiny Mixtral 1.5."


def test_model_without_its_own_gamma_is_refused() -> None:
    with pytest.raises(UsageError, match="Token Drop on tiny takes the model's own γ"):
        fill(get_layout("table2"), [ModelSlot("tiny", "Tiny")], Measured([]))


@pytest.mark.parametrize("slots", [[], [TINY, TINY]])
def test_table_of_one_model_refuses_others(slots: list[ModelSlot]) -> None:
    with pytest.raises(UsageError, match=f"table1 is a table of one model, got {len(slots)}"):
        fill(get_layout("table1"), slots, Measured([]))


def test_table_without_average() -> None:
    table = fill(dataclasses.replace(LAYOUT, average=None), [TINY], Measured([]))
    assert table.columns == ("OBQA", "PIQA")
