"""Mixtures of experts: who is chosen, how tokens travel, products of many matrices, balance. Definitions are in docs/moe.md."""

from megatron.moved import find_moved

find_moved()
