"""Which rows of which of their tensors are the rows of one of our parameters, in both directions; and an architecture, as data.

"Ours" are parameters of this framework, "theirs" tensors of transformers. A parameter is seen as a matrix: its last dimension is
the columns, all others are the rows. Of a vector (a bias, a norm) every element is a row. Their tensors have the same columns. So
fused, split and reordered projections are all lists of blocks of rows.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.checkpoint.huggingface.fields import Fields
from megatron.config.model import ModelConfig
from megatron.parallel.boxes import Box
from megatron.parallel.params import global_records


@dataclass(frozen=True)
class RowBlock:
    """Rows [start, start + count) of ours are rows [first, first + count) of their tensor `name`."""

    start: int
    count: int
    name: str
    first: int


@dataclass(frozen=True)
class WeightLayout:
    """Where one of our parameters is in their tensors."""

    shape: tuple[int, ...]
    """Shape of our parameter."""
    is_matrix: bool
    blocks: tuple[RowBlock, ...]
    transposed: bool = False
    """Whether their tensors are stored [columns, rows], as in GPT-2."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The dimensions of our parameter that count rows."""
        return self.shape[:-1] if self.is_matrix else self.shape

    @property
    def columns(self) -> int:
        """Elements in a row."""
        return self.shape[-1] if self.is_matrix else 1

    def their_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each of their tensors."""
        rows: dict[str, int] = {}
        for block in self.blocks:
            rows[block.name] = rows.get(block.name, 0) + block.count
        if not self.is_matrix:
            return {name: (count,) for name, count in rows.items()}
        return {name: (self.columns, count) if self.transposed else (count, self.columns) for name, count in rows.items()}

    def ours(self, box: Box, dtype: torch.dtype, their: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """A box of our parameter, made of theirs; reads only what it needs."""
        out, matrix = torch.empty(box.sizes, dtype=dtype), functools.cache(lambda name: self._matrix(their(name)))
        row_dims = len(self.row_shape)
        low, width = (box.offsets[-1], box.sizes[-1]) if self.is_matrix else (0, 1)
        rows, at = out.view(math.prod(box.sizes[:row_dims]), width), 0
        for first, count in _row_ranges(self.row_shape, box.offsets[:row_dims], box.sizes[:row_dims]):
            for block in self.blocks:
                start, stop = max(first, block.start), min(first + count, block.start + block.count)
                if start < stop:
                    source = matrix(block.name)[block.first + start - block.start :][: stop - start]
                    rows[at + start - first : at + stop - first].copy_(source[:, low : low + width])
            at += count
        return out

    def theirs(self, ours: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Their tensors, one after the other, made of our whole parameter (or that itself, where they are the same)."""
        rows = ours.reshape(-1, self.columns)
        for name, shape in self.their_shapes().items():
            blocks = [block for block in self.blocks if block.name == name]
            if blocks == [RowBlock(0, len(rows), name, 0)]:
                matrix = rows
            else:
                matrix = torch.empty(sum(block.count for block in blocks), self.columns, dtype=ours.dtype)
                for block in blocks:
                    matrix[block.first : block.first + block.count].copy_(rows[block.start : block.start + block.count])
            yield name, (matrix.t() if self.transposed else matrix).contiguous().view(shape)

    def _matrix(self, theirs: torch.Tensor) -> torch.Tensor:
        return theirs.t() if self.transposed else theirs.view(-1, self.columns)


