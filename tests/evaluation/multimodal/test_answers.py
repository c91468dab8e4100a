"""Answers are read by fixed rules."""

import pytest

from capmoe_eval.evaluation.multimodal.answers import first_word, option, yes_or_no

COLORS = {"A": "red", "B": "dark blue", "C": "blue", "D": "a cat"}


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        ("yes", "yes"),
        (" Yes, it is.", "yes"),
        ("NO", "no"),
        ("\n**No**", "no"),
        ("not at all", None),
        ("yesterday", None),
        ("I think yes", None),
        ("", None),
    ],
)
def test_yes_or_no_is_the_first_word(answer, read):
    assert yes_or_no(answer) == read


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        (" B", "B"),
        ("(C)", "C"),
        ("The answer is D.", "D"),
        ("b", None),
        ("A or B", None),
        ("A", "A"),
        ("A red thing.", "A"),  # three words
        ("A thing that is red", "A"),  # by its text: here A is an article
        ("A thing that is pink", None),
        ("It is Red", "A"),
        ("dark blue", None),  # blue is in it, too
        ("blue", "C"),
        ("E", None),
        ("", None),
    ],
)
def test_an_option_is_chosen_by_its_letter_or_else_its_text(answer, read):
    assert option(answer, COLORS) == read


@pytest.mark.parametrize(
    ("answer", "word"),
    [(" Red cross", "red"), ("yes.", "yes"), ("\n- No, it is not", "no"), (" \n?", None)],
)
def test_the_first_word_is_an_answer(answer, word):
    assert first_word(answer) == word
