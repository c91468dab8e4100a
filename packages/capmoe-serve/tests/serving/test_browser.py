"""The page of an advice in a real browser, from file://."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.report.site.test_browser import browser, sync_api  # noqa: F401

from capmoe_serve.advice import Budget
from capmoe_serve.advising import ServingDeployment, advise_on_trace
from capmoe_serve.page import to_html
from serving.test_front import skewed


@pytest.mark.parametrize("width", [400, 1300])
def test_nothing_of_an_advice_is_cut(
    browser: sync_api.Browser,  # noqa: F811
    tmp_path: Path,
    width: int,
) -> None:
    asked = Budget(at_least_speedup=1.2)
    advice, _ = advise_on_trace(skewed(), (0.5, 1.0), ServingDeployment(4), asked)
    commands = [f"capmoe-eval sweep model=m method={'score,' * 60}order gamma=1.0"]
    (tmp_path / "advice.html").write_text(to_html(advice.model_copy(update={"commands": commands})))
    page = browser.new_page(viewport={"width": width, "height": 700})
    page.goto((tmp_path / "advice.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("pre").evaluate("box => box.scrollWidth <= box.clientWidth")
    picture = page.locator("img.front").evaluate("""image => {
      const [box, paper] = [image, image.parentElement].map((node) => node.getBoundingClientRect());
      return [image.complete && image.naturalWidth > 0, paper.right <= innerWidth, box.width];
    }""")
    assert picture[:2] == [True, True]
    assert picture[2] >= min(0.8 * width, 500)
    first = page.locator(".settings tbody th").first
    assert first.evaluate("cell => cell.clientWidth") >= min(0.45 * width, 200)
    page.close()
