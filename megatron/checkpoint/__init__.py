"""Checkpoints of global tensors: saving to files and loading at any layout."""

from megatron.moved import find_moved

find_moved()
