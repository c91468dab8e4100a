"""Make scenes by seed, and derive questions and their answers from them.

A picture has 6 by 6 cells. A thing fills one cell; a person, a building or a traffic light fills
two, one above the other; a text takes the first or the last row. So an answer depends on few of the
picture's 144 patches.

Questions have three forms. An open question is answered by a word; a claim by yes or no; a choice
by the letter of an option.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from capmoe_eval.experiment.files import read_data
from capmoe_eval.zoo.llava import PATCHES

from capmoe_zoo.worlds.draw import Draw

#: Rows and columns of cells.
CELLS = 6
LETTERS = "ABCD"
# Share of the patches of the background that are named.
_NAMED_GROUND = 0.1
Rgb = tuple[int, int, int]
#: A row and a column of cells.
Cell = tuple[int, int]


#: The words, colours and marks; the comments of ``world.yaml`` say what each of them is for.
WORLD = read_data(__package__, "world.yaml", dict[str, Any])


@dataclass(frozen=True)
class Thing:
    """A coloured shape in a cell."""

    color: str
    shape: str
    cell: Cell

    @property
    def phrase(self) -> str:
        """Its colour and shape."""
        return f"{self.color} {self.shape}"


@dataclass(frozen=True)
class Figure:
    """A person, a building, or a traffic light, in a cell and the one below it."""

    kind: str  # person, landmark or light
    name: str  # of the person or building, or the colour of the lamp that is lit
    cell: Cell


@dataclass(frozen=True)
class Text:
    """Letters in the first or the last row of cells, each half as wide as a cell."""

    kind: str  # the question that it answers: word, title, translation, sum or code
    letters: str  # that are drawn
    value: str  # the answer
    row: int  # of cells
    start: int  # half cells before the first letter


@dataclass(frozen=True)
class Scene:
    """The content of a picture."""

    place: str  # the background
    painter: str | None  # of the frame; None for no frame
    things: tuple[Thing, ...]
    figure: Figure | None
    held: Thing | None  # the thing beside a person's hand, one of the things
    text: Text | None


def scene(draw: Draw) -> Scene:
    """Return a random scene."""
    text = _text(draw) if draw.chance(0.65) else None
    rows = [row for row in range(CELLS) if text is None or row != text.row]
    free = [(row, column) for row in rows for column in range(CELLS)]
    figure = at_hand = held = None
    if draw.chance(0.6):
        kind = draw.one(("person", "person", "landmark", "light"))
        names = WORLD[{"person": "people", "landmark": "landmarks", "light": "lights"}[kind]]
        # Space for the second cell below, and for a thing on the right.
        fitting = [(y, x) for y, x in free if (y + 1, x) in free and x + 1 < CELLS]
        figure = Figure(kind, draw.one(list(names)), draw.one(fitting))
        row, column = figure.cell
        at_hand = (row + 1, column + 1) if kind == "person" else None
        free = [cell for cell in free if cell not in (figure.cell, (row + 1, column), at_hand)]
    # Few colours and shapes in a picture, so that some are shared and some are not.
    shapes = draw.some(WORLD["shapes"], 3)
    colors = draw.some(list(WORLD["colors"]), 4)
    count = (1 if figure else 3) + draw.below(4)
    things = [
        Thing(draw.one(colors), draw.one(shapes), cell) for cell in draw.shuffled(free)[:count]
    ]
    if at_hand is not None and draw.chance(0.7):
        held = Thing(draw.one(colors), draw.one(shapes), at_hand)
        things.append(held)
    place = draw.one(list(WORLD["places"]))
    painter = draw.one(WORLD["painters"]) if draw.chance(0.35) else None
    return Scene(place, painter, tuple(things), figure, held, text)


def _text(draw: Draw) -> Text:
    kind = draw.one(("word", "title", "translation", "sum", "code"))
    if kind in ("word", "title"):
        value = draw.one(WORLD["words"] if kind == "word" else WORLD["titles"])
        letters = value.upper()
    elif kind == "translation":
        letters, value = draw.one(list(WORLD["foreign"].items()))
    else:
        first, second = 1 + draw.below(4), 1 + draw.below(4)
        letters = f"{first}{'+' if kind == 'sum' else '*'}{second}"
        value = str(first + second if kind == "sum" else first * second)
    # One half cell on either side stays empty.
    start = 1 + draw.below(2 * CELLS - 1 - len(letters))
    return Text(kind, letters, value, draw.one((0, CELLS - 1)), start)


@dataclass(frozen=True)
class PictureFact:
    """Something that a scene answers."""

    kind: str  # a question of ``world.yaml``
    ask: str  # the question itself
    value: str  # the right answer
    wrong: tuple[str, ...]  # three answers or more


def supposed(fact: PictureFact, draw: Draw, *, true: bool) -> str:
    """Return the answer that a claim supposes: the right one if ``true``, else a wrong one."""
    return fact.value if true else draw.one(fact.wrong)


def four_options(fact: PictureFact, draw: Draw) -> tuple[tuple[str, ...], str]:
    """Return the right and three wrong options in a random order, and the right one's letter."""
    options = tuple(draw.shuffled([fact.value, *draw.some(fact.wrong, 3)]))
    return options, LETTERS[options.index(fact.value)]


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
    for row, column in itertools.product(range(PATCHES), repeat=2):
        if draw.chance(_NAMED_GROUND):
            is_edge = {row, column} & {0, PATCHES - 1}
            named[row, column] = (is_edge and scene.painter) or scene.place

    words: dict[Cell, Sequence[str]] = {
        thing.cell: (thing.color, thing.shape, thing.shape, _quarter(thing.cell))
        for thing in scene.things
    }
    figure, text = scene.figure, scene.text
    if figure is not None:
        word = WORLD["lights"][figure.name] if figure.kind == "light" else figure.name
        row, column = figure.cell
        words |= dict.fromkeys(((row, column), (row + 1, column)), [word] * 4)
    for (row, column), of_cell in words.items():
        patches = itertools.product((2 * row, 2 * row + 1), (2 * column, 2 * column + 1))
        named.update(zip(patches, of_cell, strict=True))
    if text is not None:
        for column in range(text.start, text.start + len(text.letters)):
            named |= {(2 * text.row + half, column): text.value for half in (0, 1)}
    return named


