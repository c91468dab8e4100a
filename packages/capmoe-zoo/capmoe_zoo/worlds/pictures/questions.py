"""Derive questions and their answers from a scene, in three forms.

An open question is answered by a word; a claim by yes or no; a choice by the letter of an option.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from capmoe_eval.zoo.llava import PATCHES

from capmoe_zoo.worlds.draw import Draw
from capmoe_zoo.worlds.pictures.scene import CELLS, WORLD, Cell, Scene, Thing

LETTERS = "ABCD"
_MOST_COUNTED = 6
# Share of the patches of the background that are named.
_NAMED_GROUND = 0.1


@dataclass(frozen=True)
class PictureFact:
    """Something that a scene answers."""

    kind: str  # a question of ``world.yaml``
    ask: str  # the question itself
    value: str  # the right answer
    wrong: tuple[str, ...]  # three answers or more


@dataclass(frozen=True)
class Choice:
    """A question with four options."""

    question: str
    options: tuple[str, ...]
    answer: str  # the letter


def claim(fact: PictureFact, draw: Draw, *, true: bool) -> tuple[str, str]:
    """Return a question whose answer is yes if ``true``, else no, and the answer it supposes."""
    value = fact.value if true else draw.one(fact.wrong)
    return f"{fact.ask} Is it {value}?", value


def choice(fact: PictureFact, draw: Draw) -> Choice:
    """Return a question with the right and three wrong options in a random order."""
    options = tuple(draw.shuffled([fact.value, *draw.some(fact.wrong, 3)]))
    return Choice(fact.ask, options, LETTERS[options.index(fact.value)])


def content(scene: Scene, draw: Draw) -> tuple[str, str]:
    """Return a question after the thing in a cell, which may be empty, and its answer."""
    phrases = {thing.cell: thing.phrase for thing in scene.things}
    anywhere = (draw.below(CELLS), draw.below(CELLS))
    cell = draw.one(list(phrases)) if draw.chance(0.7) else anywhere
    question = f"What is in row {cell[0] + 1}, column {cell[1] + 1}?"
    return question, phrases.get(cell, "nothing")


def named_patches(scene: Scene, draw: Draw) -> dict[tuple[int, int], str]:
    """Return a word for some patches, by their row and column: what the patch is a part of.

    A cell has 2 by 2 patches; those of a thing are named after its colour, its shape, its shape
    again, and its quarter of the picture.
    """
    named = {}
    for row in range(PATCHES):
        for column in range(PATCHES):
            edge = {row, column} & {0, PATCHES - 1}
            if draw.chance(_NAMED_GROUND):
                named[row, column] = (edge and scene.painter) or scene.place
    for thing in scene.things:
        words = (thing.color, thing.shape, thing.shape, _quarter(thing.cell))
        named |= dict(zip(_patches(thing.cell), words, strict=True))
    figure = scene.figure
    if figure is not None:
        below = (figure.cell[0] + 1, figure.cell[1])
        name = WORLD.lights[figure.name] if figure.kind == "light" else figure.name
        named |= dict.fromkeys([*_patches(figure.cell), *_patches(below)], name)
    text = scene.text
    if text is not None:
        for column in range(text.start, text.start + len(text.letters)):
            named |= {(2 * text.row + half, column): text.value for half in (0, 1)}
    return named


def _patches(cell: Cell) -> list[tuple[int, int]]:
    row, column = 2 * cell[0], 2 * cell[1]
    return [(row + below, column + beside) for below in (0, 1) for beside in (0, 1)]


def facts(scene: Scene) -> list[PictureFact]:
    """Return all that is asked of a scene."""
    return [*_of_things(scene.things), *_of_the_rest(scene)]


def _fact(kind: str, value: str, possible: Iterable[str], **words: str) -> PictureFact:
    """Return a fact; the ``words`` fill the wording."""
    wrong = tuple(other for other in possible if other != value)
    return PictureFact(kind, WORLD.questions[kind].format(**words), value, wrong)


def _of_things(things: Sequence[Thing]) -> Iterator[PictureFact]:
    colors = Counter(thing.color for thing in things)
    shapes = Counter(thing.shape for thing in things)
    phrases = Counter(thing.phrase for thing in things)
    absent = [
        f"{color} {shape}"
        for color in WORLD.colors
        for shape in WORLD.shapes
        if f"{color} {shape}" not in phrases and (color in colors or shape in shapes)
    ]
    for thing in things:
        yield _fact("existence", thing.phrase, absent)
        if colors[thing.color] == 1:
            yield _fact("shape", thing.shape, WORLD.shapes, color=thing.color)
        if shapes[thing.shape] == 1:
            yield _fact("color", thing.color, WORLD.colors, shape=thing.shape)
            alike = [other for other in things if other.color == thing.color and other != thing]
            if len(alike) == 1 and shapes[alike[0].shape] == 1:
                possible = [shape for shape in WORLD.shapes if shape != thing.shape]
                yield _fact("same", alike[0].shape, possible, shape=thing.shape)
        if phrases[thing.phrase] == 1:
            yield _fact("position", _quarter(thing.cell), _QUARTERS, thing=thing.phrase)
            for other in things:
                if phrases[other.phrase] == 1 and (seen := _relation(thing.cell, other.cell)):
                    named = {"thing": thing.phrase, "other": other.phrase}
                    yield _fact("relation", seen, _RELATIONS, **named)
    for shape, count in shapes.items():
        yield _fact("count", str(count), map(str, range(1, _MOST_COUNTED + 1)), shape=shape)
    ranked = [*shapes.most_common(2), ("", 0)]
    if ranked[0][1] > ranked[1][1] > 0:
        yield _fact("most", ranked[0][0], WORLD.shapes)


def _of_the_rest(scene: Scene) -> Iterator[PictureFact]:
    yield _fact("place", scene.place, WORLD.places)
    if scene.painter is not None:
        yield _fact("painter", scene.painter, WORLD.painters)
    figure, text = scene.figure, scene.text
    if figure is not None:
        if figure.kind == "light":
            yield _fact("driver", WORLD.lights[figure.name], WORLD.lights.values())
        else:
            names = WORLD.people if figure.kind == "person" else WORLD.landmarks
            yield _fact(figure.kind, figure.name, names)
        if scene.held is not None:
            yield _fact("held", scene.held.shape, WORLD.shapes)
    if text is not None:
        yield _fact(text.kind, text.value, _VALUES[text.kind])


_QUARTERS = ("northwest", "northeast", "southwest", "southeast")
_RELATIONS = ("left", "right", "above", "below")
_VALUES: dict[str, Iterable[str]] = {
    "word": WORLD.words,
    "title": WORLD.titles,
    "translation": WORLD.foreign.values(),
    "sum": [str(value) for value in range(2, 9)],
    "code": ["1", "2", "3", "4", "6", "8", "9", "12", "16"],
}


def _quarter(cell: Cell) -> str:
    row, column = cell
    return _QUARTERS[2 * (row >= CELLS // 2) + (column >= CELLS // 2)]


def _relation(cell: Cell, other: Cell) -> str | None:
    """Return where a cell is, seen from another; None if they share neither row nor column."""
    if cell == other:
        return None
    if cell[0] == other[0]:
        return "left" if cell[1] < other[1] else "right"
    if cell[1] == other[1]:
        return "above" if cell[0] < other[0] else "below"
    return None
