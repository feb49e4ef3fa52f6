"""Activation memory: recomputation in backward, and offloading of saved tensors to host memory."""

from megatron.moved import find_moved

find_moved()
