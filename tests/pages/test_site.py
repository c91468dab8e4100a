"""Links lead somewhere, and the site of the documentation needs no network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from capmoe_eval.report.figures.command import images_of
from pages import DOCS, ROOT, pages
from pages.blocks import PICTURES

SITE = ROOT / "reports" / "docs"
LINKING = [*pages(), ROOT / "examples/README.md", *sorted((DOCS / "log").glob("*.md"))]


NAMED = r"`((?:benchmarks|capmoe_eval|conf|docs|examples|packages|pages|tests)/[\w./-]+)"
"""A file of the repository."""


@pytest.mark.parametrize("path", LINKING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_file_that_a_page_names_is_there(path: Path) -> None:
    page = path.read_text("utf-8")
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    targets = {target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)}
    files = {path.parent / target for target in targets if target and "://" not in target}
    if path in pages():  # the log names files of its time
        files |= {ROOT / name for name in re.findall(NAMED, page)}
    assert sorted(str(file) for file in files if not file.exists()) == []


@pytest.mark.slow
@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_that_of_the_records(path: Path) -> None:
    image = images_of(PICTURES[path], ["svg"])["svg"]
    assert path.read_bytes() == image, "`make pages` draws it anew"


@pytest.mark.skipif(not SITE.exists(), reason="there is no site: make docs")
def test_the_site_loads_nothing_from_a_network() -> None:
    loads = re.compile(
        r"""<(?:script|img|iframe)[^>]+src=["']?https?:|<link[^>]+stylesheet[^>]+https?:"""
    )
    written = list(SITE.rglob("*.html"))
    assert len(written) >= len(list(DOCS.rglob("*.md")))
    assert [path.name for path in written if loads.search(path.read_text("utf-8"))] == []
