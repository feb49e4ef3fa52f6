"""Correspondence between the rows of a parameter and the rows of Hugging Face tensors, in both directions.

A *parameter* belongs to this framework, a *Hugging Face tensor* (`hf_`) to a transformers model. A parameter is treated as a
matrix: the last dimension has the columns, and all other dimensions together have the rows. In a vector (a bias or a norm weight),
each element is a row.

One parameter may correspond to several Hugging Face tensors, for example to separate query, key and value projections. These
tensors have the same columns as the parameter. Their rows, concatenated, are the rows of the parameter in some order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from megatron.config.model import ModelConfig
from megatron.parallel.tensor_slice import TensorSlice


@dataclass(frozen=True)
class WeightLayout:
    """Correspondence between a parameter of this framework and the Hugging Face tensors that hold its rows: their names, shapes,
    row order and dtype."""

    shape: tuple[int, ...]
    """Shape of the parameter."""
    is_matrix: bool
    row_counts: dict[str, int]
    """Number of rows of each Hugging Face tensor, by tensor name."""
    row_order: torch.Tensor | None = None
    """Index of each row of the parameter in the concatenated rows of the Hugging Face tensors: int64 [rows]. None if the
    parameter has its rows in the order of the concatenated tensors.

    If the tensors have more rows than the parameter, the additional rows belong to other parameters.
    """
    is_transposed: bool = False
    """Whether the Hugging Face tensors are stored as [columns, rows], as in GPT-2."""
    requires_float32: bool = False
    """Whether the Hugging Face tensors of this parameter are stored in at least float32, even if the model's other tensors have
    a narrower dtype."""

    def get_hf_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the Hugging Face tensors of this parameter in a model that is written in `dtype`."""
        return torch.promote_types(dtype, torch.float32) if self.requires_float32 else dtype

    @property
    def num_cols(self) -> int:
        """Number of columns of the parameter, that is, of elements per row."""
        return self.shape[-1] if self.is_matrix else 1

    def get_hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each Hugging Face tensor by name."""
        if not self.is_matrix:
            return {name: (num_rows,) for name, num_rows in self.row_counts.items()}
        return {
            name: (self.num_cols, num_rows) if self.is_transposed else (num_rows, self.num_cols)
            for name, num_rows in self.row_counts.items()
        }

    def read_param(self, tensor_slice: TensorSlice, dtype: torch.dtype, read_tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Assemble a slice of the parameter from the Hugging Face tensors. Only tensors that the slice overlaps are read.

        Args:
            tensor_slice: region of the parameter.
            dtype: dtype of the returned tensor.
            read_tensor: function that reads a Hugging Face tensor by name.
        """
        out, index = torch.empty(tensor_slice.sizes, dtype=dtype), tensor_slice.index
        if not tensor_slice.numel:
            return out
        if self.row_order is None and len(self.row_counts) == 1:  # needs no intermediate copy
            return out.copy_(self._to_matrix(read_tensor(*self.row_counts)).view(self.shape)[index])
        row_shape, cols = (self.shape[:-1], index[-1]) if self.is_matrix else (self.shape, slice(None))
        row_order = torch.arange(sum(self.row_counts.values())) if self.row_order is None else self.row_order
        requested_rows = row_order.view(row_shape)[index[: len(row_shape)]].flatten()
        flat, first_row = out.view(len(requested_rows), -1), 0
        for name, num_rows in self.row_counts.items():
            (positions,) = torch.where((first_row <= requested_rows) & (requested_rows < first_row + num_rows))
            if len(positions):
                selected = self._to_matrix(read_tensor(name))[:, cols].index_select(0, requested_rows[positions] - first_row)
                flat.index_copy_(0, positions, selected.to(dtype))
            first_row += num_rows
        return out

    def iter_hf_tensors(self, param: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and content of each Hugging Face tensor, converted from the full parameter.

        If `row_order` is None, the yielded tensors are views of the parameter where possible. Rows that belong to other parameters
        are zero.
        """
        rows = param.reshape(-1, self.num_cols)
        if self.row_order is not None:
            rows = rows.new_zeros((sum(self.row_counts.values()), self.num_cols)).index_copy_(0, self.row_order, rows)
        for (name, shape), hf_rows in zip(self.get_hf_shapes().items(), rows.split([*self.row_counts.values()]), strict=True):
            yield name, (hf_rows.t() if self.is_transposed else hf_rows).contiguous().view(shape)

    def _to_matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a Hugging Face tensor as a matrix [rows, columns]."""
        return tensor.t() if self.is_transposed else tensor.view(-1, self.num_cols)


def merge_shared_tensors(layouts: dict[str, WeightLayout]) -> None:
    """Update the layouts of parameters that are stored in the same Hugging Face tensor, so that each parameter has its own range of
    rows in the tensor.

    Args:
        layouts: layouts of all parameters, in the order of the forward pass. The parameters have this order in the shared tensor.
    """
    param_names: dict[str, list[str]] = {}
    for name, layout in layouts.items():
        for hf_name in layout.row_counts:
            param_names.setdefault(hf_name, []).append(name)
    for hf_name, names in param_names.items():
        num_rows_per_param, first_row = [layouts[name].row_counts[hf_name] for name in names], 0
        for name, num_rows in zip(names, num_rows_per_param, strict=True) if len(names) > 1 else ():
            layouts[name] = replace(
                layouts[name],
                row_counts={hf_name: sum(num_rows_per_param)},
                row_order=torch.arange(first_row, first_row + num_rows),
            )
            first_row += num_rows


def convert_to_hf(
    layouts: Mapping[str, WeightLayout], read_param: Callable[[str], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and content of all Hugging Face tensors, converting one parameter at a time.

    Parameters that are stored in the same tensor are adjacent in `layouts`. Each contributes its rows, with zeros elsewhere, and
    the contributions are summed before the tensor is yielded.

    Args:
        layouts: layouts of all parameters, from `Family.build_layouts`.
        read_param: function that reads a full parameter by name.
    """
    pending: tuple[str, torch.Tensor] | None = None
    for name, next_name in zip(layouts, [*layouts][1:] + [None], strict=True):
        for hf_name, tensor in layouts[name].iter_hf_tensors(read_param(name)):
            if pending is not None:
                assert pending[0] == hf_name, "parameters that share a tensor are adjacent"
                tensor = tensor + pending[1]  # rows of the other parameters are zero
            pending = (hf_name, tensor) if next_name is not None and hf_name in layouts[next_name].row_counts else None
            if pending is None:
                yield hf_name, tensor


def build_qkv_row_order(model: ModelConfig) -> tuple[list[int], torch.Tensor]:
    """Return how the rows of the fused query-key-value projection correspond to separate projections.

    In this framework the rows are grouped by key-value head: the query heads of the group, then the key head, then the value head.

    Returns:
        The numbers of query, key and value rows. For each row of the fused projection, its index in the concatenated query, key and
        value rows: int64 [rows].
    """
    num_groups, head_size = model.num_key_value_heads, model.head_size
    row_counts = [model.num_attention_heads * head_size, num_groups * head_size, num_groups * head_size]
    qkv_rows = torch.arange(sum(row_counts)).split(row_counts)
    return row_counts, torch.cat([rows.view(num_groups, -1) for rows in qkv_rows], dim=1).flatten()
