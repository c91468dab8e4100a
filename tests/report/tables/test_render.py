import csv
import io
import re
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.report.tables.formats import (
    RENDERERS,
    to_csv,
    to_html,
    to_latex,
    to_markdown,
    write,
)
from capmoe_eval.report.tables.table import (
    CellText,
    Entry,
    Missing,
    PairedTest,
    PrintedNumber,
    Row,
    RowBlock,
    Table,
)

GOLDEN = Path(__file__).parent / "golden"

RUN_RANDOM = "capmoe-eval run method=random 'tasks=[b&q,c]'"
worse = PairedTest(-3.6, 0.0001, 0.0004)
better = PairedTest(5.0, 0.001, 0.002)
same = PairedTest(-0.6, 0.03, 0.06)
TOY = Table(
    name="toy",
    title="R&D <toy>",
    caption="Accuracy (%) of a_model at γ = +∞ | 100 %.",
    label_headings=("Method", "γ"),
    columns=("a_1", "B&Q", "Avg."),
    blocks=(
        RowBlock((Row(("Baseline", "+∞"), (Entry(45.6, 2.2), Entry(80.125, 0.9), Entry(62.9))),)),
        RowBlock(
            (
                Row(("Order <first>", "1.5"), (Entry(42.04), Entry(80.1, 0.95), Entry(61.05))),
                Row(
                    ("Random", "1.5"),
                    (Entry(41.0, 1.0, (0, 1), 1838), Missing(RUN_RANDOM), Missing(RUN_RANDOM)),
                ),
                Row(("Score", "1.5"), (Entry(41.96, 2.0), Entry(80.0), Entry(61.0, 0.1))),
            )
        ),
    ),
    notes=("Untrained: 50 % is chance.",),
)

BESIDE = Table(
    name="beside",
    title="Beside",
    caption="Accuracy (%).",
    label_headings=("Model", "Method"),
    columns=("A", "B"),
    blocks=(
        RowBlock(
            (
                Row(
                    ("OLMoE", "Baseline"),
                    (
                        Entry(43.6, 2.2, published=PrintedNumber(45.6, -2.0, -0.64)),
                        Entry(50.0, published=PrintedNumber(49.96, 0.04, None)),
                    ),
                ),
                Row(
                    ("OLMoE", "Score"),
                    (
                        Entry(40.0, 2.0, (), 500, PrintedNumber(38.5, 1.5, 0.5), worse),
                        Entry(55.0, 2.0, test=better),
                    ),
                ),
                Row(
                    ("OLMoE", "Random"),
                    (Entry(43.0, 1.0, test=same), Entry(1.0, untested="the baseline is missing")),
                ),
                Row(("OLMoE", "Order"), (Missing("run"), Missing("run"))),
            )
        ),
    ),
    notes=("▼ worse, ▲ better.",),
)
WORDS = Table(
    name="words",
    title="Words",
    caption="Settings.",
    label_headings=("Task",),
    columns=("Shots", "Metric"),
    blocks=(
        RowBlock(
            (
                Row(("BoolQ",), (CellText("0"), CellText("Accuracy"))),
                Row(("R&D",), (CellText("0"), CellText("a < b | 100 %"))),
            )
        ),
    ),
)

any_text = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12)


def table_of(label: str, heading: str, note: str) -> Table:
    rows = (Row((label,), (Entry(1.25),)), Row(("x",), (Missing(note),)))
    return Table("t", label, note, (heading,), (heading,), (RowBlock(rows),), notes=(note,))


@pytest.mark.parametrize("suffix", RENDERERS)
@pytest.mark.parametrize("table", [TOY, BESIDE, WORDS], ids=lambda table: table.name)
def test_table_is_the_golden_file(table: Table, suffix: str) -> None:
    golden = (GOLDEN / f"{table.name}.{suffix}").read_text(encoding="utf-8")
    assert RENDERERS[suffix](table) == golden


def test_csv_of_published_numbers_and_tests_is_what_pandas_reads() -> None:
    frame = pd.read_csv(io.StringIO(to_csv(BESIDE)))
    of_a = [name for name in frame.columns if name == "A" or name.startswith("A ")]
    assert of_a == [
        *("A", "A stderr", "A published", "A difference", "A z"),
        *("A effect", "A p", "A p corrected"),
    ]
    assert frame["A z"][0] == -0.64
    assert frame["A p corrected"].tolist()[1:3] == [0.0004, 0.06]
    assert frame["B z"].isna().all()


