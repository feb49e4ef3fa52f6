"""The dtypes that checkpoints hold, by name: reading and writing files needs their width and their code, not torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """A dtype of stored elements."""

    code: str
    """In the header of a safetensors file."""
    itemsize: int
    """Bytes of an element."""


DTYPES = {
    "float64": DType("F64", 8),
    "float32": DType("F32", 4),
    "bfloat16": DType("BF16", 2),
    "float16": DType("F16", 2),
    "int64": DType("I64", 8),
}
"""By the name that the manifest gives (torch's, without the `torch.`)."""
