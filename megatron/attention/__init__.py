"""Attention kernels: from queries, keys and values to the attention output of each head. Projections are in `megatron.model`."""

from megatron.moved import find_moved

find_moved()
