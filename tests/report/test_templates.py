from __future__ import annotations

import html

import pytest
from jinja2 import UndefinedError

from capmoe_eval.report import templates

HOSTILE = "<b>&\"'{{ 1 }}"


def test_values_are_escaped_as_the_standard_library_does() -> None:
    macros = templates._environment().from_string(
        '{% from "macros.html" import badge, pairs %}{{ badge(word) }}{{ pairs([(word, word)]) }}'
    )
    found = templates._spelled(macros.render(word=HOSTILE))
    text = html.escape(HOSTILE)
    assert found.startswith(f'<span class="badge -b-">{text}</span>')
    assert f'<th scope="row">{text}</th><td>{text}</td>' in found


def test_a_value_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="table"):
        templates.render("table.html")


def test_line_breaks_of_a_template_are_for_its_reader() -> None:
    source = '<p\n  id="a">\n  two\n  words\n  {{ x }}\n</p>{{ "\\n" }}\n'
    environment = templates._environment()
    extension = next(iter(environment.extensions.values()))
    assert extension.preprocess(source, "a.html") == '<p id="a">two words{{ x }}</p>{{ "\\n" }}'
    assert extension.preprocess(source, "a.css") == source