def _row_ranges(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each contiguous part of a box of rows."""
    for lead in itertools.product(*(range(offset, offset + size) for offset, size in zip(offsets[:-1], sizes[:-1], strict=True))):
        row = 0
        for index, size in zip((*lead, offsets[-1]), shape, strict=True):
            row = row * size + index
        yield row, sizes[-1]


@dataclass(frozen=True)
class Recipe:
    """How one kind of parameter lies in their tensors, whatever its sizes.

    Args:
        names: names of their tensors, within the layer (or within the model, for what is in no layer).
        arrange: gives blocks of our rows, from the model and the number of rows.
    """

    names: tuple[str, ...]
    arrange: Callable[[tuple[str, ...], ModelConfig, int], list[RowBlock]]
    transposed: bool = False

    def layout(self, prefix: str, model: ModelConfig, shape: tuple[int, ...], *, is_matrix: bool) -> WeightLayout:
        """The layout of a parameter of `shape` whose tensors begin with `prefix`."""
        names = tuple(prefix + name for name in self.names)
        rows = math.prod(shape[:-1] if is_matrix else shape)
        return WeightLayout(shape, is_matrix, tuple(self.arrange(names, model, rows)), self.transposed and is_matrix)


def _whole(names: tuple[str, ...], model: ModelConfig, rows: int) -> list[RowBlock]:
    return [RowBlock(0, rows, names[0], 0)]


def _stacked(names: tuple[str, ...], model: ModelConfig, rows: int) -> list[RowBlock]:
    each = rows // len(names)
    return [RowBlock(number * each, each, name, 0) for number, name in enumerate(names)]


def _grouped(names: tuple[str, ...], model: ModelConfig, rows: int) -> list[RowBlock]:
    """Our rows are grouped by key-value head: its query heads, its key, its value. Theirs are all queries, all keys, all values:
    three tensors, or one with the three in a row."""
    heads, groups, size = model.num_attention_heads, model.num_key_value_heads, model.head_size
    queries = heads // groups * size
    fused = len(names) == 1
    q, k, v = names * 3 if fused else names
    keys, values = (heads * size, (heads + groups) * size) if fused else (0, 0)
    blocks = []
    for group in range(groups):
        start = group * (queries + 2 * size)
        blocks.append(RowBlock(start, queries, q, group * queries))
        blocks.append(RowBlock(start + queries, size, k, keys + group * size))
        blocks.append(RowBlock(start + queries + size, size, v, values + group * size))
    return blocks


def whole(name: str, *, transposed: bool = False) -> Recipe:
    """Their tensor is the same as ours."""
    return Recipe((name,), _whole, transposed)


def stacked(*names: str) -> Recipe:
    """Our parameter is their tensors in a row, such as the two halves of a gated MLP."""
    return Recipe(names, _stacked)


def grouped(*names: str, transposed: bool = False) -> Recipe:
    """The query-key-value projection: three tensors there, or one."""
    return Recipe(names, _grouped, transposed)


OUTPUT = "lm_head.weight"
"""Name of their output layer, which a tied model does not have."""


@dataclass(frozen=True)
class Family:
    """An architecture of transformers."""

    model_type: str
    """Its name in config.json, which is also its name here."""
    architecture: str
    """The class of transformers that has the output layer."""
    prefix: str
    """The beginning of all tensors' names but the output layer's; absent in files saved without the output layer."""
    layer: str
    """Name of layer {} after the prefix."""
    outside: Mapping[str, Recipe]
    """Parameters outside the layers, by our names. Recipes have the names after the prefix."""
    inside: Mapping[str, Recipe]
    """Parameters of a layer, by our names after `layers.N.`."""
    buffers: str
    """Regular expression of tensors after the prefix that old files hold and that are no weights (tables, masks)."""
    without_effect: tuple[str, ...]
    """Fields of this architecture that do not change the logits."""
    read: Callable[[Fields], ModelConfig]
    """Gives the model that a config.json describes. What cannot be accepted is recorded in the fields."""
    misfits: Callable[[ModelConfig], list[str]]
    """Gives what this architecture cannot express of a model, each as a text: the setting, then the value that it would need."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """Gives the fields of config.json for a fitting model, except those that all architectures have."""

    def layouts(self, model: ModelConfig, vocab_size: int) -> dict[str, WeightLayout]:
        """Where every parameter of the model is in their tensors, in the order of the forward."""
        found = {}
        for name, record in global_records(model, vocab_size).items():
            layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
            if layer:
                prefix, recipe = f"{self.prefix}{self.layer.format(layer[1])}.", self.inside[layer[2]]
            else:
                recipe = self.outside[name]
                prefix = "" if recipe.names == (OUTPUT,) else self.prefix
            found[name] = recipe.layout(prefix, model, record.shape, is_matrix=record.matrix_dims is not None)
        return found

    def is_buffer(self, name: str) -> bool:
        """Whether a tensor in a file is a table that is computed anew, not a weight."""
        return re.fullmatch(rf"(?:{re.escape(self.prefix)})?(?:{self.buffers})", name) is not None
