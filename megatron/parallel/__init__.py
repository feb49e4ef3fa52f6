"""Rank arithmetic, process groups, collectives, parameter records, shards, random numbers."""

from megatron.moved import find_moved

find_moved()
