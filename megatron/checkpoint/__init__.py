"""Saves global tensors to files and loads them at any layout."""

from megatron.moved import find_moved

find_moved()
