"""The site in a real browser, from file://."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.report.site.conftest import Site
from tests.report.site.material import HOSTILE

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
if CHROMIUM is None:
    pytest.skip("there is no chromium", allow_module_level=True)

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
    *("--disable-component-update", "--disable-sync"),
]
TABLES, RECORDS = "site/tables.html", "site/records.html"
TABLE1, FIRST = "#table1 table.sortable", "#table1 tbody tr:not([hidden])"


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

    def open(self, path: str) -> sync_api.Page:
        self.page.goto((self.site.out / path).as_uri())
        return self.page


@pytest.fixture
def tab(browser: sync_api.Browser, site: Site) -> Iterator[Tab]:
    opened = Tab(browser, site, viewport={"width": 1000, "height": 700})
    yield opened
    opened.context.close()
    assert opened.problems == []
    assert all(url.startswith("file://") for url in opened.requests)


def hostile_page(site: Site) -> str:
    return next(path for path in site.pages if path.startswith("site/cells/_img_src"))


def column(page: sync_api.Page, number: int) -> list[str]:
    return page.locator(f"{FIRST} > :nth-child({number})").all_inner_texts()


def test_every_kind_of_page_works_without_network(tab: Tab, site: Site) -> None:
    kinds = [path for path in site.pages if path.endswith(".html") and "/cells/" not in path]
    for path in (*kinds, hostile_page(site)):
        page = tab.open(path)
        assert page.locator("h1").count() == 1
        for width in (400, 1000, 1300):
            page.set_viewport_size({"width": width, "height": 700})
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
    assert len(kinds) == 10
    assert len(tab.requests) > 10


def test_a_click_sorts(tab: Tab) -> None:
    page = tab.open(TABLES)
    # Row labels: Method, γ; then OBQA, the third column.
    written = column(page, 3)
    head = page.locator(f"{TABLE1} thead th").nth(2)
    assert head.get_attribute("aria-sort") == "none"
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    values = [float(text.split(" ")[0].rstrip("▼▲")) for text in column(page, 3)]
    assert values == sorted(values)
    assert len(set(values)) > 3
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    values = [float(text.split(" ")[0].rstrip("▼▲")) for text in column(page, 3)]
    assert values == sorted(values, reverse=True)
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "none"
    assert column(page, 3) == written
    assert page.locator("#table1 tbody").nth(1).locator("tr").count() == 4


def test_keys_sort(tab: Tab) -> None:
    page = tab.open(TABLES)
    heads = page.locator(f"{TABLE1} thead th")
    heads.nth(0).get_by_role("button").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert heads.nth(1).get_attribute("aria-sort") == "ascending"
    assert column(page, 2) == ["1.0"] * 4 + ["1.5"] * 4 + ["2.0"] * 4 + ["+∞"]
    page.keyboard.press("Space")
    assert column(page, 2)[0] == "+∞"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    assert [h.get_attribute("aria-sort") for h in heads.all()[:2]] == ["ascending", "none"]
    assert column(page, 1)[0] == "Baseline"


def test_missing_numbers_stay_last(tab: Tab) -> None:
    page = tab.open(TABLES)
    # One record of the baseline is cut off.
    number = next(
        i for i in range(3, 12) if len(set(column(page, i)) - {"—"}) and "—" in column(page, i)
    )
    button = page.locator(f"{TABLE1} thead th").nth(number - 1).get_by_role("button")
    for _ in range(2):
        button.click()
        found = column(page, number)
        assert found[-found.count("—") :] == ["—"] * found.count("—")


def test_filters_hide_rows_and_show_them_again(tab: Tab) -> None:
    page = tab.open(TABLES)
    assert page.get_by_role("status").inner_text() == "All 16 rows"
    page.get_by_label("γ", exact=True).select_option("1.5")
    assert column(page, 2) == ["+∞"] + ["1.5"] * 4
    page.get_by_label("Method", exact=True).select_option("score")
    assert column(page, 1) == ["Baseline", "Score"]
    page.get_by_label("keep the baselines").uncheck()
    assert column(page, 1) == ["Score"]
    assert page.get_by_role("status").inner_text() == "1 of 16 rows"
    # Table 3 has no such row and says so; the table of settings has no such columns and stays.
    assert page.locator("#table3 table").is_hidden()
    assert page.locator("#table5 table").is_visible()
    page.get_by_label("Model", exact=True).select_option("zoo_qwen3_moe")
    assert column(page, 1) == []
    page.get_by_role("button", name="Show all").click()
    assert len(column(page, 1)) == 13
    assert page.get_by_role("status").inner_text() == "All 16 rows"
    assert page.get_by_label("keep the baselines").is_checked()


def test_a_filter_keeps_the_sorting(tab: Tab) -> None:
    page = tab.open(RECORDS)
    page.get_by_label("Task", exact=True).select_option("piqa")
    page.get_by_role("button", name="Score (%)").click()
    rows = page.locator("tbody tr:not([hidden])")
    values = [float(row.locator("td").nth(4).inner_text()) for row in rows.all()]
    assert len(values) == 20
    assert values == sorted(values)


def test_claims_are_filtered(tab: Tab) -> None:
    page = tab.open("site/claims.html")
    page.get_by_label("Verdict", exact=True).select_option("confirmed")
    assert page.locator("tr[data-verdict]:not([hidden])").count() == 1
    page.get_by_text("what was found").first.click()
    assert page.get_by_role("link", name="zoo_olmoe").is_visible()


def test_dark_and_light(tab: Tab) -> None:
    page = tab.open("index.html")

    def colours() -> list[str]:
        return page.evaluate(
            "[...['backgroundColor', 'color'].map((n) => getComputedStyle(document.body)[n])]"
        )

    page.emulate_media(color_scheme="light")
    light = colours()
    page.emulate_media(color_scheme="dark")
    assert light == ["rgb(255, 255, 255)", "rgb(27, 29, 31)"]
    assert colours() == ["rgb(21, 24, 27)", "rgb(228, 230, 232)"]


def test_what_is_named_like_markup_is_text(tab: Tab, site: Site) -> None:
    page = tab.open(hostile_page(site))
    assert page.locator("h1").inner_text().startswith(f"{HOSTILE} on piqa")
    assert HOSTILE in page.locator("pre").first.inner_text()
    page = tab.open(RECORDS)
    assert page.get_by_role("rowheader", name=HOSTILE, exact=True).count() == 1
    assert "empty&<b>.json: not a whole record" in page.locator(".notice").first.inner_text()
    assert page.locator("b").count() == 0


def test_print(tab: Tab) -> None:
    page = tab.open(TABLES)
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator("nav").is_hidden()
    assert page.locator(".filters").is_hidden()
    assert page.locator(TABLE1).is_visible()
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    closed = page.locator("details:not([open])").count()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert closed
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() == closed


def test_the_skip_link_comes_first_and_focus_is_seen(tab: Tab) -> None:
    page = tab.open(TABLES)
    page.keyboard.press("Tab")
    focused = page.locator(":focus")
    assert focused.inner_text() == "Skip to the content"
    assert focused.bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_narrow(browser: sync_api.Browser, site: Site) -> None:
    narrow = Tab(browser, site, viewport={"width": 400, "height": 700})
    for path in ("index.html", TABLES, RECORDS, "site/claims.html", hostile_page(site)):
        page = narrow.open(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, path
    narrow.context.close()


def test_without_script_all_is_there(browser: sync_api.Browser, site: Site) -> None:
    plain = Tab(browser, site, java_script_enabled=False)
    page = plain.open(TABLES)
    assert page.locator(FIRST).count() == 13
    assert page.locator(".filters").is_hidden()
    plain.context.close()
