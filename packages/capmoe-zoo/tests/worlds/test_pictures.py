"""Answers are right by construction: they are read again from the scene, by other means."""

from __future__ import annotations

import re

import numpy as np
from capmoe_eval.evaluation.multimodal import scores
from capmoe_eval.zoo.sets import documents
from hypothesis import given
from hypothesis import strategies as st

from capmoe_zoo.worlds.draw import Draw
from capmoe_zoo.worlds.pictures.evaluation import (
    SETS,
)
from capmoe_zoo.worlds.pictures.questions import choice, claim, facts
from capmoe_zoo.worlds.pictures.scene import WORLD, scene

# Answers are right by construction: they are found again from the scene, by other means.


seeds = st.integers(0, 10**9).map(lambda seed: Draw(f"test-{seed}"))


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


# The sets have the form of MME, MMBench and SEED-Bench, and most of a picture is redundant.


def rows(split="test"):
    sets = documents("pictures", split)
    return (
        sets["lmms-lab/MME"]["default"]["test"],
        sets["lmms-lab/MMBench"]["en"]["dev"],
        sets["lmms-lab/SEED-Bench"]["default"]["test"],
    )


def test_the_categories_are_those_of_the_tasks():
    assert [*scores.MME["perception"], *scores.MME["cognition"]] == list(SETS.mme)
    assert list(scores.CAPABILITIES) == list(SETS.mmbench)
    assert len(scores.DIMENSIONS) == len(SETS.seedbench)
