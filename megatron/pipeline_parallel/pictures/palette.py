"""Colours that a colour-blind reader can tell apart, for figures and terminals."""

from __future__ import annotations

from typing import NamedTuple

from megatron.spec.operations import OpKind

# Of the eight colours of Okabe and Ito 2008, "Color Universal Design" (grey for black), those whose shades too stay apart under
# each kind of colour blindness. The two nearest, of whole backwards and of input gradients, occur in no schedule together.
_COLOURS = {
    OpKind.FORWARD: (0x00, 0x72, 0xB2),
    OpKind.BACKWARD: (0xD5, 0x5E, 0x00),
    OpKind.INPUT_GRAD: (0xE6, 0x9F, 0x00),
    OpKind.WEIGHT_GRAD: (0x99, 0x99, 0x99),
}
_SHADES = (0.0, 0.5, -0.4, 0.75)
"""Of the first, second, ... chunk of a stage: the share of white, or if negative of black. Neighbours differ most."""
NUM_SHADES = len(_SHADES)
"""The fifth chunk of a stage looks as the first again."""

ANSI_RESET = "\x1b[0m"
_CUBE = (0, 95, 135, 175, 215, 255)
"""Levels of red, green and blue in the terminal's colours 16 to 231."""


class Colour(NamedTuple):
    """Red, green and blue, 0 to 255."""

    red: int
    green: int
    blue: int

    @property
    def hex(self) -> str:
        """As in SVG."""
        return "#{:02x}{:02x}{:02x}".format(*self)

    @property
    def is_dark(self) -> bool:
        """Whether white text reads better on it than black."""
        return 0.299 * self.red + 0.587 * self.green + 0.114 * self.blue < 128

    @property
    def ansi(self) -> str:
        """What switches a terminal to text on this colour."""
        red, green, blue = map(_nearest_in_cube, self)
        return f"\x1b[{97 if self.is_dark else 30};48;5;{16 + 36 * red + 6 * green + blue}m"


def colour_of(kind: OpKind, depth: int) -> Colour:
    """Of an operation on the first (depth 0), second, ... chunk of a stage."""
    share = _SHADES[depth % NUM_SHADES]
    return Colour(*(round(level + ((255 if share > 0 else 0) - level) * abs(share)) for level in _COLOURS[kind]))


def _nearest_in_cube(level: int) -> int:
    return min(range(len(_CUBE)), key=lambda i: abs(_CUBE[i] - level))
