from __future__ import annotations

import pytest
from jinja2 import UndefinedError

from capmoe_eval.report.templates import render


def test_a_value_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="titles"):
        render("site/records.html")
