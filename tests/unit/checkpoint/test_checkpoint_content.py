"""Content sums: written from their definition, the same however a tensor is cut, and different when anything changed."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.global_tensor import get_tensor_bytes, get_torch_dtype
from megatron.checkpoint.manifest import EMPTY_HASH, ContentHash, digest_entries, hash_content
from megatron.checkpoint.safetensors_file import DTYPES
from megatron.parallel.tensor_slice import TensorSlice
from tests.support.checkpoint_worlds import Layout, Shapes, hold, random_values, read_manifest, save_world
from tests.unit.checkpoint.test_checkpoint_tiling import cut_tensors


def weight(index: Any, seed: int) -> Any:
    """The weight of a number; also of each in an array of 64-bit ones."""
    h = (index ^ seed * 0x9E3779B9) & 0xFFFFFFFF
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return (h ^ h >> 16) | 1


def by_definition(tensor: torch.Tensor) -> ContentHash:
    """One element after the other, in Python's integers."""
    size = tensor.element_size()
    raw = bytes(get_tensor_bytes(tensor))
    step = min(size, 4)
    units = [int.from_bytes(raw[at : at + step], "little") for at in range(0, len(raw), step)]
    units = [unit ^ unit >> 16 for unit in units]
    width = (tensor.shape[-1] if tensor.dim() else 1) * (size // step)
    rows = sum(weight(number // width, 0) * unit for number, unit in enumerate(units))
    columns = sum(weight(number % width, 1) * unit for number, unit in enumerate(units))
    return ContentHash(rows % 2**32, columns % 2**32)


def example(shape: tuple[int, ...], dtype: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == "int64":
        return torch.randint(-(2**62), 2**62, shape, generator=generator)
    if dtype == "uint8":
        return torch.randint(2**8, shape, generator=generator, dtype=torch.uint8)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(get_torch_dtype(dtype))


def sums_of(tensor: torch.Tensor, box: TensorSlice, block_bytes: int) -> ContentHash:
    """What a writer does: piece by piece."""
    data, pieces = get_tensor_bytes(tensor[box.index]), list[bytes]()
    dtype = str(tensor.dtype).removeprefix("torch.")
    sums = hash_content(data, dtype, box, tuple(tensor.shape), lambda piece: pieces.append(bytes(piece)), block_bytes)
    assert b"".join(pieces) == bytes(data) and max(map(len, pieces)) <= max(block_bytes, tensor.element_size())
    return sums


@given(cut_tensors(), st.sampled_from(sorted(DTYPES)), st.integers(1, 100))
def test_boxes_add_up_to_the_definition(cut: tuple[tuple[int, ...], list[TensorSlice]], dtype: str, block_bytes: int) -> None:
    shape, boxes = cut
    tensor = example(shape, dtype)
    total = functools.reduce(ContentHash.combine, (sums_of(tensor, box, block_bytes) for box in boxes), EMPTY_HASH)
    assert total == by_definition(tensor)
    parts = (hash_content(get_tensor_bytes(tensor[box.index]), dtype, box, shape) for box in boxes)
    assert functools.reduce(ContentHash.combine, parts) == total


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_blocks_of_the_usual_size(dtype: str) -> None:
    """Many rows at once, and rows that are longer than a block."""
    for shape in ((700, 300), (2, 300_000), (300_000,), (3, 5, 17_000)):
        tensor = example(shape, dtype)
        whole = TensorSlice.full(shape)
        unit = np.frombuffer(get_tensor_bytes(tensor), f"<u{min(DTYPES[dtype].itemsize, 4)}").astype(np.uint64)
        matrix = (unit ^ unit >> np.uint64(16)).reshape(int(np.prod(shape[:-1])), -1)
        rows, columns = (
            int((weight(np.arange(matrix.shape[axis], dtype=np.uint64), axis) * matrix.sum(axis=1 - axis)).sum()) % 2**32
            for axis in (0, 1)
        )
        assert hash_content(get_tensor_bytes(tensor), dtype, whole, shape) == ContentHash(rows, columns)


@given(st.data(), st.sampled_from(sorted(DTYPES)))
def test_any_change_is_seen(data: st.DataObject, dtype: str) -> None:
    tensor = example((6, 5), dtype)
    before = by_definition(tensor)
    raw = bytearray(get_tensor_bytes(tensor))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    after = hash_content(raw, dtype, TensorSlice((0, 0), (6, 5)), (6, 5))
    assert after.row_sum != before.row_sum and after.column_sum != before.column_sum


def test_exchanged_parts_are_seen() -> None:
    tensor = example((6, 5), "float32")
    whole = TensorSlice((0, 0), (6, 5))
    before = hash_content(get_tensor_bytes(tensor), "float32", whole, (6, 5))
    others = {
        "rows": tensor[[1, 0, 2, 3, 4, 5]],
        "columns": tensor[:, [0, 3, 2, 1, 4]],
        "shifted": tensor.roll(1, 0),
        "transposed": tensor.t().contiguous().view(6, 5),
        "negated": -tensor,
        "two signs": torch.where(torch.arange(30).view(6, 5) < 2, -tensor, tensor),
        "doubled": tensor * 2,
    }
    for name, other in others.items():
        assert hash_content(get_tensor_bytes(other), "float32", whole, (6, 5)) != before, name


def test_hexadecimal_digits() -> None:
    assert ContentHash(1, 0xFFFFFFFF).hex == "00000001ffffffff" and ContentHash.from_hex("00000001ffffffff") == ContentHash(
        1, 0xFFFFFFFF
    )
    assert ContentHash(1, 0xFFFFFFFF).combine(ContentHash(2, 1)) == ContentHash(3, 0)


SHAPES: Shapes = {"up": ((2, 8, 6), 1), "norm": ((6,), None), "scale": ((), None)}


def test_content_does_not_depend_on_the_layout(tmp_path: Path) -> None:
    values = random_values(SHAPES)
    manifests = []
    for layout in (Layout(), Layout(2, (0.4,)), Layout(4, (0.1, 0.55))):
        world = [hold(SHAPES, layout, rank, values) for rank in range(layout.world_size)]
        manifests.append(read_manifest(save_world(tmp_path / str(layout.world_size), 1, world)))
    for manifest in manifests:
        assert {name: tensor.content for name, tensor in manifest.tensors.items()} == {
            name: by_definition(value).hex for name, value in values.items()
        }
    assert len({manifest.content_digest for manifest in manifests}) == 1
    assert len({manifest.digest for manifest in manifests}) == 3
    values["model.up"][0, 0, 0] += 1
    changed = save_world(tmp_path / "changed", 1, [hold(SHAPES, Layout(), 0, values)])
    assert read_manifest(changed).content_digest != manifests[0].content_digest


def test_digest_as_the_manifest_says(tmp_path: Path) -> None:
    path = save_world(tmp_path, 1, [hold(SHAPES, Layout(), 0, random_values(SHAPES))])
    manifest = json.loads((path / "manifest.json").read_text())
    entries = [f"{name} {t['shape']} {t['dtype']} {t['content']}" for name, t in manifest["tensors"].items()]
    assert manifest["content_digest"] == digest_entries(reversed(entries)) == read_manifest(path).content_digest
    assert digest_entries([entries[0].replace("float32", "float64"), *entries[1:]]) != digest_entries(entries)
