"""Links lead somewhere, and the site of the documentation needs no network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from capmoe_eval.report.figures.write import images_of
from pages import DOCS, ROOT, pages
from pages.blocks import PICTURES

MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUERIES = {
    "out of memory": "reference/errors",
    "capacity factor": "explanation/capacity",
    "my model is not supported": "reference/models",
    "slurm": "how-to/clusters",
    "vllm plugin": "server",
    "resume after interruption": "how-to/evaluate",
    "padding": "reference/generation",
    "expert parallel ranks": "how-to/expert_parallel",
    "write own method": "tutorials/own_method",
    "what does peak mean": "start/terms",
    "gated dataset offline": "reference/errors",
    "cite": "index",
    "custom model data.root": "tutorials/own_model",
    "number of experts record size": "reference/records",
    "sglang trace": "reference/traces",
    "effective gamma": "explanation/capacity",
    "humaneval sandbox": "how-to/run_programs",
    "multi gpu": "how-to/clusters",
}
"""Words that users search for, and a page that must be among the first three."""
_RESULT = ".md-search-result__item > a"
LINKING = [
    *pages(),
    ROOT / "examples/README.md",
    *sorted((DOCS / "log").glob("*.md")),
]


@pytest.mark.parametrize("path", LINKING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_to_a_file_leads_to_one(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    targets = {target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)}
    files = {target for target in targets if target and "://" not in target}
    assert sorted(name for name in files if not (path.parent / name).exists()) == []


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_file_of_the_repository_that_a_page_names_is_there(path: Path) -> None:
    named = re.findall(
        r"`((?:capmoe_eval|conf|docs|examples|tests)/[\w./-]+)", path.read_text("utf-8")
    )
    assert sorted(name for name in set(named) if not (ROOT / name).exists()) == []


@pytest.mark.slow
@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_that_of_the_records(path: Path) -> None:
    image = images_of(PICTURES[path], ["svg"])["svg"]
    assert path.read_bytes() == image, "`make pages` draws it anew"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a broken link or anchor, or a page that no menu has, ends the build."""
    if not MKDOCS.exists():
        pytest.skip("MkDocs is not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [str(MKDOCS), "build", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_every_page_and_loads_nothing_from_a_network(site: Path) -> None:
    written = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    docs = {
        path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
    }
    assert docs <= written
    loads = re.compile(
        r"""<(?:script|img|iframe)[^>]+src=["']?https?:|<link[^>]+stylesheet[^>]+https?:"""
    )
    assert [
        path.name for path in site.rglob("*.html") if loads.search(path.read_text("utf-8"))
    ] == []


@pytest.mark.slow
def test_the_api_has_the_public_names(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text("utf-8")
    for name in (
        "session.capacity_aware",
        "frames.load_frame",
        "registry.register",
        "Meter.summary",
    ):
        assert f'{name}"' in page


@pytest.fixture(scope="module")
def search(site: Path) -> Iterator[Callable[[str], list[str]]]:
    """A search of the site from the disk; it returns the pages, the best first."""
    playwright = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("there is no chromium")
    requested: list[str] = []
    with playwright.sync_playwright() as engines:
        browser = engines.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(600_000)  # a loaded machine starts a page slowly
        page.on("request", lambda request: requested.append(request.url))

        def results(query: str) -> list[str]:
            page.goto(f"{(site / 'index.html').as_uri()}?q={quote(query)}", wait_until="commit")
            page.wait_for_selector(_RESULT, state="attached")
            links = page.eval_on_selector_all(_RESULT, "links => links.map(link => link.href)")
            places = (link.removeprefix(f"{site.as_uri()}/") for link in links)
            return list(dict.fromkeys(re.split("[?#]", place)[0] for place in places))

        yield results
        browser.close()
    assert [url for url in requested if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.mark.slow
@pytest.mark.parametrize(("query", "page"), QUERIES.items())
def test_a_query_leads_to_its_page(
    query: str, page: str, search: Callable[[str], list[str]]
) -> None:
    assert f"{page}.html" in search(query)[:3]
