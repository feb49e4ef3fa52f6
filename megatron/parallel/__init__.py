"""Basis of all parallelism: rank arithmetic, process groups, collectives, parameter records and shards, matrix products, random
numbers."""

from megatron.moved import find_moved

find_moved()
