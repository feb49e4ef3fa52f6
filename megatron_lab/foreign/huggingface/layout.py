"""Which rows of which of their tensors are the rows of one of our parameters, in both directions.

"Ours" are parameters of this framework, "theirs" tensors of transformers. A parameter is seen as a matrix: its last dimension is
the columns, all others are the rows. Of a vector (a bias, a norm) every element is a row. Their tensors have the same columns. So
of fused, split and reordered projections, the rows of their tensors, laid end to end, are our rows in some order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from megatron.config.model import ModelConfig
from megatron.parallel.boxes import Box


@dataclass(frozen=True)
class WeightLayout:
    """Where one of our parameters is in their tensors."""

    shape: tuple[int, ...]
    """Shape of our parameter."""
    is_matrix: bool
    rows: dict[str, int]
    """Number of rows of each of their tensors."""
    order: torch.Tensor | None = None
    """Place of each of our rows among theirs, laid end to end: int64 [rows]. None: the same order. Where it names only some of
    theirs, the others are those of other parameters of ours."""
    transposed: bool = False
    """Whether their tensors are stored [columns, rows], as in GPT-2."""
    keeps_32_bits: bool = False
    """Whether they are stored in at least float32, whatever the others are."""

    def stored_as(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of their tensors in files of a dtype."""
        return torch.promote_types(dtype, torch.float32) if self.keeps_32_bits else dtype

    @property
    def columns(self) -> int:
        """Elements in a row."""
        return self.shape[-1] if self.is_matrix else 1

    def their_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each of their tensors."""
        if not self.is_matrix:
            return {name: (count,) for name, count in self.rows.items()}
        return {name: (self.columns, count) if self.transposed else (count, self.columns) for name, count in self.rows.items()}

    def ours(self, box: Box, dtype: torch.dtype, their: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """A box of our parameter, made of theirs; reads only what it needs."""
        out, index = torch.empty(box.sizes, dtype=dtype), box.index
        if not box.numel:
            return out
        if self.order is None and len(self.rows) == 1:  # needs no copy beside the result
            return out.copy_(self._matrix(their(*self.rows)).view(self.shape)[index])
        row_shape, columns = (self.shape[:-1], index[-1]) if self.is_matrix else (self.shape, slice(None))
        order = torch.arange(sum(self.rows.values())) if self.order is None else self.order
        wanted = order.view(row_shape)[index[: len(row_shape)]].flatten()
        flat, first = out.view(len(wanted), -1), 0
        for name, count in self.rows.items():
            (here,) = torch.where((first <= wanted) & (wanted < first + count))
            if len(here):
                found = self._matrix(their(name))[:, columns].index_select(0, wanted[here] - first)
                flat.index_copy_(0, here, found.to(dtype))
            first += count
        return out

    def theirs(self, ours: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Their tensors, one after the other, made of our whole parameter (parts of it, where the order is the same). Rows that are
        not ours are zero."""
        rows = ours.reshape(-1, self.columns)
        if self.order is not None:
            rows = rows.new_zeros((sum(self.rows.values()), self.columns)).index_copy_(0, self.order, rows)
        for (name, shape), part in zip(self.their_shapes().items(), rows.split([*self.rows.values()]), strict=True):
            yield name, (part.t() if self.transposed else part).contiguous().view(shape)

    def _matrix(self, theirs: torch.Tensor) -> torch.Tensor:
        return theirs.t() if self.transposed else theirs.view(-1, self.columns)


def share_tensors(layouts: dict[str, WeightLayout]) -> None:
    """Let parameters that are parts of one of their tensors have its rows one after the other, in the order of the forward."""
    users: dict[str, list[str]] = {}
    for name, layout in layouts.items():
        for theirs in layout.rows:
            users.setdefault(theirs, []).append(name)
    for theirs, names in users.items():
        counts, first = [layouts[name].rows[theirs] for name in names], 0
        for name, count in zip(names, counts, strict=True) if len(names) > 1 else ():
            layouts[name] = replace(layouts[name], rows={theirs: sum(counts)}, order=torch.arange(first, first + count))
            first += count


def their_tensors(layouts: Mapping[str, WeightLayout], ours: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """All of their tensors, made one parameter at a time; of one that several neighbours are parts of, one after the other.

    Args:
        ours: gives our whole parameter of a name.
    """
    waiting: tuple[str, torch.Tensor] | None = None
    for name, following in zip(layouts, [*layouts][1:] + [None], strict=True):
        for theirs, tensor in layouts[name].theirs(ours(name)):
            if waiting is not None:
                assert waiting[0] == theirs, "its parts are neighbours"
                tensor = tensor + waiting[1]  # each is zero where the other is not
            waiting = (theirs, tensor) if following is not None and theirs in layouts[following].rows else None
            if waiting is None:
                yield theirs, tensor


def projection_rows(model: ModelConfig) -> tuple[list[int], torch.Tensor]:
    """Numbers of queries, keys and values among the rows of the projection to them; and the place of each of our rows in the three,
    laid end to end. Ours are grouped by key-value head: its query heads, its key, its value."""
    groups, size = model.num_key_value_heads, model.head_size
    counts = [model.num_attention_heads * size, groups * size, groups * size]
    parts = torch.arange(sum(counts)).split(counts)
    return counts, torch.cat([part.view(groups, -1) for part in parts], dim=1).flatten()
