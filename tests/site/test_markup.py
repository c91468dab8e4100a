from __future__ import annotations

from capmoe_eval.site import page
from capmoe_eval.site.markup import Markup, element, join


def test_texts_are_escaped_and_markup_is_not() -> None:
    inner = element("b", '<1> & "2"')
    assert inner == "<b>&lt;1&gt; &amp; &quot;2&quot;</b>"
    assert element("p", inner, "<", None, ["a", [inner]]) == f"<p>{inner}&lt;a{inner}</p>"


def test_attributes() -> None:
    found = element("a", "x", href='"><', class_="c", data_gamma=1.0, hidden=True, id=None)
    assert found == '<a href="&quot;&gt;&lt;" class="c" data-gamma="1.0" hidden>x</a>'
    assert element("input", checked=False, name="n") == '<input name="n">'


def test_what_is_joined_is_markup() -> None:
    assert isinstance(join("<"), Markup)
    assert join("<", Markup("<br>")) == "&lt;<br>"


def test_a_text_that_equals_markup_is_escaped() -> None:
    found = page.pairs([("one", Markup("<b>")), ("one", "<b>"), ("one", Markup("<b>"))])
    assert found.count("<td><b></td>") == 2 and found.count("<td>&lt;b&gt;</td>") == 1
    text = join(Markup("<i>"), "<i>", Markup("<i>"))
    assert text == "<i>&lt;i&gt;<i>"
