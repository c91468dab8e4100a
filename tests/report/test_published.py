import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.report import (
    Layout,
    Measured,
    ModelSlot,
    RowSpec,
    Table,
    TaskColumn,
    fill,
    get_layout,
    lookup,
    published_numbers,
    published_table,
    to_markdown,
)
from capmoe_eval.report.published import Printed

GOLDEN = Path(__file__).parent / "golden"


def printed_rows(table: Table) -> list[list[str]]:
    """Read the cells of the rendered table, without its marks, back from Markdown."""
    lines = [line for line in to_markdown(table).splitlines() if line.startswith("| ")]
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    cells = [[cell.strip().replace("**", "") for cell in row] for row in rows]
    return [cells[0], *cells[2:]]


def golden_rows(name: str, version: str) -> list[list[str]]:
    text = (GOLDEN / f"print_{name}_{version}.tsv").read_text(encoding="utf-8")
    return [line.split("\t") for line in text.splitlines()]


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("name", ["table1", "table2"])
def test_table_comes_out_as_printed(name: str, version: str) -> None:
    assert printed_rows(published_table(name, version)) == golden_rows(name, version)


METHODS = {
    "Baseline": "baseline",
    "Order": "order",
    "Reverse Order": "reverse_order",
    "Random": "random",
    "Score": "score",
    "Expert Drop": "expert_drop",
    "Token Drop": "score",
    "Expanded Drop": "expanded_drop",
    "Token Reroute": "token_reroute",
}
TASKS = {
    "OBQA": "obqa",
    "PIQA": "piqa",
    "RTE": "rte",
    "WinoGrande": "winogrande",
    "BoolQ": "boolq",
    "ARC-C": "arc_c",
    "HellaSwag": "hellaswag",
    "MMLU": "mmlu",
    "GSM8K": "gsm8k",
}
MODELS = {
    "OLMoE": "olmoe",
    "OLMoE-Instruct": "olmoe_instruct",
    "Qwen1.5-MoE-Chat": "qwen1_5_moe_chat",
    "DeepSeek-V2-Lite-Chat": "deepseek_v2_lite_chat",
    "Mixtral-8×7B-Instruct": "mixtral_8x7b_instruct",
}


@dataclass(frozen=True)
class Result:
    model: str
    method: str
    gamma: float | None
    task: str
    value: float
    seed: int | None = None
    variant: str = ""
    stderr: float | None = None
    n: int = 500


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("name", ["table1", "table2"])
def test_runs_that_measure_the_papers_numbers_give_the_papers_table(
    name: str, version: str
) -> None:
    results = [
        Result(
            model=MODELS[number.model],
            method=METHODS[number.method],
            gamma=None if number.method == "Baseline" else number.gamma,
            task=TASKS[number.column],
            value=number.value / 100,
            seed=0 if number.method == "Random" else None,
        )
        for number in published_numbers()
        if (f"table{number.table}", number.version) == (name, version) and number.column != "Avg."
    ]
    layout = get_layout(name, version)
    rows = printed_rows(fill(layout, layout.paper_models, Measured(results)))
    golden = golden_rows(name, version)
    assert [row[:-1] for row in rows] == [row[:-1] for row in golden]
    # The paper truncates some averages and rounds others.
    for row, printed in zip(rows[1:], golden[1:], strict=True):
        assert float(row[-1]) == pytest.approx(float(printed[-1]), abs=0.11), printed


def test_averages_are_printed_and_not_computed() -> None:
    # The mean is 61.175.
    assert "61.1" in to_markdown(published_table("table1"))
    assert published_table("table1").rows[-1].entries[-1].value == 61.1


def test_published_tables_say_so_and_keep_their_own_files() -> None:
    tables = [published_table("table2", version) for version in ("v1", "v2")]
    assert [t.name for t in tables] == ["table2_published_v1", "table2_published_v2"]
    assert tables[0].notes[0] == "Published numbers (v1, arXiv), averages as printed."
    assert "Qwen1.5-MoE-Chat 1.5" in tables[0].notes[1]


