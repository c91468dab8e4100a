"""Make scenes by seed: what is in a picture, and where, before it is drawn.

A picture has 6 by 6 cells. A thing fills one cell; a person, a building or a traffic light fills
two, one above the other; a text takes the first or the last row. So an answer depends on few of the
picture's 144 patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from capmoe_eval.experiment.data_file import read_data
from pydantic import BeforeValidator

from capmoe_zoo.worlds.draw import Draw
from capmoe_zoo.worlds.miniworld.world import Words

#: Rows and columns of cells.
CELLS = 6
Rgb = tuple[int, int, int]
#: A row and a column of cells.
Cell = tuple[int, int]

TextKind = Literal["word", "title", "translation", "sum", "code"]
FigureKind = Literal["person", "landmark", "light"]


@dataclass(frozen=True)
class Vocabulary:
    """The content of ``world.yaml``."""

    colors: Mapping[str, Rgb]
    shapes: Words
    places: Mapping[str, tuple[Rgb, Rgb, int]]
    people: Mapping[str, tuple[Rgb, Rgb]]
    landmarks: Words
    lights: Mapping[str, str]
    painters: tuple[str, ...]
    words: Words
    titles: Words
    foreign: Mapping[str, str]
    questions: Mapping[str, str]
    glyphs: Mapping[str, Annotated[tuple[str, ...], BeforeValidator(lambda text: text.split())]]


WORLD = read_data(__package__, "world.yaml", Vocabulary)


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

    kind: FigureKind
    name: str  # of the person or building, or the colour of the lamp that is lit
    cell: Cell


@dataclass(frozen=True)
class Text:
    """Letters in the first or the last row of cells, each half as wide as a cell."""

    kind: TextKind  # the question that it answers
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
    free = [
        (row, column)
        for row in range(CELLS)
        for column in range(CELLS)
        if text is None or row != text.row
    ]
    figure = _figure(draw, free) if draw.chance(0.6) else None
    at_hand = None
    if figure is not None:
        row, column = figure.cell
        taken = [figure.cell, (row + 1, column)]
        if figure.kind == "person":
            at_hand = (row + 1, column + 1)
            taken.append(at_hand)
        free = [cell for cell in free if cell not in taken]
    # Few colours and shapes in a picture, so that some are shared and some are not.
    shapes = draw.some(WORLD.shapes, 3)
    colors = draw.some(list(WORLD.colors), 4)
    count = (1 if figure else 3) + draw.below(4)
    things = [
        Thing(draw.one(colors), draw.one(shapes), cell) for cell in draw.shuffled(free)[:count]
    ]
    held = None
    if at_hand is not None and draw.chance(0.7):
        held = Thing(draw.one(colors), draw.one(shapes), at_hand)
        things.append(held)
    return Scene(
        draw.one(list(WORLD.places)),
        draw.one(WORLD.painters) if draw.chance(0.35) else None,
        tuple(things),
        figure,
        held,
        text,
    )


def _figure(draw: Draw, free: list[Cell]) -> Figure:
    kinds: tuple[FigureKind, ...] = ("person", "person", "landmark", "light")
    kind = draw.one(kinds)
    names = {"person": list(WORLD.people), "landmark": WORLD.landmarks, "light": list(WORLD.lights)}
    # Space for the second cell below, and for a thing on the right.
    fitting = [cell for cell in free if (cell[0] + 1, cell[1]) in free and cell[1] + 1 < CELLS]
    return Figure(kind, draw.one(names[kind]), draw.one(fitting))


def _text(draw: Draw) -> Text:
    kinds: tuple[TextKind, ...] = ("word", "title", "translation", "sum", "code")
    kind = draw.one(kinds)
    if kind in ("word", "title"):
        value = draw.one(WORLD.words if kind == "word" else WORLD.titles)
        letters = value.upper()
    elif kind == "translation":
        letters, value = draw.one(list(WORLD.foreign.items()))
    else:
        first, second = 1 + draw.below(4), 1 + draw.below(4)
        letters = f"{first}{'+' if kind == 'sum' else '*'}{second}"
        value = str(first + second if kind == "sum" else first * second)
    # One half cell on either side stays empty.
    start = 1 + draw.below(2 * CELLS - 1 - len(letters))
    return Text(kind, letters, value, draw.one((0, CELLS - 1)), start)