def _fact(kind: str, value: str, possible: Iterable[str], **words: str) -> PictureFact:
    """Return a fact; the ``words`` fill the wording."""
    wrong = tuple(other for other in possible if other != value)
    return PictureFact(kind, WORLD["questions"][kind].format(**words), value, wrong)


_QUARTERS = ("northwest", "northeast", "southwest", "southeast")
_RELATIONS = ("left", "right", "above", "below")
_POSSIBLE: dict[str, Iterable[str]] = {
    "person": WORLD["people"],
    "landmark": WORLD["landmarks"],
    "word": WORLD["words"],
    "title": WORLD["titles"],
    "translation": WORLD["foreign"].values(),
    "sum": [str(value) for value in range(2, 9)],
    "code": ["1", "2", "3", "4", "6", "8", "9", "12", "16"],
}


def facts(scene: Scene) -> Iterator[PictureFact]:
    """Yield all that is asked of a scene."""
    things = scene.things
    colors = Counter(thing.color for thing in things)
    shapes = Counter(thing.shape for thing in things)
    phrases = Counter(thing.phrase for thing in things)
    absent = [
        f"{color} {shape}"
        for color, shape in itertools.product(WORLD["colors"], WORLD["shapes"])
        if f"{color} {shape}" not in phrases and (color in colors or shape in shapes)
    ]
    for thing in things:
        yield _fact("existence", thing.phrase, absent)
        if colors[thing.color] == 1:
            yield _fact("shape", thing.shape, WORLD["shapes"], color=thing.color)
        if shapes[thing.shape] == 1:
            yield _fact("color", thing.color, WORLD["colors"], shape=thing.shape)
            alike = [other for other in things if other.color == thing.color and other != thing]
            if len(alike) == 1 and shapes[alike[0].shape] == 1:
                possible = [shape for shape in WORLD["shapes"] if shape != thing.shape]
                yield _fact("same", alike[0].shape, possible, shape=thing.shape)
        if phrases[thing.phrase] == 1:
            yield _fact("position", _quarter(thing.cell), _QUARTERS, thing=thing.phrase)
            for other in things:
                if phrases[other.phrase] == 1 and (seen := _relation(thing.cell, other.cell)):
                    named = {"thing": thing.phrase, "other": other.phrase}
                    yield _fact("relation", seen, _RELATIONS, **named)
    for shape, count in shapes.items():
        yield _fact("count", str(count), map(str, range(1, 7)), shape=shape)
    ranked = [*shapes.most_common(2), ("", 0)]
    if ranked[0][1] > ranked[1][1] > 0:
        yield _fact("most", ranked[0][0], WORLD["shapes"])
    yield _fact("place", scene.place, WORLD["places"])
    if scene.painter is not None:
        yield _fact("painter", scene.painter, WORLD["painters"])
    figure, text = scene.figure, scene.text
    if figure is not None:
        if figure.kind == "light":
            yield _fact("driver", WORLD["lights"][figure.name], WORLD["lights"].values())
        else:
            yield _fact(figure.kind, figure.name, _POSSIBLE[figure.kind])
        if scene.held is not None:
            yield _fact("held", scene.held.shape, WORLD["shapes"])
    if text is not None:
        yield _fact(text.kind, text.value, _POSSIBLE[text.kind])


def _quarter(cell: Cell) -> str:
    row, column = cell
    return _QUARTERS[2 * (row >= CELLS // 2) + (column >= CELLS // 2)]


def _relation(cell: Cell, other: Cell) -> str | None:
    """Return where a cell is, seen from another; None if they share neither row nor column."""
    (row, column), (other_row, other_column) = cell, other
    if (row == other_row) == (column == other_column):
        return None
    if row == other_row:
        return "left" if column < other_column else "right"
    return "above" if row < other_row else "below"
