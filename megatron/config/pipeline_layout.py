"""Parser of --pipeline-model-parallel-layout, which assigns layers to model chunks explicitly, and of files of measured layer
costs.

`E` is the embedding, `t` a transformer layer, `m` a layer of multi-token prediction, `L` the output layer and the loss, `|`
separates chunks. (All `m` are directly before `L`, and may be omitted.) `x*n` and `(...)*n` repeat a symbol or a group, also a
group with `|`. Commas and spaces are ignored. So `Et*3|(tt|)*6,L` has eight chunks: the embedding with three layers, six times two
layers, and the loss. This is the syntax of Megatron-LM, extended by nested brackets.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.config.regular_file import parse_json, read_text

_ALLOWED = (
    "E (embedding), t (layer), m (multi-token prediction), L (loss), | (separator of chunks), x*n and (...)*n (repeat), commas "
    "and spaces"
)
_MAX_SYMBOLS = 100_000  # after repetition; a typing error such as t*999999999 must not exhaust the memory


@dataclass(frozen=True)
class LayoutChunk:
    """Content of one model chunk (virtual pipeline stage) of a layout."""

    has_embedding: bool
    num_layers: int
    has_loss: bool
    num_depths: int = 0
    """Number of multi-token prediction layers that the layout names in this chunk."""

    def summarize(self, first_layer: int) -> str:
        """Describe the content for messages, such as ``embedding, 0-3 (4)`` for four layers. Empty for an empty chunk.

        Args:
            first_layer: index of the chunk's first layer in the model.
        """
        layers = f"{first_layer}-{first_layer + self.num_layers - 1} ({self.num_layers})" if self.num_layers else ""
        depths = f"{self.num_depths} of multi-token prediction" if self.num_depths else ""
        return ", ".join(filter(None, ("embedding" * self.has_embedding, layers, depths, "norm, output, loss" * self.has_loss)))


@dataclass(frozen=True)
class _Symbol:
    letter: str
    position: int
    """Position of the symbol in the text, counted in characters from 1."""


def parse_layout(text: str) -> tuple[LayoutChunk, ...]:
    """Parse a value of --pipeline-model-parallel-layout into its model chunks, in the order in which a forward pass runs them.

    Raises:
        ValueError: the text violates the syntax, or the embedding is not first or the loss not last (see `find_layout_problems`).
    """
    problems = find_layout_problems(text)
    if problems:
        raise ValueError(f"--pipeline-model-parallel-layout {text!r} is not a valid layout. {' '.join(problems)}")
    return tuple(
        LayoutChunk("E" in chunk, chunk.count("t"), "L" in chunk, chunk.count("m"))
        for chunk in "".join(symbol.letter for symbol in _expand_symbols(text)).split("|")
    )


@functools.lru_cache(maxsize=64)
def parse_layout_or_none(text: str | None) -> tuple[LayoutChunk, ...] | None:
    """Parse a pipeline layout with `parse_layout`. Returns None if the text is None or invalid. Results are cached, because rules
    parse the same layout many times."""
    return None if text is None or find_layout_problems(text) else parse_layout(text)


def find_layout_problems(text: str) -> list[str]:
    """Return the problems of a pipeline layout, each as a sentence. For a text that violates the syntax, only the first problem is
    returned."""
    try:
        symbols = _expand_symbols(text)
    except ValueError as error:
        return [str(error)]
    return list(_find_misplaced(symbols))


def _find_misplaced(symbols: list[_Symbol]) -> Iterator[str]:
    """Yield a problem if the embedding is not exactly once at the start, if the loss is not exactly once at the end, or if a layer
    of multi-token prediction is not directly before the loss."""
    num_not_depths = next((index for index, symbol in enumerate(symbols[-2::-1]) if symbol.letter != "m"), len(symbols))
    if misplaced := [symbol for symbol in symbols[: len(symbols) - 1 - num_not_depths] if symbol.letter == "m"]:
        yield f"m (multi-token prediction) is at {_format_positions(misplaced)}, but it must be before L, in the last chunk."
    for letter, name, end, end_index in (("E", "embedding", "first", 0), ("L", "loss", "last", -1)):
        matches = [symbol for symbol in symbols if symbol.letter == letter]
        if not matches:
            yield f"There is no {letter}: the {name} must be {end} in the {end} chunk."
        elif len(matches) > 1:
            yield f"There are {len(matches)} {letter} ({_format_positions(matches)}) but one {name}."
        elif symbols[end_index].letter != letter:
            yield f"{letter} is at {_format_positions(matches)}, but the {name} must be {end} in the {end} chunk."


def _format_positions(symbols: list[_Symbol]) -> str:
    positions = sorted({symbol.position for symbol in symbols})
    return f"character{'s' * (len(positions) > 1)} {', '.join(map(str, positions))}"


def _expand_symbols(text: str) -> list[_Symbol]:
    """Return the letters and chunk separators (|) of a pipeline layout, with all repetitions expanded.

    Raises:
        ValueError: the text violates the syntax.
    """
    symbols: list[_Symbol] = []
    open_brackets: list[tuple[int, list[_Symbol]]] = []
    repeatable: list[_Symbol] | None = None  # the symbols that a * would repeat
    for token in re.finditer(r"\*[0-9]+|[^,\s]", text):
        word, position = token.group(), token.start() + 1
        if word == "(":
            open_brackets.append((position, symbols))
            symbols, repeatable = [], None
        elif word == ")":
            if not open_brackets:
                raise ValueError(
                    f"Character {position} of the pipeline layout closes a bracket that was not opened. Remove this bracket."
                )
            start, outer_symbols = open_brackets.pop()
            if not symbols:
                raise ValueError(f"The bracket at character {start} of the pipeline layout is empty. Remove this bracket.")
            symbols, repeatable = outer_symbols + symbols, symbols
        elif word[0] == "*" and word != "*" and repeatable is not None:
            times = int(word[1:].lstrip("0")[:10] or "0")  # more digits always exceed the limit
            if len(symbols) + times * len(repeatable) > _MAX_SYMBOLS:
                raise ValueError(
                    f"The repetition at character {position} makes the pipeline layout longer than {_MAX_SYMBOLS:,} symbols. "
                    "Repeat less often."
                )
            symbols, repeatable = symbols[: len(symbols) - len(repeatable)] + repeatable * times, None
        elif word in "EtLm|":
            repeatable = [_Symbol(word, position)]
            symbols += repeatable
        else:
            raise ValueError(f"Character {position} of the pipeline layout is {word[0]!r}{_build_hint(word)}. Use only {_ALLOWED}.")
    if open_brackets:
        raise ValueError(
            f"The bracket at character {open_brackets[-1][0]} of the pipeline layout is not closed. Add a closing bracket."
        )
    return symbols


def _build_hint(word: str) -> str:
    if word in "elT":
        return f" (write {word.swapcase()})"
    if word == "*":
        return " without a number after it"
    if word[0] == "*":
        return " without a symbol or bracket before it to repeat"
    return " (a number is allowed only after *)" if word.isdigit() else ""


# ---- Measured times of layers, embedding and loss, written by --profile-pipeline and read by --layer-costs.

_MAX_TIME_MS = 1e12
_JSON_FORMAT = '{"layers": [ms, ...], "embedding": ms, "loss": ms}'


@dataclass(frozen=True)
class LayerCosts:
    """Measured times of the layers, the embedding and the loss: forward and backward of one microbatch, in milliseconds."""

    layers: tuple[float, ...]
    """Time of each layer, from the first to the last."""
    embedding: float
    """Time of the computation before the first layer: the embedding."""
    loss: float
    """Time of the computation after the last layer: norm, output layer and loss, and multi-token prediction."""

    def average_by_type(self, layer_types: Sequence[Hashable]) -> tuple[float, ...]:
        """Return the time of each layer, averaged over all layers of the same type, so that measurement noise does not change the
        distribution of the layers over the stages.

        Args:
            layer_types: type of each layer; layers of equal type do the same computation.
        """
        costs_by_type: dict[Hashable, list[float]] = {}
        for layer_type, cost in zip(layer_types, self.layers, strict=True):
            costs_by_type.setdefault(layer_type, []).append(cost)
        return tuple(math.fsum(costs_by_type[layer_type]) / len(costs_by_type[layer_type]) for layer_type in layer_types)

    def write(self, path: Path) -> None:
        """Write the measured times to a JSON file.

        Raises:
            OSError: the file cannot be written.
        """
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def read_layer_costs(path: str) -> LayerCosts:
    """Read measured times of layers from a file that `LayerCosts.write` wrote.

    Raises:
        ValueError: the file cannot be read, or has another format.
    """
    flag = f"--layer-costs {path}"
    try:
        content = parse_json(read_text(Path(path)))
    except OSError as error:
        raise ValueError(f"{flag} cannot be read: {error.strerror}. Check the path.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag} is not JSON: {error}. Measure the times again with --profile-pipeline.") from error
    if not isinstance(content, dict) or set(content) != {"layers", "embedding", "loss"} or not isinstance(content["layers"], list):
        raise ValueError(
            f"{flag} is not of the form {_JSON_FORMAT}, which --profile-pipeline writes. Measure the times again with "
            "--profile-pipeline."
        )
    times = [*content["layers"], content["embedding"], content["loss"]]
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < _MAX_TIME_MS for x in times):
        raise ValueError(
            f"{flag} has a time that is negative, too large or not a number. Measure the times again with --profile-pipeline."
        )
    if not sum(content["layers"]):
        raise ValueError(f"{flag} has no layer with a time above 0. Measure the times again with --profile-pipeline.")
    return LayerCosts(tuple(map(float, content["layers"])), float(content["embedding"]), float(content["loss"]))
