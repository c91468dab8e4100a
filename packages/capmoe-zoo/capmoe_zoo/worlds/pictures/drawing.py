"""Draw scenes with Pillow: 96 by 96 pixels, with jitter, clutter, noise, and parts that are hidden.

None of these carries an answer. All chance comes from a seed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

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
# Colours that carry no answer, as Pillow takes them.
_PAINTS: dict[str, Rgb] = {name: (r, g, b) for name, (r, g, b) in WORLD["paints"].items()}


def drawn(scene: Scene, draw: Draw) -> dict[str, Any]:
    """Return the picture of a scene before its noise.

    The keys are the arguments of :func:`capmoe_eval.zoo.sets.noisy_picture`.
    """
    from PIL import Image, ImageDraw  # which training on text need not have

    image = Image.new("RGB", (PICTURE_SIDE, PICTURE_SIDE))
    _Painter(ImageDraw.Draw(image), draw).paint(scene)
    noise, light = draw.below(2**31), 10 * (draw.below(7) - 3)
    return {"pixels": image.tobytes(), "noise": noise, "light": light}


def picture(scene: Scene, draw: Draw) -> Image.Image:
    """Return the picture of a scene with its noise, 96 by 96 pixels of RGB."""
    image: Image.Image = noisy_picture(**drawn(scene, draw))
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
            self._figure(scene.figure)
        if scene.painter is not None:
            self._frame(WORLD["painters"].index(scene.painter))
        if scene.text is not None:
            self._text(scene.text)

    def _about(self, color: Rgb, most: int = _HUE) -> Rgb:
        """Return a colour near one, each part of it changed by ``most`` or less."""
        red, green, blue = (
            min(255, max(0, part + self._draw.below(2 * most + 1) - most)) for part in color
        )
        return red, green, blue

    def _background(self, place: str) -> None:
        above, below, horizon = WORLD["places"][place]
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
        color = self._about(WORLD["colors"][thing.color])
        middle = (left + (size - 1) / 2, top + (size - 1) / 2)
        dark = _PAINTS["dark"]
        if thing.shape == "circle":
            self._canvas.ellipse(box, color, dark)
        elif thing.shape == "ring":
            self._canvas.ellipse(box, None, color, width=3)
        elif thing.shape == "square":
            self._canvas.rectangle(box, color, dark)
        elif thing.shape == "triangle":
            corners = [(left, box[3]), (box[2], box[3]), (middle[0], top)]
            self._canvas.polygon(corners, color, dark)
        elif thing.shape == "cross":
            third = size // 3
            across = (left, top + third, box[2], box[3] - third)
            self._canvas.rectangle(across, color)
            self._canvas.rectangle((left + third, top, box[2] - third, box[3]), color)
        else:
            points = []
            for step, radius in enumerate((size / 2, size / 5) * 5):
                angle = math.pi * step / 5
                x, y = radius * math.sin(angle), radius * math.cos(angle)
                points.append((middle[0] + x, middle[1] - y))
            self._canvas.polygon(points, color)

    def _figure(self, figure: Figure) -> None:
        row, column = figure.cell
        x, y = CELL * column + self._draw.below(3), CELL * row + self._draw.below(3)
        paints: dict[str, Rgb] = dict(_PAINTS)
        if figure.kind == "person":
            colors = (self._about(color, _WIDE_HUE) for color in WORLD["people"][figure.name])
            paints["hair"], paints["shirt"] = colors
        elif figure.kind == "landmark":
            paints["stone"] = self._about(paints["stone"])
        name = figure.name if figure.kind == "landmark" else figure.kind
        for mark, corners, *style in WORLD["figures"][name]:
            place = [(x, y)[number % 2] + corner for number, corner in enumerate(corners)]
            if style[0] == "skin":  # has another tone wherever it is seen
                paints["skin"] = self._about(_PAINTS["skin"])
            getattr(self._canvas, mark)(place, *(paints.get(word, word) for word in style))
        if figure.kind == "landmark" and self._draw.chance(_TREES):
            left, top = x - 2 + self._draw.below(7), y + 2 + self._draw.below(13)
            self._canvas.ellipse((left, top, left + 11, top + 14), self._about(paints["leaves"]))
        if figure.kind == "light":
            for number, lamp in enumerate(("red", "yellow", "green")):
                top = y + 2 + 9 * number
                color = paints[f"{lamp} lamp" if lamp == figure.name else "unlit lamp"]
                lit = self._about(color, _WIDE_HUE)
                self._canvas.ellipse((x + 3, top, x + 10, top + 7), lit)

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
        dark, paper, leaves = (_PAINTS[name] for name in ("dark", "paper", "leaves"))
        ink, ground = (paper, (70, 20, 20)) if text.kind == "title" else (dark, paper)
        self._canvas.rectangle((left - 2, top - 2, right + 1, bottom + 1), self._about(ground))
        for place, letter in enumerate(text.letters):
            for y, dots in enumerate(WORLD["glyphs"][letter].split()):
                for x, dot in enumerate(dots):
                    if dot == "1":
                        corner = (left + _PITCH * place + _DOT * x, top + _DOT * y)
                        self._canvas.rectangle((*corner, corner[0] + 1, corner[1] + 1), ink)
        if text.kind in ("word", "title", "translation") and self._draw.chance(_BLOTS):
            hidden = left + _PITCH * self._draw.below(len(text.letters))
            self._canvas.rectangle((hidden - 1, top - 1, hidden + 6, bottom), self._about(leaves))
