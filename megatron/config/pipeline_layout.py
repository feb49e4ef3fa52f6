"""The text of --pipeline-model-parallel-layout: which chunk holds which layers, written by hand.

`E` is the embedding, `t` a transformer layer, `m` a depth of multi-token prediction, `L` the output layer and the loss, `|` ends a
chunk. (All depths stand in front of the loss, and may be left out.) `x*n` and `(...)*n` repeat one symbol or a part, also a part
with `|`. Commas and spaces mean nothing. So `Et*3|(tt|)*6,L` has eight chunks: the embedding with three layers, six times two
layers, the loss alone. This is the language of Megatron-LM; brackets within brackets come on top.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.config.regular_file import read_text

_ALLOWED = (
    "E (embedding), t (layer), m (multi-token prediction), L (loss), | (end of a chunk), x*n and (...)*n (repeat), commas "
    "and spaces"
)
_MOST_SYMBOLS = 100_000  # after repeating; a slip such as t*999999999 must not fill the memory


@dataclass(frozen=True)
class LayoutChunk:
    """The content of one chunk."""

    embedding: bool
    num_layers: int
    loss: bool
    depths: int = 0
    """Those of multi-token prediction that are named."""

    def content(self, first_layer: int) -> str:
        """What it holds, in words, with the numbers of its layers; empty if that is nothing."""
        layers = f"{first_layer}-{first_layer + self.num_layers - 1} ({self.num_layers})" if self.num_layers else ""
        depths = f"{self.depths} of multi-token prediction" if self.depths else ""
        return ", ".join(filter(None, ("embedding" * self.embedding, layers, depths, "norm, output, loss" * self.loss)))


@dataclass(frozen=True)
class _Symbol:
    letter: str
    place: int
    """Position of the chunk in the text, counted in characters from 1."""


def parse_layout(text: str) -> tuple[LayoutChunk, ...]:
    """The chunks in the order of the depth.

    Raises:
        ValueError: the text breaks the grammar, or embedding and loss do not stand once each at their ends (see `layout_problems`).
    """
    problems = layout_problems(text)
    if problems:
        raise ValueError(f"the pipeline layout {text!r} is wrong: {' '.join(problems)}")
    return tuple(
        LayoutChunk("E" in chunk, chunk.count("t"), "L" in chunk, chunk.count("m"))
        for chunk in "".join(symbol.letter for symbol in _symbols(text)).split("|")
    )


@functools.lru_cache(maxsize=64)
def read_layout(text: str | None) -> tuple[LayoutChunk, ...] | None:
    """The chunks of a layout, or None where there is none or it cannot be read. Kept, as rules ask for the same one many times."""
    return None if text is None or layout_problems(text) else parse_layout(text)


def layout_problems(text: str) -> list[str]:
    """The faults of a text, each in a sentence; for a text that cannot be read, only the first."""
    try:
        symbols = _symbols(text)
    except ValueError as error:
        return [str(error)]
    return list(_misplaced(symbols))


def _misplaced(symbols: list[_Symbol]) -> Iterator[str]:
    """Faults if embedding and loss do not stand once each, at the very ends, and depths in front of the loss."""
    in_front = next((place for place, symbol in enumerate(symbols[-2::-1]) if symbol.letter != "m"), len(symbols))
    if strange := [symbol for symbol in symbols[: len(symbols) - 1 - in_front] if symbol.letter == "m"]:
        yield f"m (multi-token prediction) is at {_places(strange)}, but it stands in front of L, in the last chunk."
    for letter, what, end, position in (("E", "embedding", "first", 0), ("L", "loss", "last", -1)):
        found = [symbol for symbol in symbols if symbol.letter == letter]
        if not found:
            yield f"There is no {letter}: the {what} stands {end} in the {end} chunk."
        elif len(found) > 1:
            yield f"There are {len(found)} {letter} ({_places(found)}) but one {what}."
        elif symbols[position].letter != letter:
            yield f"{letter} is at {_places(found)}, but the {what} stands {end} in the {end} chunk."


def _places(symbols: list[_Symbol]) -> str:
    places = sorted({symbol.place for symbol in symbols})
    return f"character{'s' * (len(places) > 1)} {', '.join(map(str, places))}"


def _symbols(text: str) -> list[_Symbol]:
    """The letters and bars after repeating."""
    symbols: list[_Symbol] = []
    opened: list[tuple[int, list[_Symbol]]] = []
    last: list[_Symbol] | None = None  # what a * would repeat
    for token in re.finditer(r"\*[0-9]+|[^,\s]", text):
        word, place = token.group(), token.start() + 1
        if word == "(":
            opened.append((place, symbols))
            symbols, last = [], None
        elif word == ")":
            if not opened:
                raise ValueError(f"Character {place} closes a bracket that was not opened.")
            start, before = opened.pop()
            if not symbols:
                raise ValueError(f"The bracket at character {start} holds nothing.")
            symbols, last = before + symbols, symbols
        elif word[0] == "*" and word != "*" and last is not None:
            times = int(word[1:].lstrip("0")[:10] or "0")  # more digits would be too many symbols in any case
            if len(symbols) + times * len(last) > _MOST_SYMBOLS:
                raise ValueError(f"With character {place} there are more than {_MOST_SYMBOLS:,} symbols.")
            symbols, last = symbols[: len(symbols) - len(last)] + last * times, None
        elif word in "EtLm|":
            last = [_Symbol(word, place)]
            symbols += last
        else:
            raise ValueError(f"Character {place} is {word[0]!r}{_hint(word)}; allowed are {_ALLOWED}.")
    if opened:
        raise ValueError(f"The bracket at character {opened[-1][0]} is not closed.")
    return symbols


def _hint(word: str) -> str:
    if word in "elT":
        return f" (write {word.swapcase()})"
    if word == "*":
        return " without a number after it"
    if word[0] == "*":
        return " without one symbol or bracket before it to repeat"
    return " (a number stands only after *)" if word.isdigit() else ""


# ---- Measured times of a model's layers, embedding and loss, as --profile-pipeline writes them and --layer-costs reads them.

_FORM = '{"layers": [ms, ...], "embedding": ms, "loss": ms}'


@dataclass(frozen=True)
class LayerCosts:
    """Milliseconds of one microbatch, forward and backward."""

    layers: tuple[float, ...]
    """Those of each layer, in the order of the depth."""
    embedding: float
    """What is before the first layer."""
    loss: float
    """What is behind the last: norm, output layer and loss, and the depths of multi-token prediction."""

    def of_kinds(self, kinds: Sequence[Hashable]) -> tuple[float, ...]:
        """The cost of each layer, where layers of one kind cost the same: their mean. So noise does not move the split."""
        found: dict[Hashable, list[float]] = {}
        for kind, cost in zip(kinds, self.layers, strict=True):
            found.setdefault(kind, []).append(cost)
        return tuple(math.fsum(found[kind]) / len(found[kind]) for kind in kinds)

    def write(self, path: Path) -> None:
        """As JSON.

        Raises:
            OSError: it cannot be written.
        """
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def read_layer_costs(path: str) -> LayerCosts:
    """The costs in a file.

    Raises:
        ValueError: it cannot be read, or holds something else.
    """
    flag = f"--layer-costs {path}"
    try:
        found = json.loads(read_text(Path(path)))
    except OSError as error:
        raise ValueError(f"{flag} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag} is no JSON: {error}.") from error
    if not isinstance(found, dict) or set(found) != {"layers", "embedding", "loss"} or not isinstance(found["layers"], list):
        raise ValueError(f"{flag} does not hold {_FORM}.")
    numbers = [*found["layers"], found["embedding"], found["loss"]]
    if not all(isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one) and one >= 0 for one in numbers):
        raise ValueError(f"{flag} has a time that is no number from 0 on.")
    if not sum(found["layers"]):
        raise ValueError(f"{flag} has no layer that takes time.")
    return LayerCosts(tuple(map(float, found["layers"])), float(found["embedding"]), float(found["loss"]))