def test_renamed_method_kept_its_numbers() -> None:
    reroute, expanded = published_table("table2", "v1"), published_table("table2", "v2")
    assert [row.entries for row in reroute.rows] == [row.entries for row in expanded.rows]
    assert {row.labels[1] for row in reroute.rows} ^ {row.labels[1] for row in expanded.rows} == {
        "Token Reroute",
        "Expanded Drop",
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ({"table": 1, "model": "OLMoE", "method": "Random", "gamma": 1.5}, 59.1),
        ({"table": 1, "model": "OLMoE", "method": "Baseline", "gamma": math.inf}, 64.0),
        ({"table": 2, "model": "OLMoE-Instruct", "method": "Expert Drop"}, 60.5),
        ({"table": 6, "model": "DeepSeek-V2-Lite", "method": "Token Drop", "gamma": 1.0}, 0.53),
        (
            {
                "table": 3,
                "model": "Qwen3-MoE",
                "method": "Expanded Drop",
                "variant": "Device",
                "gamma": 1.0,
            },
            74.8,
        ),
    ],
)
def test_lookup(key: dict[str, object], value: float) -> None:
    assert lookup(version="v2", column="Avg.", **key) == value  # type: ignore[arg-type]


def test_lookup_of_what_is_not_printed_names_it() -> None:
    with pytest.raises(LookupError, match=r"Table 1 of v2 prints no OBQA for Score .*gamma=3\.0"):
        lookup(version="v2", table=1, model="OLMoE", method="Score", gamma=3.0, column="OBQA")


def test_every_cell_is_printed_once() -> None:
    keys = [dataclasses.astuple(number)[:-1] for number in published_numbers()]
    assert len(keys) == len(set(keys)) == 794


def test_unknown_tables_are_refused_with_the_choices() -> None:
    with pytest.raises(UsageError, match="did you mean 'table1'"):
        published_table("tabel1")
    with pytest.raises(UsageError, match=r"version=v3: .*v1, v2"):
        published_table("table1", "v3")


# The tables below are not laid out yet; a layout needs nothing but data.


def test_table_with_a_variant_is_data() -> None:
    table3 = dataclasses.replace(
        get_layout("table2"),
        name="table3",
        number=3,
        labels=(("Method", "{name}"), ("Granularity", "{variant}"), ("γ", "{gamma}")),
        blocks=(
            (RowSpec("Baseline", "baseline"),),
            (
                RowSpec("Expanded Drop", "expanded_drop", 1.5, printed_variant="Expert"),
                RowSpec("Expanded Drop", "expanded_drop", 1.0, "device", "Device"),
            ),
        ),
        paper_models=(ModelSlot("qwen3_moe", "Qwen3-MoE"),),
    )
    rows = printed_rows(fill(table3, table3.paper_models, Printed()))
    assert rows == golden_rows("table3", "v2")


def test_table_of_fractions_is_data() -> None:
    table6 = Layout(
        name="table6",
        version="v2",
        number=6,
        title="Table 6",
        caption="Accuracy.",
        labels=(("Method", "{name}"),),
        tasks=tuple(TaskColumn(f"longicl_{n}", n) for n in ("2K", "4K", "7K", "9K", "11K")),
        blocks=((RowSpec("Baseline", "baseline"), RowSpec("Token Drop", "score", 1.0)),),
        paper_models=(ModelSlot("deepseek_v2_lite", "DeepSeek-V2-Lite"),),
        scale=1.0,
        decimals=2,
    )
    assert printed_rows(fill(table6, table6.paper_models, Printed())) == [
        ["Method", "2K", "4K", "7K", "9K", "11K", "Avg."],
        ["Baseline", "0.28", "0.44", "0.56", "0.62", "0.70", "0.52"],
        ["Token Drop", "0.27", "0.43", "0.57", "0.65", "0.71", "0.53"],
    ]
