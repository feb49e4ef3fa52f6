"""Tensor parallelism: layers whose parameters are split over the ranks of a tensor group."""

from megatron.moved import find_moved

find_moved()
