"""README and docs have the numbers of the records, and no measured number of their own."""

import re
import textwrap
from pathlib import Path

import pytest

from pages import ROOT, pages, present, record_schema, without_blocks
from pages.blocks import BLOCKS
from tests.satellites import NEEDS_METHODS

pytestmark = NEEDS_METHODS  # the records have all methods

GENERATED = {"models.md", "bill_of_materials.md"}
"""Pages that are written as a whole; tests of theirs compare them."""
BY_HAND = {"others.md", "artifact.md"}
"""Pages of numbers that others measured, and of what a checkout takes on one machine."""
MEASURED = re.compile(
    r"\[[−+-]?\d[\d.]*, [−+-]?\d[\d.]*\]"  # an interval
    r"|± ?\d"
    r"|\d ?%"
    r"|\d (?:points|minutes|seconds|ms|µs|ns|s|times|GB|GiB|MB|MiB|kB)\b"
)
STATED = re.findall(
    r"[^|\n]+",
    textwrap.dedent("""
    9.8 % of the assignments|gain of 7 to 8 points|97.3 % fits
    4.0 points of perception|450 GB/s per direction|2, 4 and 7 times the mean|below 9.8 %
    drawn at 7.2, has 5.6 times the mean|its own imbalance 1.4 to 1.63 times smaller

    95 % interval|means 95 %|± 1.96 standard errors|can exceed 100 %
    least 20 points|covers at least 93 %
    may drop 5 % of the pairs|has 1.23 times the mean load
    from 1 to 30 %|√2 times our standard error|(to 27 % of the steps)|open questions (to 44 %)

    ≤ 3 %

    one 80 GB GPU|one of 80 GB|needs 40 GB of free memory
    less than 25 minutes|64 GB and four hours
    limit of 240 minutes|3 seconds of CPU time|after 60 seconds
    3 s of CPU time|512 MiB|ended 3 seconds after
    200 GB/s, 20 µs|The latency (20 µs there)
"""),
)
"""Parts of lines with numbers that were not measured here, in four groups: of the paper; levels and
bounds of definitions; targets, of which results/bench says whether they are met; limits, defaults
and sizes of what is asked for."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


SLOW = {
    "advice-with-results",
    "images",
    "macs",
    "adaptive-verdict",
    "protocol-real",
    "protocol-fresh",
    "fresh-verdicts",
    "fresh-readings",
}


def test_every_block_stands_on_one_page() -> None:
    assert present().keys() == BLOCKS.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in BLOCKS]
)
def test_a_block_is_what_the_records_and_commands_give(name: str) -> None:
    assert present()[name] == BLOCKS[name](), "`make pages` writes it anew"


def test_the_schema_of_records_is_what_they_are_checked_by() -> None:
    assert record_schema.FILE.read_text("utf-8") == record_schema.text(), "`make pages` writes it"


def measured(page: str) -> list[str]:
    """Return the lines of a page that seem to have a number of ours, without examples of code."""
    text = re.sub(r"^```.*?^```", "", without_blocks(page), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith("    ")]
    for words in STATED:
        lines = [line.replace(words, "") for line in lines]
    return [line for line in lines if MEASURED.search(line)]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=name_of(path))
        for path in pages()
        if path.name not in {*GENERATED, *BY_HAND}
    ],
)
def test_measured_numbers_stand_in_blocks(path: Path) -> None:
    assert measured(path.read_text(encoding="utf-8")) == []


def test_a_measured_number_outside_of_a_block_is_seen() -> None:
    block = "<!-- caption: make pages -->\nIt gains +0.1 [−0.2, +0.3].\n<!-- end of caption -->\n"
    assert measured(block) == []
    lines = ("It gains +0.1 [−0.2, +0.3].", "23.5 ± 3.0 right", "drops 14 to 16 % of them", "5 ms")
    assert measured(block + "\n".join(lines)) == list(lines)
