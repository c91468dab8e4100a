"""The site in a real browser, from file://."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from site_material import Site
from tests.records import HOSTILE

from capmoe_report.report import PAGES

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
if CHROMIUM is None:
    pytest.skip("there is no chromium", allow_module_level=True)

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
    *("--disable-component-update", "--disable-sync"),
]
ROWS = "#records tbody tr:not([hidden])"


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


class Tab:
    """A page of the site, and what it complained about."""

    def __init__(self, browser: sync_api.Browser, site: Site, **options: object) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.site = site
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: self.problems.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, path: str, place: str = "") -> sync_api.Page:
        self.page.goto((self.site.out / path).as_uri() + place)
        return self.page


@pytest.fixture
def tab(browser: sync_api.Browser, site: Site) -> Iterator[Tab]:
    opened = Tab(browser, site, viewport={"width": 1000, "height": 700})
    yield opened
    opened.context.close()
    assert opened.problems == []
    assert all(url.startswith("file://") for url in opened.requests)


def column(page: sync_api.Page, number: int, rows: str = ROWS) -> list[str]:
    return page.locator(f"{rows} > :nth-child({number})").all_inner_texts()


@pytest.mark.parametrize("path", PAGES)
def test_no_page_is_wider_than_the_screen(tab: Tab, path: str) -> None:
    page = tab.open(path)
    for width in (400, 1000, 1300):
        page.set_viewport_size({"width": width, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_heading_sorts_up_then_down_then_as_written(tab: Tab) -> None:
    page = tab.open("records.html")
    written = column(page, 5)
    head = page.locator("#records thead th").nth(4)
    for direction, is_reversed in (("ascending", False), ("descending", True)):
        head.click()
        assert head.get_attribute("aria-sort") == direction
        values = [float(text.split()[0]) for text in column(page, 5)]
        assert values == sorted(values, reverse=is_reversed)
    head.focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "none"
    assert column(page, 5) == written


def test_filters_by_hand_and_by_address(tab: Tab) -> None:
    page = tab.open("records.html")
    count = len(column(page, 1))
    page.get_by_label("method").select_option("score")
    page.get_by_label("task").select_option("piqa")
    # Three γ of the table, and the odd record.
    assert column(page, 3) == ["score"] * 4
    assert page.locator("output").inner_text() == f"4 of {count} rows"
    page = tab.open("records.html", "#model=zoo_olmoe&task=piqa&method=baseline&gamma=%2B%E2%88%9E")
    assert column(page, 3) == ["baseline"]


def test_what_is_named_like_markup_is_text(tab: Tab) -> None:
    assert HOSTILE in column(tab.open("records.html"), 1)


def test_without_script_all_is_there(browser: sync_api.Browser, site: Site) -> None:
    plain = Tab(browser, site, java_script_enabled=False)
    page = plain.open("records.html")
    assert len(column(page, 1)) == 134
    assert page.locator(".filters").is_hidden()
    plain.context.close()
