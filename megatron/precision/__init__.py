"""Precision of the matrix products of linear layers: either the dtype of the model, or 8-bit floating point with scaling
factors."""

from megatron.moved import find_moved

find_moved()
