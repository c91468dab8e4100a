"""Answers are right by construction: they are found again from the scene, by other means."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capmoe_zoo.worlds.draw import Draw
from capmoe_zoo.worlds.pictures import questions
from capmoe_zoo.worlds.pictures.drawing import CELL, picture
from capmoe_zoo.worlds.pictures.questions import choice, claim, content, facts, named_patches
from capmoe_zoo.worlds.pictures.scene import CELLS, WORLD, Scene, Text, Thing, scene

seeds = st.integers(0, 10**9).map(lambda seed: Draw(f"test-{seed}"))


def empty(*things, **parts):
    return Scene(**{"place": "beach", "painter": None, "figure": None, "held": None, "text": None}
                 | {"things": things} | parts)  # fmt: skip


def occupied(shown):
    cells = [thing.cell for thing in shown.things]
    if shown.figure:
        row, column = shown.figure.cell
        cells += [(row, column), (row + 1, column)]
    if shown.text:
        cells += [(shown.text.row, column) for column in range(CELLS)]
    return cells


@given(seeds)
def test_no_two_share_a_cell(draw):
    shown = scene(draw)
    cells = occupied(shown)
    assert len(cells) == len(set(cells))
    assert all(0 <= place < CELLS for cell in cells for place in cell)
    assert 1 <= len(shown.things) <= 7


def read(question, shown):
    """Return the answer to an open question, by its words and the scene alone."""
    things = shown.things
    if found := re.fullmatch(r"How many (\w+)s\?", question):
        return str(len([thing for thing in things if thing.shape == found[1]]))
    if found := re.fullmatch(r"Where is (\w+ \w+)\?", question):
        (thing,) = (thing for thing in things if thing.phrase == found[1])
        row, column = thing.cell
        return f"{'north' if row < 3 else 'south'}{'west' if column < 3 else 'east'}"
    if found := re.fullmatch(r"Color of the (\w+)\?", question):
        (thing,) = (thing for thing in things if thing.shape == found[1])
        return thing.color
    if found := re.fullmatch(r"Which shape is (\w+)\?", question):
        (thing,) = (thing for thing in things if thing.color == found[1])
        return thing.shape
    if found := re.fullmatch(r"Where is (\w+ \w+) from (\w+ \w+)\?", question):
        here, there = (
            next(thing.cell for thing in things if thing.phrase == found[group]) for group in (1, 2)
        )
        steps = (np.sign(here[0] - there[0]), np.sign(here[1] - there[1]))
        return {(0, -1): "left", (0, 1): "right", (-1, 0): "above", (1, 0): "below"}[steps]
    if found := re.fullmatch(r"What matches the (\w+)\?", question):
        (color,) = (thing.color for thing in things if thing.shape == found[1])
        (other,) = (
            thing.shape for thing in things if thing.color == color and thing.shape != found[1]
        )
        return other
    if question == "Most frequent shape?":
        counts = {shape: sum(thing.shape == shape for thing in things) for shape in WORLD.shapes}
        (most,) = (shape for shape, count in counts.items() if count == max(counts.values()))
        return most
    if question == "What should drivers do?":
        return {"red": "stop", "yellow": "wait", "green": "go", "dark": "look"}[shown.figure.name]
    if question == "Which sum?":
        first, second = shown.text.letters.split("+")
        return str(int(first) + int(second))
    if question == "What is printed?":
        first, second = shown.text.letters.split("*")
        return str(int(first) * int(second))
    if question == "Which meaning?":
        return {"BEL": "fish", "BER": "tree", "DEL": "road", "DER": "milk"}[shown.text.letters]
    if question in ("Which word?", "Which title?"):
        written = shown.text.letters.lower()
        return written if "word" in question else written.capitalize()
    return {
        "Which place?": lambda: shown.place,
        "Which painter?": lambda: shown.painter,
        "Which person?": lambda: shown.figure.name,
        "Which building?": lambda: shown.figure.name,
        "What is held?": lambda: shown.held.shape,
    }[question]()


@given(seeds)
def test_every_answer_is_right_and_the_others_are_wrong(draw):
    shown = scene(draw)
    for fact in facts(shown):
        assert len(set(fact.wrong)) >= 3
        assert fact.value not in fact.wrong
        if fact.kind == "existence":
            phrases = {thing.phrase for thing in shown.things}
            assert fact.value in phrases
            assert not phrases & set(fact.wrong)
        else:
            assert read(fact.ask, shown) == fact.value


@given(seeds)
def test_the_forms_of_a_question(draw):
    for fact in facts(scene(draw)):
        for true in (True, False):
            question, value = claim(fact, draw, true=true)
            assert question == f"{fact.ask} Is it {value}?"
            assert (value == fact.value) == true
            assert (value in fact.wrong) != true
        made = choice(fact, draw)
        assert len(set(made.options)) == 4
        assert made.options["ABCD".index(made.answer)] == fact.value


def test_every_kind_is_asked_for_somewhere():
    draw = Draw("kinds")
    kinds = {fact.kind for _ in range(300) for fact in facts(scene(draw))}
    assert kinds == set(WORLD.questions)


def test_an_ambiguous_thing_is_not_asked_for():
    twice = empty(Thing("red", "ring", (0, 0)), Thing("red", "ring", (0, 1)))
    assert {fact.kind for fact in facts(twice)} == {"existence", "count", "place"}
    aslant = empty(Thing("red", "ring", (0, 0)), Thing("blue", "star", (1, 1)))
    assert "relation" not in {fact.kind for fact in facts(aslant)}


@given(seeds)
def test_the_content_of_a_cell(draw):
    shown = scene(draw)
    question, answer = content(shown, draw)
    row, column = (int(part) - 1 for part in re.findall(r"\d", question))
    there = [thing.phrase for thing in shown.things if thing.cell == (row, column)]
    assert answer == (there[0] if there else "nothing")


@given(seeds)
def test_the_names_of_patches(draw):
    shown = scene(draw)
    named = named_patches(shown, draw)
    for thing in shown.things:
        row, column = thing.cell
        own = [named[2 * row + i // 2, 2 * column + i % 2] for i in range(4)]
        quarter = f"{'north' if row < 3 else 'south'}{'west' if column < 3 else 'east'}"
        assert own == [thing.color, thing.shape, thing.shape, quarter]
    if shown.text:
        words = [word for (row, _), word in named.items() if row // 2 == shown.text.row]
        assert words.count(shown.text.value) == 2 * len(shown.text.letters)


def test_a_picture_is_drawn_by_its_seed():
    shown = scene(Draw("x"))
    first, again, other = (np.asarray(picture(shown, Draw(seed)), int) for seed in "aab")
    assert first.shape == (96, 96, 3)
    assert (first == again).all()
    assert 2 < np.abs(first - other).mean() < 60  # noise, light and jitter


@pytest.mark.parametrize(("kind", "pair"), [("word", ("cat", "car")), ("sum", ("1+2", "1+3"))])
def test_the_letter_that_tells_may_be_hidden(kind, pair):
    """Two texts that differ in a letter are one picture where it is hidden; no digit ever is."""
    alike = 0
    for seed in range(40):
        texts = (Text(kind, letters.upper(), letters, 0, 2) for letters in pair)
        first, second = (np.asarray(picture(empty(text=text), Draw(f"{seed}"))) for text in texts)
        alike += (first == second).all()
    assert 1 <= alike <= 15 if kind == "word" else alike == 0


@pytest.mark.parametrize("color", list(WORLD.colors))
@pytest.mark.parametrize("shape", WORLD.shapes)
def test_a_thing_has_its_colour_where_it_stands(color, shape):
    """Averaged over pictures, the cell changes towards the colour, and no other cell changes."""
    with_it, without = empty(Thing(color, shape, (2, 1))), empty()
    change = np.zeros((96, 96, 3))
    for seed in range(12):
        change += np.asarray(picture(with_it, Draw(f"{seed}")), float)
        change -= np.asarray(picture(without, Draw(f"{seed} other")), float)
    cells = np.abs(change / 12).reshape(CELLS, CELL, CELLS, CELL, 3).mean((1, 3))
    lower = cells[2:]  # above the horizon the jitter of the background is as large
    assert lower.sum(-1).argmax() == 1
    assert questions.facts(with_it)[0].value == f"{color} {shape}"