def test_csv_is_what_pandas_reads() -> None:
    frame = pd.read_csv(io.StringIO(to_csv(TOY)))
    assert list(frame.columns) == [
        *("Method", "γ", "a_1", "a_1 stderr", "B&Q", "B&Q stderr", "Avg.", "Avg. stderr"),
    ]
    assert frame["γ"].tolist() == [float("inf"), 1.5, 1.5, 1.5]
    assert frame["B&Q"].isna().tolist() == [False, False, True, False]
    assert frame["B&Q"][0] == 80.125
    assert frame["B&Q stderr"][1] == 0.95


@given(st.floats(-1e6, 1e6))
def test_csv_keeps_full_precision(value: float) -> None:
    table = Table("t", "T", "", (), ("x",), (RowBlock((Row((), (Entry(value),)),)),))
    assert float(next(csv.DictReader(io.StringIO(to_csv(table))))["x"]) == value


@given(any_text, any_text, any_text)
def test_html_keeps_any_text(label: str, heading: str, note: str) -> None:
    root = ElementTree.fromstring(to_html(table_of(label, heading, note)))
    assert [th.text or "" for th in root.iter("th")] == [heading, heading, label, "x"]
    assert [td.get("title") for td in root.iter("td")] == [None, note, None]
    assert root.findtext("tfoot/tr/td") == note


@given(any_text, any_text, any_text)
def test_markdown_keeps_the_table_whole(label: str, heading: str, note: str) -> None:
    table = to_markdown(table_of(label, heading, note)).split("\n\n")[2]
    bars = [len(re.findall(r"\|", re.sub(r"\\.", "", line))) for line in table.split("\n")]
    assert bars == [3, 3, 3, 3]


@given(any_text, any_text)
def test_latex_keeps_the_table_whole(label: str, heading: str) -> None:
    latex = to_latex(table_of(label, heading, "note"))
    body = latex.split("\\toprule\n")[1].split("\n\\bottomrule")[0]
    lines = [line for line in body.split("\n") if line != "\\midrule"]
    assert [line.endswith(r" \\") for line in lines] == [True, True, True]
    bare = [re.sub(r"\\[&%$#_{}]", "", line.removesuffix(r" \\")) for line in lines]
    assert [line.count("&") for line in bare] == [1, 1, 1]
    assert not any(re.search(r"[%#_~^]|^\s*[\[*]", line) for line in bare)
    assert all(line.count("{") == line.count("}") for line in bare)
    assert all(line.count("$") % 2 == 0 for line in bare)


@pytest.mark.parametrize("label", ["[2pt] wide", "*starred"])
def test_latex_line_break_takes_no_label_for_its_argument(label: str) -> None:
    assert f"{{{label[0]}}}{label[1:]} & " in to_latex(table_of(label, "h", "n"))


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\u2028"])
def test_text_of_several_lines_stays_in_its_cell(newline: str) -> None:
    text = f"two{newline}lines"
    assert "| two lines |" in to_markdown(table_of(text, "h", "n"))
    assert "two lines & " in to_latex(table_of(text, "h", "n"))
    assert "% missing: two lines\n" in to_latex(table_of("l", "h", text))


def test_repeated_labels_are_blank_in_print_and_full_for_machines() -> None:
    rows = tuple(Row(("OLMoE", method), (Entry(1.0),)) for method in ("Order", "Score"))
    table = Table("t", "T", "", ("Model", "Method"), ("x",), (RowBlock(rows), RowBlock(rows[:1])))
    assert to_markdown(table).count("OLMoE") == to_latex(table).count("OLMoE") == 2
    assert to_html(table).count("OLMoE") == to_csv(table).count("OLMoE") == 3


def test_write_writes_every_format(tmp_path: Path) -> None:
    paths = write(TOY, tmp_path / "new")
    assert [path.name for path in paths] == ["toy.md", "toy.tex", "toy.csv", "toy.html"]
    assert sorted(paths) == sorted((tmp_path / "new").iterdir())
    assert paths[0].read_text(encoding="utf-8") == to_markdown(TOY)
