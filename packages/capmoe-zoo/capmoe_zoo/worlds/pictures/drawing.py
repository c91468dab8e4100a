"""Draw scenes with Pillow: 96 by 96 pixels, with jitter, clutter, noise, and parts that are hidden.

None of these carries an answer. All chance comes from a seed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from capmoe_eval.zoo.sets import PICTURE_SIDE, noisy_picture

from capmoe_zoo.worlds.draw import Draw
from capmoe_zoo.worlds.pictures.scene import CELLS, WORLD, Figure, Rgb, Scene, Text, Thing

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

#: Pixels of a side of a cell.
CELL = PICTURE_SIDE // CELLS
# Marks of clutter.
_CLUTTER = 12
# Largest change of a drawn colour: of most, of people and lamps, of backgrounds.
_HUE, _WIDE_HUE, _GROUND_HUE = 14, 18, 40
# Shares of the words that lose a letter, of the buildings behind a tree, and of the worn sides of
# frames.
_BLOTS, _TREES, _WORN = 0.5, 0.4, 0.4
# Pixels of a dot of a glyph, and from one letter to the next.
_DOT, _PITCH = 2, CELL // 2
_FRAME = 3
_SKIN: Rgb = (235, 190, 150)
_STONE: Rgb = (150, 150, 150)
_LEAVES: Rgb = (70, 100, 60)
_DARK: Rgb = (20, 20, 20)
_PAPER: Rgb = (250, 245, 225)
_UNLIT: Rgb = (90, 90, 90)
_LIT: dict[str, Rgb] = {"red": (180, 75, 65), "yellow": (175, 160, 65), "green": (70, 165, 95)}


class Drawn(NamedTuple):
    """A drawn picture before its noise, as :func:`capmoe_eval.zoo.sets.noisy_picture` takes it."""

    pixels: bytes  # RGB [96, 96, 3]
    noise: int  # the seed
    light: int


def drawn(scene: Scene, draw: Draw) -> Drawn:
    """Return the picture of a scene."""
    from PIL import Image, ImageDraw  # which training on text need not have

    image = Image.new("RGB", (PICTURE_SIDE, PICTURE_SIDE))
    _Painter(ImageDraw.Draw(image), draw).paint(scene)
    return Drawn(image.tobytes(), draw.below(2**31), 10 * (draw.below(7) - 3))


def picture(scene: Scene, draw: Draw) -> Image.Image:
    """Return the picture of a scene with its noise, 96 by 96 pixels of RGB."""
    image: Image.Image = noisy_picture(*drawn(scene, draw))
    return image


class _Painter:
    def __init__(self, canvas: ImageDraw.ImageDraw, draw: Draw) -> None:
        self._canvas = canvas
        self._draw = draw

    def paint(self, scene: Scene) -> None:
        self._background(scene.place)
        for thing in scene.things:
            self._thing(thing)
        if scene.figure is not None:
            getattr(self, f"_{scene.figure.kind}")(scene.figure)
        if scene.painter is not None:
            self._frame(WORLD.painters.index(scene.painter))
        if scene.text is not None:
            self._text(scene.text)

    def _about(self, color: Rgb, most: int = _HUE) -> Rgb:
        """Return a colour near one, each part of it changed by ``most`` or less."""
        red, green, blue = (
            min(255, max(0, part + self._draw.below(2 * most + 1) - most)) for part in color
        )
        return red, green, blue

    def _background(self, place: str) -> None:
        above, below, horizon = WORLD.places[place]
        horizon += self._draw.below(9) - 4
        side = PICTURE_SIDE
        self._canvas.rectangle((0, 0, side, horizon), self._about(above, _GROUND_HUE))
        self._canvas.rectangle((0, horizon, side, side), self._about(below, _GROUND_HUE))
        for _ in range(_CLUTTER):
            x, y = self._draw.below(side), self._draw.below(side)
            tone = 60 + self._draw.below(120)
            end = (x + self._draw.below(9) - 4, y + self._draw.below(3) - 1)
            self._canvas.line((x, y, *end), (tone, tone, tone))

    def _thing(self, thing: Thing) -> None:
        row, column = thing.cell
        size = 11 + self._draw.below(4)
        left = CELL * column + self._draw.below(CELL - size + 1)
        top = CELL * row + self._draw.below(CELL - size + 1)
        box = (left, top, left + size - 1, top + size - 1)
        color = self._about(WORLD.colors[thing.color])
        middle = (left + (size - 1) / 2, top + (size - 1) / 2)
        if thing.shape == "circle":
            self._canvas.ellipse(box, color, _DARK)
        elif thing.shape == "ring":
            self._canvas.ellipse(box, None, color, width=3)
        elif thing.shape == "square":
            self._canvas.rectangle(box, color, _DARK)
        elif thing.shape == "triangle":
            corners = [(left, box[3]), (box[2], box[3]), (middle[0], top)]
            self._canvas.polygon(corners, color, _DARK)
        elif thing.shape == "cross":
            third = size // 3
            across = (left, top + third, box[2], box[3] - third)
            self._canvas.rectangle(across, color)
            self._canvas.rectangle((left + third, top, box[2] - third, box[3]), color)
        else:
            radii = (size / 2, size / 5) * 5
            points = [
                (
                    middle[0] + radius * math.sin(math.pi * step / 5),
                    middle[1] - radius * math.cos(math.pi * step / 5),
                )
                for step, radius in enumerate(radii)
            ]
            self._canvas.polygon(points, color)

    def _corner(self, figure: Figure) -> tuple[int, int]:
        row, column = figure.cell
        return CELL * column + self._draw.below(3), CELL * row + self._draw.below(3)

    def _person(self, figure: Figure) -> None:
        x, y = self._corner(figure)
        hair, shirt = (self._about(color, _WIDE_HUE) for color in WORLD.people[figure.name])
        self._canvas.ellipse((x + 2, y, x + 11, y + 10), hair)
        self._canvas.ellipse((x + 3, y + 3, x + 10, y + 11), self._about(_SKIN))
        self._canvas.rectangle((x + 3, y + 12, x + 10, y + 22), shirt)
        self._canvas.line((x + 10, y + 15, x + 13, y + 19), self._about(_SKIN), 2)
        self._canvas.rectangle((x + 4, y + 23, x + 9, y + 28), (50, 50, 80))

    def _landmark(self, figure: Figure) -> None:
        x, y = self._corner(figure)
        stone = self._about(_STONE)
        if figure.name == "tower":
            self._canvas.rectangle((x + 4, y + 6, x + 9, y + 28), stone, _DARK)
            self._canvas.polygon([(x + 2, y + 6), (x + 11, y + 6), (x + 6, y)], (150, 40, 40))
        elif figure.name == "pyramid":
            self._canvas.polygon([(x, y + 28), (x + 13, y + 28), (x + 6, y + 8)], stone, _DARK)
        elif figure.name == "arch":
            self._canvas.rectangle((x, y + 8, x + 13, y + 28), stone, _DARK)
            self._canvas.rectangle((x + 4, y + 14, x + 9, y + 28), _DARK)
        else:
            self._canvas.polygon([(x + 3, y + 28), (x + 10, y + 28), (x + 6, y + 8)], stone)
            self._canvas.line((x, y + 2, x + 12, y + 14), _PAPER, 2)
            self._canvas.line((x, y + 14, x + 12, y + 2), _PAPER, 2)
        if self._draw.chance(_TREES):
            left, top = x - 2 + self._draw.below(7), y + 2 + self._draw.below(13)
            self._canvas.ellipse((left, top, left + 11, top + 14), self._about(_LEAVES))

    def _light(self, figure: Figure) -> None:
        x, y = self._corner(figure)
        self._canvas.rectangle((x + 2, y, x + 11, y + 28), (45, 45, 45), _DARK)
        for place, (name, color) in enumerate(_LIT.items()):
            top = y + 2 + 9 * place
            lamp = self._about(color if name == figure.name else _UNLIT, _WIDE_HUE)
            self._canvas.ellipse((x + 3, top, x + 10, top + 7), lamp)

    def _frame(self, style: int) -> None:
        side, colors = PICTURE_SIDE, (self._about((200, 160, 60)), self._about((90, 50, 30)))
        for start in (0, side - _FRAME):
            # Stripes on the level sides, on the upright ones, on all, or on none.
            level = style in (0, 2) and not self._draw.chance(_WORN)
            upright = style in (1, 2) and not self._draw.chance(_WORN)
            end = start + _FRAME - 1
            for along in range(0, side, 4):
                stripe = along // 4 % 2
                box = (along, start, along + 3, end)
                self._canvas.rectangle(box, colors[stripe if level else 0])
                box = (start, along, end, along + 3)
                self._canvas.rectangle(box, colors[stripe if upright else 0])

    def _text(self, text: Text) -> None:
        left = _PITCH * text.start + self._draw.below(3)
        top = CELL * text.row + 2 + self._draw.below(3)
        right, bottom = left + _PITCH * len(text.letters) - 2, top + 5 * _DOT
        ink, ground = (_PAPER, (70, 20, 20)) if text.kind == "title" else (_DARK, _PAPER)
        self._canvas.rectangle((left - 2, top - 2, right + 1, bottom + 1), self._about(ground))
        for place, letter in enumerate(text.letters):
            for y, dots in enumerate(WORLD.glyphs[letter]):
                for x, dot in enumerate(dots):
                    if dot == "1":
                        corner = (left + _PITCH * place + _DOT * x, top + _DOT * y)
                        self._canvas.rectangle((*corner, corner[0] + 1, corner[1] + 1), ink)
        if text.kind in ("word", "title", "translation") and self._draw.chance(_BLOTS):
            hidden = left + _PITCH * self._draw.below(len(text.letters))
            self._canvas.rectangle((hidden - 1, top - 1, hidden + 6, bottom), self._about(_LEAVES))
