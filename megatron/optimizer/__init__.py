"""Optimizer over shards: main parameters and optimizer states, update rules, loss scaling, and squared norms for clipping."""

from megatron.moved import find_moved

find_moved()
