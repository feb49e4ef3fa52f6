"""Copies the model over the ranks of a data group, or shards its state over them, and sums gradients."""

from megatron.moved import find_moved

find_moved()
